"""The host as a `Device`: aligned NumPy memory, and streams that are worker threads with an ordered queue."""
