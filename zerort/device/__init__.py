"""Memory, order and promises: `Device`, `Stream`, `Event`, `Ticket`, and slots of memory.

host/      NumPy memory, and streams: worker threads with an ordered queue
slots.py   pieces of memory that are used again and again
ticket.py  the promise that every asynchronous verb returns
cuda/      a GPU through CuPy: imported by whoever asks for one, never from here
"""

from zerort.device.host.device import HostDevice
from zerort.device.host.stream import HostEvent, HostStream, owns
from zerort.device.ticket import Done, Ticket, joined

__all__ = ["Done", "HostDevice", "HostEvent", "HostStream", "Ticket", "joined", "owns"]
