"""Gradients from backward to the step: handed in to a unit, collected and summed in its sections.

unit.py        a unit's gradients: handed in, counted by micro-step, reduced
section.py     where a section's gradients are collected and summed, and where their sum rests
reduced.py     a step's gradients, whole, before the step
order.py       gradients of a framework's backward, reduced in one order on all ranks
"""
