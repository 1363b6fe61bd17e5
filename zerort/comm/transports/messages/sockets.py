"""Sockets between hosts: where hosts reach each other over TCP, and whether that is as fast as MPI (decision 0197).

    1. one rank of each host tries the addresses of the next host, until somebody of the group answers there
    2. each rank listens at its host's address, and tells the others the port
    3. messages are timed over both; sockets carry them unless MPI is clearly faster, as it is on InfiniBand

MPI over Ethernet takes about three times the CPU time for a byte, on cores that others compute on. Connections are made
when the first message leaves (``native/src/sockets.h``). Whoever connects has to know 16 random bytes, which only ranks
of the group have been told, over MPI.
"""

from __future__ import annotations

import contextlib
import fcntl
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from zerort.comm.transports.messages.exchange import Exchange
from zerort.comm.transports.messages.network import Network
from zerort.config import GroupOptions
from zerort.errors import BootstrapError
from zerort.native.wire import open_sockets

__all__ = ["Interface", "candidates", "choose_wire", "connect_hosts", "interfaces", "is_preferable"]

_ANSWER_WITHIN: Final = 1.0
"""Seconds for one address of the next host."""

_MOST_TRIES: Final = 4
"""Addresses of a host that are tried: a firewall that swallows packets costs a second for each."""

_LONG_NBYTES: Final = 256 * 1024
_CLEARLY: Final = 1.5
"""How many times as long as over MPI a message may take: what was measured when a group opens is not exact."""

_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFNETMASK = 0x8915, 0x8913, 0x891B
_UP, _LOOPBACK = 0x1, 0x8

_reached: dict[tuple[Interface, ...], int | None] = {}
"""Which address answered, of hosts that were tried: groups are split, and the network stays."""


class Interface(NamedTuple):
    """An address of this host."""

    address: int
    """IPv4, as a number."""
    mask: int


