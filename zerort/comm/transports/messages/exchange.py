"""`Exchange`: messages between ranks over MPI, in pieces that MPI can carry, with an eye on the clock and on alarms.

Only its `Wire` hands memory to MPI. Everything is non-blocking and polled, because a blocking MPI call cannot be left
when a rank it waits for is gone. A rank that gives up, or leaves, sounds an alarm (alarms.py); whoever waits reads its
alarms meanwhile, so one rank's timeout is everybody's within milliseconds.

[Note: threads]
Messages are the business of one thread. Alarms are not: a thread that watches over a GPU hears and sounds them, too.
Where MPI was started below MPI_THREAD_MULTIPLE only the thread that opened this may call it: what others sound leaves
when that one next listens, and what it has heard is all that others know.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from zerort import trace
from zerort.comm.neighbours import process_space
from zerort.comm.transports.messages.alarms import Alarm, Alarms
from zerort.comm.transports.messages.wire import Copies, Parts, Requests, UnderWay, Wire
from zerort.native import wire
from zerort.native.rendezvous import is_alive
from zerort.typing import Array

__all__ = ["LISTEN_EVERY", "Exchange", "Interrupted", "Messages", "PlannedRounds"]

LISTEN_EVERY = 0.01
"""Seconds between looks at the alarms while waiting."""

_LOOK_EVERY = 0.1
"""Seconds between looks at the processes of this host while waiting."""

_BUSY_FOR = 0.005
"""Seconds to poll without sleeping: most messages are there by then."""

_ASLEEP = 0.0
"""The same where the kernel is asked at once to wake this rank: others want its core, or it will take a while."""

_NAP = 50e-6
"""Between two looks at what has no end yet, when a group closes."""

_IDLE_NAP = 1e-3
"""Between two looks at what others have yet to begin."""

_LONG_NBYTES = 256 * 1024
"""Messages of this size and more take longer than a nap, and polling would take the core from who computes."""

_LONG_ON_SOCKETS_NBYTES = 64 * 1024
"""The same where there are no naps: the kernel wakes whoever waits for them."""


_abandoned: list[object] = []
"""Requests that were given up, and their memory: MPI may still write there, so it is never given back."""


@dataclass(slots=True, eq=False)
class Messages:
    """Messages under way, with their memory."""

    under_way: UnderWay
    sends: list[tuple[int, Array]]
    receives: list[tuple[int, Array]]


_outstanding: dict[int, object] = {}
"""Messages that have not been waited for; those that were given up stay here for the reason above."""


class PlannedRounds:
    """Rounds of messages that native code sends and receives, as often as they are begun (``native/src/rounds.h``).

    Args:
        native: The native ``Rounds``.
        nbytes: What they send to other hosts.
        is_long: Whether one takes longer than a nap.
    """

    def __init__(self, native: Any, *, nbytes: int, is_long: bool) -> None:
        self._native, self._nbytes = native, nbytes
        self.is_long = is_long
        self.until = 0
        """How many of the rounds are waited for."""

    def begin(self, sequence: int, *memory: object) -> None:
        """Start from the first round again, for the call with this number.

        Their ``memory`` is kept until `end`, for ever if that does not come.
        """
        self._native.begin(sequence)  # nothing is sent before it is waited for
        _outstanding[id(self)] = (self, memory)
        if self._nbytes:
            trace.count("wire.bytes", self._nbytes)

    @property
    def done(self) -> int:
        """How many of the rounds are done."""
        found: int = self._native.done
        return found

    def wait(self, seconds: float, busy: float, /) -> bool:
        """Wait as `UnderWay` says, for the rounds that are waited for."""
        done: bool = self._native.wait(self.until, seconds, busy)  # not-gpu: messages between hosts
        return done

    def end(self) -> None:
        """All of them are done: their memory is the caller's again."""
        del _outstanding[id(self)]


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
        self.wire = Wire(self.comm)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.hosts = hosts
        self.busy_for = _BUSY_FOR
        """Seconds for which this rank polls for a short message."""
        self._alarm_comm = comm.Dup()
        self._message_nbytes = message_nbytes
        self._timeout = timeout
        self._unsent: collections.deque[Alarm] = collections.deque()
        self._mail: list[tuple[MPI.Request, bytes]] = []
        self._only_thread = None if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else threading.get_ident()
        self._alarming = threading.Lock()  # a probe by one thread must not find what another is about to receive
        self._hushed = False
        self._alarms = Alarms(self.rank, self.size, send=self._mail_to, receive=self._next_mail)
        where = comm.allgather((hosts[self.rank], process_space(), os.getpid()))
        self._neighbours = {
            rank: pid
            for rank, (*place, pid) in enumerate(where)
            if place == [*where[self.rank][:2]] and rank != self.rank and is_alive(pid)  # hidden ones cannot be told
        }

    def sleep_at_once(self) -> None:
        """Poll no more for messages that sockets carry: more ranks wait for them than there are cores."""
        self.busy_for = _ASLEEP

    def trade(
        self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]], *, sequence: int
    ) -> None:
        """Send and receive greetings, each in one message; what comes may be shorter than the room for it."""
        with _kept(None, sends, receives):
            under_way = self.wire.start(sends, receives, call=sequence, is_greeting=True)
        self.await_greeting(under_way, sends, receives, sequence=sequence)

    def await_greeting(self, under_way: UnderWay, *memory: object, sequence: int) -> None:
        """Wait for messages that were begun; keep their ``memory`` for ever if that is given up."""
        with _kept(under_way, *memory):
            self._wait(under_way, sequence=sequence, busy_for=self.busy_for)

    def all_gather_bytes(self, mine: bytes, *, sequence: int, is_idle: bool = False) -> list[bytes]:
        """Return every rank's bytes; all give equally many.

        Args:
            mine: This rank's.
            sequence: The call that they belong to.
            is_idle: The others will take a while, and want the cores: look seldom.
        """
        everyone = np.empty((self.size, len(mine)), np.uint8)
        request = self.comm.Iallgather([np.frombuffer(mine, np.uint8), MPI.BYTE], [everyone, MPI.BYTE])
        requests = Requests([request], nap=_IDLE_NAP) if is_idle else Requests([request])
        with _kept(request, mine, everyone):
            self._wait(requests, sequence=sequence, busy_for=_ASLEEP if is_idle else _BUSY_FOR)
        return [row.tobytes() for row in everyone]

    def start(
        self, sends: Iterable[tuple[int, Array]], receives: Iterable[tuple[int, Array]], *, sequence: int
    ) -> Messages:
        """Begin to send and receive 1-D arrays, all at once; `finish` waits until all have gone and come.

        Args:
            sends: (to rank, array). Several to one rank arrive in this order.
            receives: (from rank, array to fill).
            sequence: The call that they belong to.
        """
        given, wanted = list(sends), list(receives)
        abroad = self._abroad(given)
        if abroad:
            trace.count("wire.bytes", abroad)
        out, into = (_cut(parts, self._message_nbytes) for parts in (given, wanted))
        with _kept(None, given, wanted):
            messages = Messages(self.wire.start(out, into, call=sequence, is_greeting=False), given, wanted)
        _outstanding[id(messages)] = messages
        return messages

    def plan(
        self, rounds: Sequence[tuple[Parts, Parts, Copies]], *, depth: int, source: Array, ahead: Any
    ) -> PlannedRounds | None:
        """Return rounds of messages for native code; None if there is none.

        Args:
            rounds: Of each what it sends, what it receives, and what is copied when that is done: (to, from).
            depth: How many are under way at a time.
            source: The array of which parts are sent.
            ahead: From `open_ahead`: what of the first rounds may leave before they are begun; None if nothing may.
        """
        if self.wire.post is None:
            return None
        limit = self._message_nbytes
        cut = [(_cut(sends, limit), _cut(receives, limit), copies) for sends, receives, copies in rounds]
        if ahead is not None:
            wire.aim_ahead(ahead, source, [sends for sends, _, _ in cut[:depth]])
        return PlannedRounds(
            wire.plan_rounds(self.wire.post, cut, depth=depth, ahead=ahead),
            nbytes=sum(self._abroad(sends) for sends, _, _ in rounds),
            is_long=any(self._is_long(receives) for _, receives, _ in rounds),
        )

    def open_ahead(self) -> Any:
        """Return what sends the first rounds of a plan before all have agreed on the call; over sockets only."""
        return wire.open_ahead(self.wire.post)

    def _abroad(self, sends: Parts) -> int:
        return sum(array.nbytes for rank, array in sends if self.hosts[rank] != self.hosts[self.rank])

    def _is_long(self, receives: Parts) -> bool:
        least = _LONG_NBYTES if self.wire.sockets is None else _LONG_ON_SOCKETS_NBYTES
        return sum(array.nbytes for _, array in receives) >= least

    def finish(self, messages: Messages, *, sequence: int) -> None:
        """Wait until messages have gone and come.

        Args:
            messages: What `start` returned.
            sequence: The call that they belong to; an alarm of an earlier one interrupts it.

        Raises:
            Interrupted: As in `_wait`.
        """
        busy_for = _ASLEEP if self._is_long(messages.receives) else self.busy_for
        self._wait(messages.under_way, sequence=sequence, busy_for=busy_for)
        del _outstanding[id(messages)]

    def follow(self, rounds: PlannedRounds, until: int, *, sequence: int) -> None:
        """Send and receive until so many rounds are done; none of them may take longer than the timeout."""
        rounds.until = until
        busy_for = _ASLEEP if rounds.is_long else self.busy_for
        self._wait(rounds, sequence=sequence, busy_for=busy_for, done=lambda: rounds.done)

    def _wait(
        self, under_way: UnderWay, *, sequence: int, busy_for: float, done: Callable[[], int] = lambda: 0
    ) -> None:
        """Wait until all messages are done, looking at the alarms, the clock and the processes of this host meanwhile.

        Raises:
            Interrupted: For as long as the timeout nothing more was ``done``, or an alarm says that nothing will be.
        """
        began = looked = time.monotonic()
        seen = 0
        while not under_way.wait(LISTEN_EVERY, busy_for):  # not-gpu: messages of MPI
            busy_for, now = busy_for - LISTEN_EVERY, time.monotonic()
            self.listen()
            if now - looked >= _LOOK_EVERY:
                looked = now
                self.look_for_the_dead(sequence)
            if done() > seen:
                seen, began = done(), now
            lost = any(alarm.sequence <= sequence for alarm in self.alarms.values())
            if lost or now - began >= self._timeout:
                raise Interrupted

    def listen(self) -> None:
        """Read the alarms that have come, and send those that wait for this thread."""
        if self._only_thread not in (None, threading.get_ident()):
            return
        with self._alarming:
            if not self._hushed:
                self._sound_all()
                self._alarms.exchange()

    @property
    def alarms(self) -> dict[int, Alarm]:
        """What other ranks said, or those who spoke for them, until now: another thread may hear more meanwhile."""
        return dict(self._alarms.known)

    def look_for_the_dead(self, sequence: int) -> None:
        """Sound the alarm that a process of this host, which ended without a word, cannot sound itself."""
        alarms = self.alarms
        for rank, pid in self._neighbours.items():
            if rank not in alarms and not is_alive(pid):
                self.sound(Alarm(rank, sequence, "died", ""))

    def sound(self, alarm: Alarm) -> None:
        """Send an alarm to every other rank, by way of some. Does not wait for anyone to hear it."""
        self._unsent.append(alarm)
        self.listen()

    @property
    def missing(self) -> frozenset[int] | None:
        """The ranks that are missing, as one rank judged for all; None before ([Note: one verdict] in alarms.py)."""
        return None if self._alarms.verdict is None else self._alarms.verdict[1]

    def judge(self, missing: Iterable[int]) -> None:
        """Say for all ranks which of them are missing, unless another has."""
        with self._alarming:
            self._alarms.judge(missing)
        self.speak_out()

    def speak_out(self) -> None:
        """Pass on now what would be passed on in a while: this rank listens no more."""
        if self._only_thread in (None, threading.get_ident()):
            with self._alarming:
                if not self._hushed:
                    self._sound_all()
                    self._alarms.exchange(last=True)

    def hush(self) -> None:
        """Hear and sound no more alarms: the last have been sent, and MPI is about to end."""
        if not MPI.Is_finalized():
            self.speak_out()
        with self._alarming:
            self._hushed = True

    def _sound_all(self) -> None:
        while self._unsent:
            self._alarms.sound(self._unsent.popleft())

    def _mail_to(self, rank: int, raw: bytes) -> None:
        self._mail.append((self._alarm_comm.Isend([raw, MPI.BYTE], dest=rank), raw))

    def _next_mail(self) -> bytes | None:
        status = MPI.Status()
        if not self._alarm_comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
            return None
        raw = bytearray(status.Get_count(MPI.BYTE))
        self._alarm_comm.Recv([raw, MPI.BYTE], source=status.Get_source())
        return bytes(raw)

    def close(self, *, patience: float) -> None:
        """Free the communicators if every rank is there to do so within ``patience`` seconds; else leave them be."""
        with contextlib.suppress(MPI.Exception):
            # Not over `comm`, where it would be taken for the call that a rank makes which does not close yet.
            request, deadline = self._alarm_comm.Ibarrier(), time.monotonic() + patience
            while not request.Test():
                if time.monotonic() > deadline:
                    return
                time.sleep(_NAP)
            while not MPI.Request.Testall([mail for mail, _ in self._mail]):
                self._alarms.hear()  # a long message leaves when it is received
            self._alarms.hear()
            self._alarm_comm.Free()
            self.comm.Free()


@contextlib.contextmanager
def _kept(requests: object, *memory: object) -> Iterator[None]:
    """Keep ``memory`` for ever if its requests are left before they are done: MPI may still write there."""
    try:
        yield
    except BaseException:
        _abandoned.append((requests, memory))
        raise


def _cut(parts: Parts, limit: int) -> Parts:
    """Return messages of up to ``limit`` bytes that carry the arrays."""
    raw = [(rank, array.view(np.uint8)) for rank, array in parts]
    return [(rank, one[first : first + limit]) for rank, one in raw for first in range(0, one.size, limit)]
