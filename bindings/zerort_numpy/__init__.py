"""Plain NumPy loops on zerort."""
