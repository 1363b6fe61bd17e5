"""`Exchange`: messages between ranks over MPI, in pieces that MPI can carry, with an eye on the clock and on alarms.

The one place that hands memory to MPI. Everything is non-blocking and polled, because a blocking MPI call cannot be
left when a rank it waits for is gone. A rank that gives up, or leaves, sends an alarm to all others; whoever waits
reads its alarms meanwhile, so one rank's timeout is everybody's within milliseconds.

[Note: threads]
Messages are the business of one thread. Alarms are not: a thread that watches over a GPU hears and sounds them, too.
Where MPI was started below MPI_THREAD_MULTIPLE only the thread that opened this may call it: what others sound leaves
when that one next listens, and what it has heard is all that others know.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from zerort import trace
from zerort.comm.neighbours import process_space
from zerort.native.rendezvous import is_alive
from zerort.typing import Array

__all__ = ["Alarm", "Exchange", "Interrupted"]

_LISTEN_EVERY = 0.01
"""Seconds between looks at the alarms while waiting."""

_LOOK_EVERY = 0.1
"""Seconds between looks at the processes of this host while waiting."""

_BUSY_FOR = 0.005
"""Seconds to poll without sleeping: most messages are there by then."""

_NAP = 50e-6


_abandoned: list[object] = []
"""Requests that were given up, and their memory: MPI may still write there, so it is never given back."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rank said when it gave up or left."""

    rank: int
    sequence: int
    """The first call in which the rank takes no part."""
    reason: str
    """``"gave up"``, ``"left"``, ``"failed"`` or, sounded for it by a rank of its host, ``"died"``."""
    last: str
    """What it was doing; of one that left, the words of its `Standing`."""

    @property
    def is_gone(self) -> bool:
        """Whether the rank takes part no longer and has nothing to complain of."""
        return self.reason in ("left", "died")


class Interrupted(Exception):
    """Waiting makes no sense any more: time is up, or an alarm came. The transport finds the words."""


