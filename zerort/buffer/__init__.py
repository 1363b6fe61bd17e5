"""Flat buffers and how they are redistributed. May import: comm, device, layout, native."""