def interfaces() -> tuple[Interface, ...]:
    """Return the addresses at which other hosts may reach this one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(asked, what, struct.pack("256s", name.encode()[:15]))

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                flags = struct.unpack("<H", ask(_SIOCGIFFLAGS, name)[16:18])[0]
                if flags & _UP and not flags & _LOOPBACK:
                    numbers = (ask(what, name)[20:24] for what in (_SIOCGIFADDR, _SIOCGIFNETMASK))
                    found.append(Interface(*(int.from_bytes(raw, "big") for raw in numbers)))
    return tuple(found)


def candidates(here: Sequence[Interface], there: Sequence[Interface]) -> list[int]:
    """Return the addresses of another host in the order in which they are tried: those of a network of this one first.

    >>> here = [Interface(0x0A000001, 0xFFFFFF00)]
    >>> [hex(one) for one in candidates(here, [Interface(0xAC110001, 0xFFFF0000), Interface(0x0A000002, 0xFFFFFF00)])]
    ['0xa000002', '0xac110001']
    """
    near = [one for one in there if any((one.address ^ mine.address) & mine.mask == 0 for mine in here)]
    ordered = dict.fromkeys(one.address for one in [*near, *there])
    own = {one.address for one in here}  # a bridge of containers has the same address on every host
    return [address for address in ordered if address not in own][:_MOST_TRIES]


def choose_wire(exchange: Exchange, measure: Callable[[], Network], *, options: GroupOptions) -> Network:
    """Have sockets carry messages to other hosts, unless MPI is clearly faster; return what they cost. Collective.

    Args:
        exchange: Whose messages.
        measure: Times messages between hosts; what it returns is the same on all ranks.
        options: The group's.
    """
    wire, over_mpi = exchange.wire, measure()
    if len(set(exchange.hosts)) == 1:
        return over_mpi
    wishes = exchange.comm.allgather(options.sockets)
    if "never" in wishes:
        return over_mpi
    insists = "always" in wishes
    sockets = connect_hosts(exchange.comm, exchange.hosts, is_compiled=wire.post is not None, insists=insists)
    if sockets is None:
        return over_mpi
    wire.use(sockets)
    over_sockets = measure()
    if insists or is_preferable(over_sockets, over_mpi):
        return over_sockets
    wire.use(None)
    return over_mpi


def connect_hosts(comm: MPI.Intracomm, hosts: Sequence[int], *, is_compiled: bool, insists: bool) -> Any:
    """Return the sockets of this rank to those of other hosts; None: only MPI reaches them. Collective.

    Args:
        comm: All ranks.
        hosts: For each rank, a number that tells its host.
        is_compiled: Whether messages of this rank can go that way at all.
        insists: Whether it is an error if they cannot be had.

    Raises:
        BootstrapError: That error; on all ranks.
    """
    rank, first = comm.Get_rank(), {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    if not all(comm.allgather(is_compiled and _has_room(len(hosts)))):
        return _without("the compiled module, and more files that a process may open (ulimit -n)", insists=insists)
    addresses = _find_addresses(comm, list(first.values()))
    if addresses is None:
        return _without("an address of each host at which the next one gets an answer", insists=insists)
    address_of = dict(zip(first, addresses, strict=True))
    listener = _listen(_text(address_of[hosts[rank]]))
    ports = comm.allgather(0 if listener is None else listener.getsockname()[1])
    token = comm.bcast(secrets.token_bytes(16))
    if listener is None or not all(ports):
        if listener is not None:
            listener.close()
        return _without("a port on which each rank can listen", insists=insists)
    peers = [(r, address_of[host], ports[r]) for r, host in enumerate(hosts) if host != hosts[rank]]
    return open_sockets(rank, token=token, listener=listener.detach(), peers=peers)


def _listen(address: str) -> socket.socket | None:
    try:
        listener = socket.create_server((address, 0), backlog=1024)
    except OSError:
        return None
    listener.settimeout(0)
    return listener


def _without(what: str, *, insists: bool) -> None:
    if insists:
        raise BootstrapError(f"Expected {what}, as ZERORT_SOCKETS=always needs, got none. Unset it: MPI does it all.")


def _has_room(ranks: int) -> bool:
    """Say whether this process may open a connection to and from each rank, and as many other files."""
    return 4 * ranks < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _find_addresses(comm: MPI.Intracomm, firsts: Sequence[int]) -> list[int] | None:
    """Return the address of each host at which the one before it has got an answer; None if one has got none.

    Args:
        comm: All ranks.
        firsts: A rank of each host.
    """
    rank = comm.Get_rank()
    mine = interfaces() if rank in firsts else ()
    with _answering(mine) as (port, token):
        told: list[tuple[tuple[Interface, ...], int, bytes]] = comm.allgather((mine, port, token))
        found = None
        if rank in firsts:
            next_one = firsts[(firsts.index(rank) + 1) % len(firsts)]
            found = _reach(mine, *told[next_one])
        by_rank = comm.allgather(found)
    found_of = [by_rank[firsts[place - 1]] for place in range(len(firsts))]
    return None if None in found_of else found_of


def _reach(here: Sequence[Interface], there: tuple[Interface, ...], port: int, token: bytes) -> int | None:
    if there not in _reached:
        answers = (address for address in candidates(here, there) if _is_answered(address, port, token))
        _reached[there] = next(answers, None)
    return _reached[there]


def _is_answered(address: int, port: int, token: bytes) -> bool:
    """Say whether the rank with this token listens there: another host may have the same address."""
    with contextlib.suppress(OSError), socket.create_connection((_text(address), port), _ANSWER_WITHIN) as asked:
        return asked.recv(len(token), socket.MSG_WAITALL) == token
    return False


@contextlib.contextmanager
def _answering(mine: tuple[Interface, ...]) -> Iterator[tuple[int, bytes]]:
    """Answer whoever connects, with a word of this rank's own, while the block runs; yield the port and that word."""
    token, listener = secrets.token_bytes(16), _listen("") if mine else None
    if listener is None:
        yield 0, token
        return
    with listener:
        listener.settimeout(None)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as asked:
                        asked.sendall(token)

        thread = threading.Thread(target=answer, name="zerort address check", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], token
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _text(address: int) -> str:
    return socket.inet_ntoa(address.to_bytes(4, "big"))


def is_preferable(sockets: Network, mpi: Network) -> bool:
    """Say whether messages go over sockets: unless MPI is clearly faster, for it takes more of the cores.

    >>> lan, infiniband = Network(50e-6, 10e-6, 1e9), Network(2e-6, 1e-6, 20e9)
    >>> is_preferable(lan, Network(40e-6, 9e-6, 1.2e9)), is_preferable(lan, infiniband)
    (True, False)
    """

    def seconds(network: Network) -> float:
        return network.latency + _LONG_NBYTES / network.bandwidth

    return seconds(sockets) <= _CLEARLY * seconds(mpi)
