"""`RawSockets`: plain TCP connections between hosts, which carry as many bytes as a collective does, and nothing else.

As many ranks of each host talk as the smallest host has, each to its like on every other host: no algorithm between
hosts gets more out of the kernel than all pairs at once, on as many connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence

from zerort.cli.bench.hosts.wire import Phase
from zerort.cli.world import World

__all__ = ["RawSockets"]

_BUFFER_NBYTES = 1024**2
_PATIENCE = 60.0
"""Seconds that a connection may be silent."""


class RawSockets:
    """One rank's connections. Making it is collective.

    Args:
        world: All ranks.
        hosts: For each rank, the number of its host.
    """

    def __init__(self, world: World, hosts: Sequence[int]) -> None:
        self._members = [[r for r, host in enumerate(hosts) if host == number] for number in sorted(set(hosts))]
        self._lanes = min(map(len, self._members))
        self._host = hosts[world.rank]
        local = self._members[self._host].index(world.rank)
        self._lane = local if local < self._lanes else None
        self._peers: dict[int, socket.socket] = {}
        self._out, self._into = memoryview(bytearray(_BUFFER_NBYTES)), memoryview(bytearray(_BUFFER_NBYTES))
        self._connect(world)

    def _connect(self, world: World) -> None:
        """Connect to the same lane of every other host: the higher host calls, the lower answers."""
        with contextlib.closing(socket.create_server(("", 0), backlog=len(self._members))) as server:
            server.settimeout(_PATIENCE)
            places = world.all((_own_address(), server.getsockname()[1]))
            if self._lane is not None:
                for host in range(self._host):
                    peer = socket.create_connection(places[self._members[host][self._lane]], timeout=_PATIENCE)
                    peer.sendall(self._host.to_bytes(4, "little"))
                    self._peers[host] = peer
                for _ in range(self._host + 1, len(self._members)):
                    peer, _ = server.accept()
                    peer.settimeout(_PATIENCE)
                    self._peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer
            world.meet()
        for peer in self._peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(0.0)

    def carry(self, phases: Sequence[Phase]) -> None:
        """Send and receive what the phases say, all pairs of hosts at once, phase after phase."""
        for phase in phases:
            to_send = {host: self._part(phase[self._host][host]) for host in self._peers}
            to_receive = {host: self._part(phase[host][self._host]) for host in self._peers}
            with selectors.DefaultSelector() as selector:
                for host in self._peers:
                    self._watch(selector, host, to_send, to_receive)
                while selector.get_map():
                    ready = selector.select(_PATIENCE)
                    if not ready:
                        raise TimeoutError(f"Expected bytes between hosts within {_PATIENCE:.0f} s, got none.")
                    for key, events in ready:
                        host, peer = key.data, self._peers[key.data]
                        with contextlib.suppress(BlockingIOError):
                            if events & selectors.EVENT_READ:
                                got = peer.recv_into(self._into[: to_receive[host]])
                                if got == 0:
                                    raise ConnectionError("Expected bytes from another host, got the connection's end.")
                                to_receive[host] -= got
                            if events & selectors.EVENT_WRITE:
                                to_send[host] -= peer.send(self._out[: to_send[host]])
                        if not (to_send[host] and to_receive[host]):
                            self._watch(selector, host, to_send, to_receive)

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()

    def _part(self, nbytes: int) -> int:
        """Return this lane's part of what a pair of hosts exchanges."""
        assert self._lane is not None
        return nbytes * (self._lane + 1) // self._lanes - nbytes * self._lane // self._lanes

    def _watch(
        self, selector: selectors.BaseSelector, host: int, to_send: dict[int, int], to_receive: dict[int, int]
    ) -> None:
        events = selectors.EVENT_WRITE * bool(to_send[host]) | selectors.EVENT_READ * bool(to_receive[host])
        peer = self._peers[host]
        if peer in selector.get_map():
            selector.unregister(peer)
        if events:
            selector.register(peer, events, host)


def _own_address() -> str:
    return socket.gethostbyname(socket.gethostname())
