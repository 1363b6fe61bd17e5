"""The host as a `Device`: aligned NumPy memory (device.py), and streams that are worker threads (stream.py).

memory.py says how much memory there still is, footprint.py how much this process takes.
"""
