"""Messages of MPI without the GIL: the native forms of what ``zerort/comm/transports`` does between hosts.

    open_library    MPI as mpi4py has loaded it: functions by address, handles as they are there
    start_messages  send and receive; its ``wait(seconds, busy)`` says whether all have gone and come
    plan_greeting   how one rank of each host tells the others of a call
    prepare_hosts   a small call between hosts that is made again, in one step (``src/hosts.h``)

All of them need the compiled form: without it `open_library` returns None, and mpi4py carries messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from zerort.native.arrays import address_of
from zerort.native.dtypes import Array
from zerort.native.extension import kernels

__all__ = ["CONCLUDING", "GREETING", "LISTENING", "open_library", "plan_greeting", "prepare_hosts", "start_messages"]

GREETING, LISTENING, CONCLUDING = 24, 32, 40
"""How far a native ``HostsCall`` came, besides what a ``PreparedCall`` says."""


def open_library(**facts: int) -> Any:
    """Return MPI as the compiled form calls it; None without one.

    Args:
        facts: ``isend``, ``irecv``, ``testall``: addresses of functions; ``handle_nbytes``, ``status_nbytes``; handles:
            ``comm``, and ``byte`` of ``MPI_BYTE``.
    """
    return None if kernels is None else kernels.MpiLibrary(**facts)


def start_messages(
    library: Any, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]], *, tag: int
) -> Any:
    """Begin to send and receive; the arrays must live until ``wait`` has said that all is done."""
    assert kernels is not None
    messages = kernels.Messages(library)
    messages.start(
        [(rank, address_of(array), array.nbytes) for rank, array in sends],
        [(rank, address_of(array), array.nbytes) for rank, array in receives],
        tag,
    )
    return messages


def plan_greeting(library: Any, *, messages: Array, parts: Array, **facts: Any) -> Any:
    """Return what a leader's ``HostsCall`` needs to greet other hosts; rows of ``parts`` are like the messages'."""
    assert kernels is not None
    stride, places = messages.shape[1], {"messages": address_of(messages), "parts": address_of(parts)}
    return kernels.GreetingPlan(mpi=library, stride=stride, **places, **facts)


def prepare_hosts(link: Any, log: Any, *, notes: Array, make: Any, **call: Any) -> Any:
    """Return a native ``HostsCall`` (``src/hosts.cpp``).

    Args:
        link: The native rendezvous of this host.
        log: Where it notes its runs.
        notes: In the host's window: a line for flags, then room for the result.
        make: Returns a new array for the result, if the caller gives no out; else None.
        call: The rest, by the names that are given there.
    """
    assert kernels is not None
    weak_references = weakref.getweakrefcount
    return kernels.HostsCall(link, log, notes=address_of(notes), make=make, weak_references=weak_references, **call)
