"""Sharded checkpoints. May import: buffer, comm, layout, native, errors."""
