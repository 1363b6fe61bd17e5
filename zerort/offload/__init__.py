"""Tiers below memory."""
