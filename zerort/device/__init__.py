"""Memory, order and promises: `Device`, `Stream`, `Event`, `Ticket`, and pools of slabs.

host.py    NumPy memory; in host_stream.py its streams: worker threads with an ordered queue
pool.py    fixed slabs, leased and released
ticket.py  the promise that every asynchronous verb returns
cuda.py    a GPU through CuPy: imported by whoever asks for one, never from here
cuda_stream (streams, events) · cuda_pinned (host memory for copies) · cuda_library (the import of cupy)
"""

from zerort.device.host.device import HostDevice
from zerort.device.host.stream import HostEvent, HostStream
from zerort.device.pool import Lease, PoolCounters, SlabPool
from zerort.device.ticket import Done, Ticket, joined

__all__ = ["Done", "HostDevice", "HostEvent", "HostStream", "Lease", "PoolCounters", "SlabPool", "Ticket", "joined"]
