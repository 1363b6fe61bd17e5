"""The host as a `Device`: aligned NumPy memory (device.py), and streams that are worker threads (stream.py).

memory.py says how much memory there still is, footprint.py how much this process takes; reserve.py has addresses of
which ranges get memory and give it back.
"""