class Exchange:
    """One rank's side of a private copy of a communicator.

    Args:
        comm: Duplicated twice: for messages, and for alarms. Collective.
        hosts: For each rank, a number that tells its host.
        message_nbytes: The largest single message.
        timeout: Seconds after which waiting is given up.
    """

    def __init__(self, comm: MPI.Intracomm, *, hosts: list[int], message_nbytes: int, timeout: float) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.hosts = hosts
        self.alarms: dict[int, Alarm] = {}
        self._alarm_comm = comm.Dup()
        self._message_nbytes = message_nbytes
        self._timeout = timeout
        self._unsent: collections.deque[Alarm] = collections.deque()
        self._mail: list[tuple[MPI.Request, bytes]] = []
        self._only_thread = None if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else threading.get_ident()
        self._alarming = threading.Lock()  # a probe by one thread must not find what another is about to receive
        self._hushed = False
        where = comm.allgather((hosts[self.rank], process_space(), os.getpid()))
        self._neighbours = {
            rank: pid
            for rank, (*place, pid) in enumerate(where)
            if place == [*where[self.rank][:2]] and rank != self.rank and is_alive(pid)  # hidden ones cannot be told
        }

    def all_gather_bytes(self, mine: bytes, *, sequence: int) -> list[bytes]:
        """Return every rank's bytes; all give equally many."""
        everyone = np.empty((self.size, len(mine)), np.uint8)
        requests: list[Any] = []
        with _kept(requests, mine, everyone):
            requests.append(self.comm.Iallgather([np.frombuffer(mine, np.uint8), MPI.BYTE], [everyone, MPI.BYTE]))
            self._wait(requests, sequence=sequence)
        return [row.tobytes() for row in everyone]

    def swap(
        self,
        sends: Iterable[tuple[int, Array]],
        receives: Iterable[tuple[int, Array]],
        *,
        sequence: int,
    ) -> None:
        """Send and receive 1-D arrays, all at once, and return when all have gone and come.

        Args:
            sends: (to rank, array). Several to one rank arrive in this order.
            receives: (from rank, array to fill).
            sequence: The call that this belongs to; an alarm of an earlier one interrupts it.
        """
        sends, receives = list(sends), list(receives)
        limit = self._message_nbytes
        requests: list[Any] = []
        with _kept(requests, sends, receives):
            for rank, array in receives:
                requests.extend(self.comm.Irecv([piece, MPI.BYTE], source=rank) for piece in _pieces(array, limit))
            for rank, array in sends:
                if self.hosts[rank] != self.hosts[self.rank]:
                    trace.count("wire.bytes", array.nbytes)
                requests.extend(self.comm.Isend([piece, MPI.BYTE], dest=rank) for piece in _pieces(array, limit))
            self._wait(requests, sequence=sequence)

    def _wait(self, requests: list[Any], *, sequence: int) -> None:
        """Poll until all ``requests`` are done.

        Raises:
            Interrupted: Not done after the timeout, or an alarm says that they never will be.
        """
        began = listened = looked = time.monotonic()
        while not MPI.Request.Testall(requests):
            now = time.monotonic()
            if now - listened >= _LISTEN_EVERY:
                listened = now
                self.listen()
                if now - looked >= _LOOK_EVERY:
                    looked = now
                    self._look_for_the_dead(sequence)
                lost = any(alarm.sequence <= sequence for alarm in self.alarms.values())
                if lost or now - began >= self._timeout:
                    raise Interrupted
            # Yield at first, for the other side may need this core to answer; later leave it alone for longer.
            time.sleep(0 if now - began < _BUSY_FOR else _NAP)

    def listen(self) -> None:
        """Read the alarms that have come, and send those that wait for this thread."""
        if self._only_thread not in (None, threading.get_ident()):
            return
        with self._alarming:
            if not self._hushed:
                self._send()
                self._receive()

    def _look_for_the_dead(self, sequence: int) -> None:
        """Sound the alarm that a process of this host, which ended without a word, cannot sound itself."""
        for rank, pid in self._neighbours.items():
            if rank not in self.alarms and not is_alive(pid):
                self.alarms[rank] = Alarm(rank, sequence, "died", "")
                self.sound(self.alarms[rank])

    def sound(self, alarm: Alarm) -> None:
        """Send an alarm to every other rank. Does not wait for anyone to hear it."""
        self._unsent.append(alarm)
        self.listen()

    def hush(self) -> None:
        """Hear and sound no more alarms: the last have been sent, and MPI is about to end."""
        if not MPI.Is_finalized():
            self.listen()
        with self._alarming:
            self._hushed = True

    def _send(self) -> None:
        while self._unsent:
            alarm = self._unsent.popleft()
            raw = json.dumps({name: getattr(alarm, name) for name in Alarm.__dataclass_fields__}).encode()
            for rank in range(self.size):
                if rank != self.rank:
                    self._mail.append((self._alarm_comm.Isend([raw, MPI.BYTE], dest=rank), raw))

    def _receive(self) -> None:
        status = MPI.Status()
        while self._alarm_comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
            raw = bytearray(status.Get_count(MPI.BYTE))
            self._alarm_comm.Recv([raw, MPI.BYTE], source=status.Get_source())
            alarm = Alarm(**json.loads(raw))
            self.alarms.setdefault(alarm.rank, alarm)  # a rank that gave up leaves later: the first word says why

    def close(self, *, patience: float) -> None:
        """Free the communicators if every rank is there to do so within ``patience`` seconds; else leave them be."""
        with contextlib.suppress(MPI.Exception):
            # Not over `comm`, where it would be taken for the call that a rank makes which does not close yet.
            request, deadline = self._alarm_comm.Ibarrier(), time.monotonic() + patience
            while not request.Test():
                if time.monotonic() > deadline:
                    return
                time.sleep(_NAP)
            for mail, _ in self._mail:
                mail.Wait()
            self._receive()
            self._alarm_comm.Free()
            self.comm.Free()


@contextlib.contextmanager
def _kept(requests: list[Any], *memory: object) -> Iterator[None]:
    """Keep ``memory`` for ever if its requests are left before they are done: MPI may still write there."""
    try:
        yield
    except BaseException:
        _abandoned.append((requests, memory))
        raise


def _pieces(array: Array, limit: int) -> Iterable[Array]:
    raw = array.view(np.uint8)
    return (raw[first : first + limit] for first in range(0, raw.size, limit))
