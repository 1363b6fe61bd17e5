"""The Runtime and its units. May import: everything below."""
