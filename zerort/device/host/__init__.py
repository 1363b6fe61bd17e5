"""The host as a `Device`: aligned NumPy memory (device.py), and streams that are worker threads (stream.py)."""
