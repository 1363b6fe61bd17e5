"""`Wire`: hands messages to MPI or to sockets, and waits for them: compiled without the GIL, else by mpi4py.

A thread that polls from Python takes the GIL from who computes at every look, and each look costs as much as a short
message takes (decision 0168). The compiled form calls the very library that mpi4py has loaded, by the addresses of its
functions; where they are not found, mpi4py's own requests are polled.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Protocol

from mpi4py import MPI

from zerort.native import wire
from zerort.typing import Array

__all__ = ["Copies", "Parts", "Requests", "UnderWay", "Wire"]

_NAP = 50e-6

Parts = Sequence[tuple[int, Array]]
"""What goes to ranks, or comes from them."""

Copies = Sequence[tuple[Array, Array]]
"""(to, from)"""


class UnderWay(Protocol):
    """Messages that were begun."""

    def wait(self, seconds: float, busy: float, /) -> bool:
        """Wait up to ``seconds``, with short naps for the first ``busy``; say whether all have gone and come."""


class Requests:
    """Messages that were begun by mpi4py.

    Args:
        requests: Its requests.
        nap: Seconds between looks when they have taken long.
    """

    def __init__(self, requests: list[Any], *, nap: float = _NAP) -> None:
        self._requests, self._nap = requests, nap

    def wait(self, seconds: float, busy: float, /) -> bool:
        """Poll as `UnderWay` says."""
        began = time.monotonic()
        while not MPI.Request.Testall(self._requests):
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            # Yield at first, for the other side may need this core to answer; later leave it alone for longer.
            time.sleep(0 if waited < busy else self._nap)
        return True


class Wire:
    """Messages over one communicator.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.post = _find_post(comm)
        """Who carries messages, as the compiled form calls it; None if it cannot."""
        self.sockets: Any = None
        """What carries those to other hosts; None: MPI."""

    def use(self, sockets: Any) -> None:
        """Have sockets carry messages to the ranks that they know, from now on; None: have MPI do it.

        Nothing is under way. Every rank calls this.
        """
        self.close()
        self.sockets = sockets
        self.post = wire.with_sockets(self.post, sockets)

    def close(self) -> None:
        """Break the connections of sockets."""
        if self.sockets is not None:
            self.sockets.close()

    def start(self, sends: Parts, receives: Parts, *, call: int, is_greeting: bool) -> UnderWay:
        """Begin to send and receive.

        Args:
            sends: (rank, bytes); contiguous, and kept until all is done.
            receives: (rank, room for bytes); the same.
            call: The number of the call that they are for.
            is_greeting: They are greetings, and may be shorter than their room; else the call's data, which fills it.
        """
        if self.post is not None:
            begun: UnderWay = wire.start_messages(self.post, sends, receives, call=call, is_greeting=is_greeting)
            return begun
        comm, requests, tag = self._comm, [], int(is_greeting)  # the very tags of the compiled form
        requests += [comm.Irecv([room, MPI.BYTE], source=rank, tag=tag) for rank, room in receives]
        requests += [comm.Isend([mine, MPI.BYTE], dest=rank, tag=tag) for rank, mine in sends]
        return Requests(requests)


def _find_post(comm: MPI.Intracomm) -> Any:
    sizes = {MPI._sizeof(kind) for kind in (MPI.Comm, MPI.Datatype, MPI.Request)}
    if len(sizes) > 1:
        return None
    try:
        loaded = ctypes.CDLL(MPI.__file__)
        found = {
            name: ctypes.cast(getattr(loaded, f"MPI_{name.capitalize()}"), ctypes.c_void_p).value or 0
            for name in ("isend", "irecv", "testall")
        }
        comm_handle, byte = MPI._handleof(comm), MPI._handleof(MPI.BYTE)
    except (AttributeError, OSError):
        return None
    mask = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
    return wire.open_post(
        **found,
        handle_nbytes=sizes.pop(),
        status_nbytes=MPI._sizeof(MPI.Status),
        comm=comm_handle & mask,
        byte=byte & mask,
    )
