"""Optimizers over 1-D shards. May import: native, layout, config, errors."""
