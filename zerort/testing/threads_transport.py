"""N ranks as threads of one process: for tests, for teaching, and for debugging collectives in one debugger.

The ranks meet at a `Meeting`, lay their calls on its table and read each other's arrays directly. The rules are those
of the other groups: same guard, same errors, same timeouts.
"""

# not-gpu: between threads of the host
from __future__ import annotations

import threading
import time

import numpy as np

from zerort import native
from zerort.comm.geometry import even_part
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import Sighting, failed_error, last_call, late_error
from zerort.comm.transport import Transport
from zerort.config import GroupOptions
from zerort.native.rendezvous import AGREED_BYTES
from zerort.typing import Array

__all__ = ["Meeting", "ThreadsTransport"]


class Meeting:
    """The table at which the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[Call | None] = [None] * size
        self.headers: list[bytes | None] = [None] * size
        self.texts = [""] * size
        self.left = [False] * size
        self.farewells = [""] * size
        self.arrived = [0] * size
        self.seen = [time.monotonic()] * size
        self.epoch = 0
        self.broken = False
        self.failures: list[tuple[int, str]] = []
        self.moved = threading.Condition()
        self.parts: dict[object, Meeting] = {}
        self.shared: Array | None = None

    def wait_for_all(self, rank: int, timeout: float) -> bool:
        """Arrive, and return True once every rank has; False if one has left, or is missing after ``timeout`` s."""
        with self.moved:
            target = self.epoch + 1
            self.arrived[rank] = target
            self.seen[rank] = time.monotonic()
            if all(arrived == target for arrived in self.arrived) and not self.broken:
                self.epoch = target
                self.moved.notify_all()
                return True
            self.moved.wait_for(lambda: self.epoch == target or self.broken or self._hopeless(target), timeout)
            return self.epoch == target

    def _hopeless(self, target: int) -> bool:
        return any(left and arrived != target for left, arrived in zip(self.left, self.arrived, strict=True))


class ThreadsTransport(Transport):
    """One thread's side of a `Meeting`."""

    kind = "threads"
    one_memory = True
    reads_in_place = True

    def __init__(self, meeting: Meeting, rank: int, *, name: str, options: GroupOptions) -> None:
        super().__init__(rank, meeting.size, name=name, options=options)
        self._meeting = meeting
        self._splits = 0

    def meet(self, call: Call) -> None:
        """Lay the call on the table and compare it with the others'."""
        self._meeting.calls[self.rank] = call
        self._meeting.headers[self.rank] = call.header()
        self._wait(call)
        agreed = {header[:AGREED_BYTES] for header in self._meeting.headers if header is not None}
        if len(agreed) > 1 or call.complaint:
            raise self.disagree(call)
        self._wait(call)  # nobody lays down its next call before everybody has compared this one

    def move(self, call: Call) -> None:
        """Take from the other threads' arrays what the geometry says."""
        table = call.geometry
        assert table is not None
        assert call.out is not None
        sources = [found.source for found in self._calls()]
        if table.reduces:
            first, count = table.takes[self.rank]
            native.reduce_into(call.out, [s[first : first + count] for s in sources if s is not None], call.reduction)
        elif table.alike and self._one_out():
            first, count = table.takes[self.rank]
            place = table.places[self.rank]
            if call.source is not None:
                call.out[place : place + count] = call.source[first : first + count]
        else:
            for source, (first, count), place in zip(sources, table.takes, table.places, strict=True):
                if source is not None:
                    call.out[place : place + count] = source[first : first + count]
        self._wait(call)

    def all_reduce(self, call: Call) -> None:
        """Reduce into memory of this thread's own first: an out may be another's source."""
        assert call.out is not None
        first, count = even_part(call.numel, self.size, self.rank) if self._one_out() else (0, call.numel)
        result = np.empty(count, call.out.dtype)
        sources = [found.source[first : first + count] for found in self._calls() if found.source is not None]
        native.reduce_into(result, sources, call.reduction)
        self._wait(call)
        call.out[first : first + count] = result
        self._wait(call)

    def exchange_texts(self, text: str) -> list[str]:
        """Lay a text on the table and read the others'."""
        call = Call(op="tell", site="")
        self._meeting.texts[self.rank] = text
        self._wait(call)
        texts = list(self._meeting.texts)
        self._wait(call)
        return texts

    def allocate(self, nbytes: int) -> Array:
        """Return plain memory: every thread can read it."""
        return np.zeros(nbytes, np.uint8)

    def allocate_shared(self, nbytes: int) -> Array:
        """Return the one array that rank 0 makes for all."""
        if self.rank == 0:
            self._meeting.shared = np.zeros(nbytes, np.uint8)
        self.exchange_texts("made")
        shared = self._meeting.shared
        assert shared is not None
        self.exchange_texts("taken")  # rank 0 must not make the next one before everybody has this one
        return shared

    def split(self, color: int | None, *, key: int, name: str) -> ThreadsTransport | None:
        """Return this thread's side of the meeting among the threads of its color."""
        told = [tuple(text.split(",")) for text in self.exchange_texts(f"{'' if color is None else color},{key}")]
        self._splits += 1
        if color is None:
            return None
        members = sorted((int(k), r) for r, (c, k) in enumerate(told) if c == str(color))
        with self._meeting.moved:
            meeting = self._meeting.parts.setdefault((self._splits, color), Meeting(len(members)))
        rank = [r for _, r in members].index(self.rank)
        return ThreadsTransport(meeting, rank, name=name, options=self.options)

    def announce_failure(self, why: str) -> None:
        """Wake whoever waits, with the reason."""
        with self._meeting.moved:
            self._meeting.failures.append((self.rank, why))
            self._meeting.broken = True
            self._meeting.moved.notify_all()

    def leave(self) -> None:
        """Wake whoever waits for this thread."""
        with self._meeting.moved:
            self._meeting.left[self.rank] = True
            self._meeting.farewells[self.rank] = self.standing.words()
            self._meeting.moved.notify_all()

    def _calls(self) -> list[Call]:
        return [call for call in self._meeting.calls if call is not None]

    def _one_out(self) -> bool:
        outs = [call.out for call in self._calls()]
        return all(out is not None and outs[0] is not None and out.ctypes.data == outs[0].ctypes.data for out in outs)

    def _wait(self, call: Call) -> None:
        meeting = self._meeting
        if meeting.wait_for_all(self.rank, self.options.timeout):
            return
        if meeting.failures:
            rank, why = meeting.failures[0]
            self.broken = failed_error(self.title, rank=rank, why=why)
            raise self.broken
        with meeting.moved:
            meeting.broken = True
            meeting.moved.notify_all()
            target = meeting.epoch + 1
            sightings = [
                Sighting(
                    arrived=meeting.arrived[rank] == target,
                    left=meeting.left[rank],
                    last=last_call(meeting.headers[rank]),
                    since=time.monotonic() - meeting.seen[rank],
                    farewell=Standing.read(meeting.farewells[rank]),
                )
                for rank in range(self.size)
            ]
        if sightings[self.rank].arrived and not all(seen.arrived for seen in sightings):
            self.broken = self.missing(call, sightings)
        else:
            self.broken = late_error(**self.facts(call), rank=self.rank)
        raise self.broken
