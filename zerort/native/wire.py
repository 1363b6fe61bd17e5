"""Messages between hosts without the GIL: the native forms of what ``zerort/comm/transports`` does there.

    open_post       who carries messages: MPI as mpi4py has loaded it, functions by address, handles as they are there
    open_sockets    TCP, to the ranks of other hosts; `with_sockets` has these carry what they can
    start_messages  send and receive; its ``wait(seconds, busy)`` says whether all have gone and come
    plan_rounds     the messages of a long call, several rounds at a time
    open_ahead      those of its first sends that need not wait until all have agreed on it; `aim_ahead` says which
    plan_greeting   how one rank of each host tells the others of a call
    prepare_hosts   a small call between hosts that is made again, in one step (``src/hosts.h``)

All of them need the compiled form: without it `open_post` returns None, and mpi4py carries messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from zerort.native.arrays import address_of
from zerort.native.dtypes import Array
from zerort.native.extension import kernels

__all__ = [
    "CONCLUDING",
    "GREETING",
    "LISTENING",
    "aim_ahead",
    "open_ahead",
    "open_post",
    "open_sockets",
    "plan_greeting",
    "plan_rounds",
    "prepare_hosts",
    "start_messages",
    "with_sockets",
]

GREETING, LISTENING, CONCLUDING = 24, 32, 40
"""How far a native ``HostsCall`` came, besides what a ``PreparedCall`` says."""


def open_post(**facts: int) -> Any:
    """Return MPI as the compiled form hands messages to it; None without one.

    Args:
        facts: ``isend``, ``irecv``, ``testall``: addresses of functions; ``handle_nbytes``, ``status_nbytes``; handles:
            ``comm``, and ``byte`` of ``MPI_BYTE``.
    """
    return None if kernels is None else kernels.Post(kernels.MpiLibrary(**facts), None)


def open_sockets(rank: int, *, token: bytes, listener: int, peers: Sequence[tuple[int, int, int]]) -> Any:
    """Return what carries messages over TCP (``src/sockets.h``).

    Args:
        rank: This one.
        token: 16 bytes that all ranks of the group know, and nobody else.
        listener: The file descriptor of a socket that listens; it is closed by this.
        peers: Of each rank that is reached so: its number, IPv4 address and port.
    """
    assert kernels is not None
    return kernels.Sockets(rank, token=token, listener=listener, peers=list(peers))


def with_sockets(post: Any, sockets: Any) -> Any:
    """Return a post whose messages to ranks that ``sockets`` know go over them; None: all go over MPI."""
    assert kernels is not None
    return kernels.Post(post.mpi, sockets)


def start_messages(
    post: Any,
    sends: Sequence[tuple[int, Array]],
    receives: Sequence[tuple[int, Array]],
    *,
    call: int,
    is_greeting: bool,
) -> Any:
    """Begin to send and receive; the arrays must live until ``wait`` has said that all is done.

    Args:
        post: Who carries messages.
        sends: To a rank, an array.
        receives: From a rank, room for an array.
        call: The number of the call that they are for.
        is_greeting: They are greetings, and may be shorter than their room; else the call's data, which fills it.
    """
    assert kernels is not None
    messages = kernels.Messages(post)
    messages.start(
        [(rank, address_of(array), array.nbytes) for rank, array in sends],
        [(rank, address_of(array), array.nbytes) for rank, array in receives],
        call=call,
        is_greeting=is_greeting,
    )
    return messages


def plan_rounds(
    post: Any,
    rounds: Sequence[tuple[Sequence[tuple[int, Array]], Sequence[tuple[int, Array]], Sequence[tuple[Array, Array]]]],
    *,
    depth: int,
    ahead: Any,
) -> Any:
    """Return a native ``Rounds`` (``src/rounds.h``), which knows the arrays by their addresses.

    Args:
        post: Who carries messages.
        rounds: Of each: what it sends to ranks, what it receives from them, and what is copied: (to, from).
        depth: How many are under way at a time.
        ahead: The native ``Ahead`` that may have sent what the first of them would; None if there is none.
    """
    assert kernels is not None
    return kernels.Rounds(
        post,
        [
            (_parts(sends), _parts(receives), [(address_of(to), address_of(given), to.nbytes) for to, given in copies])
            for sends, receives, copies in rounds
        ],
        depth=depth,
        ahead=ahead,
    )


def open_ahead(post: Any) -> Any:
    """Return a native ``Ahead`` (``src/rounds.h``): what a rank sends before all have agreed on a call; nothing yet."""
    assert kernels is not None
    return kernels.Ahead(post)


def aim_ahead(ahead: Any, source: Array, rounds: Sequence[Sequence[tuple[int, Array]]]) -> None:
    """Have ``ahead`` send these parts of an array from now on, of each of the first rounds."""
    ahead.aim(address_of(source), [_parts(sends) for sends in rounds])


def _parts(arrays: Sequence[tuple[int, Array]]) -> list[tuple[int, int, int]]:
    return [(rank, address_of(array), array.nbytes) for rank, array in arrays]


def plan_greeting(post: Any, *, messages: Array, parts: Array, **facts: Any) -> Any:
    """Return what a leader's ``HostsCall`` needs to greet other hosts; rows of ``parts`` are like the messages'."""
    assert kernels is not None
    stride, places = messages.shape[1], {"messages": address_of(messages), "parts": address_of(parts)}
    return kernels.GreetingPlan(post=post, stride=stride, **places, **facts)


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
