"""Sockets between hosts: where hosts reach each other over TCP, and whether that is as fast as MPI (decision 0197).

    1. one rank of each host tries the addresses of each other host, until that one's rank answers
    2. each rank listens, and tells the others the port
    3. messages are timed over both; sockets carry them unless MPI is clearly faster, as it is on InfiniBand

MPI over Ethernet takes twice the CPU time for a byte or more, on cores that others compute on. Connections are made
when the first message leaves (``native/src/sockets.h``). Whoever connects has to know 16 random bytes, which only ranks
of the group have been told, over MPI.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from zerort.comm.transports.messages.exchange import Exchange
from zerort.comm.transports.messages.network import Network
from zerort.config import GroupOptions
from zerort.errors import BootstrapError
from zerort.native.wire import open_sockets

__all__ = ["Interface", "candidates", "choose_wire", "connect_hosts", "interfaces", "is_preferable", "send_buffer"]

_ANSWER_WITHIN: Final = 1.0
"""Seconds for one address of the next host."""

_MOST_TRIES: Final = 4
"""Addresses of a host that are tried: a firewall that swallows packets costs a second for each."""

_LONG_NBYTES: Final = 256 * 1024
_CLEARLY: Final = 1.5
"""How many times as long as over MPI a message may take: what was measured when a group opens is not exact."""

_BUFFER_NBYTES: Final = 512 * 1024
"""Of what a connection sends, the kernel may hold as much, or more where more is on its way.

What it holds beyond has left the caches when it is read there: over a third of TCP's CPU time (decision 0200)."""

_FAR: Final = 2e-3
"""Seconds to another host and back: within a data center it takes less (decision 0202)."""

_SIOCGIFADDR, _SIOCGIFFLAGS, _SIOCGIFNETMASK = 0x8915, 0x8913, 0x891B
_UP, _LOOPBACK = 0x1, 0x8

_AT_ONCE: Final = 32
"""Hosts that are tried at the same time."""

_reached: dict[tuple[Interface, ...], int] = {}
"""Which address answered, by those of a host: groups are split, and the network stays."""


class Interface(NamedTuple):
    """An address of this host."""

    address: int
    """IPv4, as a number."""
    mask: int


class _Answer(NamedTuple):
    """Where the first rank of a host answers, and what."""

    interfaces: tuple[Interface, ...]
    port: int
    token: bytes


