"""``zerort bench optimizer``: fused updates against the memory limit, their NumPy forms and torch."""