def interfaces() -> tuple[Interface, ...]:
    """Return the addresses at which other hosts may reach this one: of fast links first, of bridges last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(asked, what, struct.pack("256s", name.encode()[:15]))

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                flags = struct.unpack("<H", ask(_SIOCGIFFLAGS, name)[16:18])[0]
                if flags & _UP and not flags & _LOOPBACK:
                    numbers = (ask(what, name)[20:24] for what in (_SIOCGIFADDR, _SIOCGIFNETMASK))
                    one = Interface(*(int.from_bytes(raw, "big") for raw in numbers))
                    found.append((os.path.isdir(f"/sys/class/net/{name}/bridge"), -_speed(name), one))
    return tuple(one for *_, one in sorted(found))


def _speed(name: str) -> int:
    """Return the Mbit/s of a link; 0 if nobody knows."""
    try:
        with open(f"/sys/class/net/{name}/speed", encoding="ascii") as file:
            return max(int(file.read()), 0)
    except (OSError, ValueError):
        return 0


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
        round_trip = max(exchange.comm.allgather(sockets.round_trip()))
        buffer = send_buffer(round_trip, over_sockets.bandwidth, granted=_granted_buffer())
        if buffer is not None:
            sockets.limit_buffers(buffer)
        if round_trip > _FAR:
            sockets.go_far()
        return dataclasses.replace(over_sockets, round_trip=round_trip or None)
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
    addresses = _find_addresses(comm, hosts, list(first.values()))
    if addresses is None:
        return _without("an address of each host at which each other one gets an answer", insists=insists)
    listener = _listen()
    ports = comm.allgather(0 if listener is None else listener.getsockname()[1])
    token = comm.bcast(secrets.token_bytes(16))
    if listener is None or not all(ports):
        if listener is not None:
            listener.close()
        return _without("a port on which each rank can listen", insists=insists)
    address_of = dict(zip(first, addresses, strict=True))
    peers = [(r, address_of[host], ports[r]) for r, host in enumerate(hosts) if host != hosts[rank]]
    return open_sockets(rank, token=token, listener=listener.detach(), peers=peers)


def _listen() -> socket.socket | None:
    try:
        listener = socket.create_server(("", 0), backlog=1024)
    except OSError:
        return None
    listener.settimeout(0)
    return listener


def _without(what: str, *, insists: bool) -> None:
    if insists:
        raise BootstrapError(f"Expected {what}, as ZERORT_SOCKETS=always needs, got none. Unset it: MPI does it all.")


def _has_room(ranks: int) -> bool:
    """Say whether this process may open a connection to and from each rank, and as many other files as it has now."""
    try:
        others = len(os.listdir("/proc/self/fd"))
    except OSError:
        others = 0
    return 2 * (others + 2 * ranks) < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _find_addresses(comm: MPI.Intracomm, hosts: Sequence[int], firsts: Sequence[int]) -> list[int] | None:
    """Return an address of each host at which this rank's host has got an answer; None if any host has got none.

    Args:
        comm: All ranks.
        hosts: For each rank, a number that tells its host.
        firsts: The first rank of each host. Another host may reach it elsewhere: networks differ.
    """
    rank = comm.Get_rank()
    mine = interfaces() if rank in firsts else ()
    with _answering(mine) as (port, token):
        told: list[_Answer] = comm.allgather(_Answer(mine, port, token))
        found: list[int | None] = []
        if rank in firsts:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                found = list(pool.map(lambda one: 0 if one == rank else _reach(mine, told[one]), firsts))
        by_rank = comm.allgather(found)
    if any(address is None for one in firsts for address in by_rank[one]):
        return None
    mine_first = hosts.index(hosts[rank])
    return [address or 0 for address in by_rank[mine_first]]


def _reach(here: Sequence[Interface], there: _Answer) -> int | None:
    if there.interfaces not in _reached:
        for address in candidates(here, there.interfaces):
            if _is_answered(address, there.port, there.token):
                _reached[there.interfaces] = address
                break
    return _reached.get(there.interfaces)


def _is_answered(address: int, port: int, token: bytes) -> bool:
    """Say whether the rank with this token listens there: another host may have the same address."""
    with contextlib.suppress(OSError), socket.create_connection((_text(address), port), _ANSWER_WITHIN) as asked:
        return asked.recv(len(token), socket.MSG_WAITALL) == token
    return False


@contextlib.contextmanager
def _answering(mine: tuple[Interface, ...]) -> Iterator[tuple[int, bytes]]:
    """Answer whoever connects, with a word of this rank's own, while the block runs; yield the port and that word."""
    token, listener = secrets.token_bytes(16), _listen() if mine else None
    if listener is None:
        yield 0, token
        return
    with listener:
        listener.settimeout(None)

        is_over = threading.Event()

        def answer() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as asked:  # whoever it is may hang up
                    asked.sendall(token)

        thread = threading.Thread(target=answer, name="zerort address check", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], token
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _text(address: int) -> str:
    return socket.inet_ntoa(address.to_bytes(4, "big"))


def send_buffer(round_trip: float, bandwidth: float, *, granted: int) -> int | None:
    """Return the bytes of a send buffer that does not hold a connection up; None: the kernel chooses.

    Args:
        round_trip: Seconds until the kernel of another host says that data has come; 0 if that is not known.
        bandwidth: Bytes per second.
        granted: The largest that the kernel allows.

    >>> send_buffer(100e-6, 125e6, granted=4 * 1024**2), send_buffer(100e-6, 5e9, granted=4 * 1024**2)
    (524288, 1000000)
    >>> send_buffer(20e-3, 5e9, granted=4 * 1024**2), send_buffer(100e-6, 125e6, granted=212992)
    (None, None)
    """
    wanted = max(_BUFFER_NBYTES, 2 * round_trip * bandwidth)
    return int(wanted) if round_trip and wanted <= granted else None


def _granted_buffer() -> int:
    """Return the bytes of the largest send buffer that can be had here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
        # Linux grants twice net.core.wmem_max: half of it is for its own records.
        return asked.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


def is_preferable(sockets: Network, mpi: Network) -> bool:
    """Say whether messages go over sockets: unless MPI is clearly faster, for it takes more of the cores.

    >>> lan, infiniband = Network(50e-6, 10e-6, 1e9), Network(2e-6, 1e-6, 20e9)
    >>> is_preferable(lan, Network(40e-6, 9e-6, 1.2e9)), is_preferable(lan, infiniband)
    (True, False)
    """

    def seconds(network: Network) -> float:
        return network.latency + _LONG_NBYTES / network.bandwidth

    return seconds(sockets) <= _CLEARLY * seconds(mpi)
