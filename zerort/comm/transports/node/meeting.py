"""Ranks of one machine that wait for each other in shared memory, and find out which of them is missing.

The lower half of `NodeTransport`: the rendezvous, the board with texts, failures and farewells, and the look at the
other processes. It moves no arrays.
"""

# not-gpu: between processes of the host
from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import (
    Sighting,
    Trouble,
    failed_error,
    failed_trouble,
    gone_trouble,
    last_call,
    late_error,
)
from zerort.comm.transport import Transport
from zerort.comm.transports.node.board import Board, board_nbytes
from zerort.comm.transports.node.flights import NodeFlights
from zerort.comm.transports.node.window import SharedFile, Window, map_file
from zerort.config import GroupOptions
from zerort.native.rendezvous import BROKEN, MET, WAITING, open_log, open_rendezvous, read_header, read_slot

__all__ = ["LOOK_AFTER", "NodeMeeting", "open_control"]

LOOK_AFTER = 0.1
"""Seconds of waiting after which a rank looks whether those it waits for still live."""


_YIELDS = 20
"""Times that a rank lets one run which it waits for, on its own core, before it sleeps (decision 0203)."""


def open_control(size: int, directory: str, *, named: bool = False) -> SharedFile:
    """Make the file in which ``size`` ranks of a node will meet. One rank does so, and closes it when all have."""
    return SharedFile(directory, board_nbytes(size), named=named)


class NodeMeeting(Transport):
    """One rank's place in a rendezvous of the ranks of its machine.

    Args:
        control: Path of the file that `open_control` made.
        rank: This rank.
        size: Ranks that meet there.
        name: What the group is called in errors and traces.
        options: Timeouts and sizes.
        in_native: Use the native rendezvous. The same on all ranks.
        sees_processes: The ranks see each other's processes: then one that is not there has died. The same on all.
        crowded: Ranks share cores; None guesses from this rank's own.
        abroad: Its ranks are part of a group over several hosts: who waits here may wait for the network.
    """

    def __init__(
        self,
        control: str,
        rank: int,
        size: int,
        *,
        name: str,
        options: GroupOptions,
        in_native: bool,
        sees_processes: bool,
        crowded: bool | None,
        abroad: bool,
    ) -> None:
        super().__init__(rank, size, name=name, options=options)
        mapped = map_file(control)
        self._control = Window(mapped, ((0, mapped.size),))
        self._control_view = memoryview(mapped)  # type: ignore[arg-type]
        self._board = Board(self._control_view, rank, size)
        self._in_native = in_native
        # With a core for each rank a spin answers in under 1 µs; with fewer it keeps the awaited rank off the core. The
        # native form does not spin where that one was last seen, and may look longer: other cores come soon.
        self._crowded = size > len(os.sched_getaffinity(0)) if crowded is None else crowded
        spins = 2000 if not self._crowded else 600 if in_native else 20
        self._log = open_log(options.flight_length, in_native=in_native)
        self.flights = NodeFlights(options.flight_length, self._log)
        yields = 0 if abroad else _YIELDS
        self._link = open_rendezvous(
            self._control.address, rank=rank, size=size, spins=spins, yields=yields, in_native=in_native
        )
        self._sees_processes = sees_processes
        self._left = False

    def end_barrier(self, call: Call) -> None:
        """Wait until every rank has come this far."""
        self.finish_barrier(call, self._link.part(LOOK_AFTER))

    def finish_barrier(self, call: Call, status: int) -> None:
        """Wait as `end_barrier` does; ``status`` is what came of this rank's arrival."""
        if status != MET:
            self._wait(call, status)

    def headers(self) -> list[bytes]:
        """Return the headers that all ranks have shown at the meeting at which they are."""
        return [read_header(self._control_view, rank) for rank in range(self.size)]

    def exchange_texts(self, text: str) -> list[str]:
        """Exchange texts on the board."""
        call = Call(op="exchange_texts", site="")
        self._board.write_news(text)
        self.end_barrier(call)
        news = self._board.read_news()
        self.end_barrier(call)
        return news

    def _wait(self, call: Call, status: int) -> int:
        began = time.monotonic()
        while status == WAITING:
            waited = time.monotonic() - began + LOOK_AFTER
            gone = [slot for slot in self._slots() if slot.left and not slot.arrived]
            if gone or self.ending or waited >= self.options.timeout:
                # A last look: the missing rank may have come while this one looked around.
                status = self._link.wait(0.0)
                if status == WAITING:
                    raise self._give_up(call)
            else:
                status = self._link.wait(min(LOOK_AFTER, self.options.timeout - waited))
        if status == BROKEN:
            raise self._give_up(call)
        return status

    def _give_up(self, call: Call, *, dead: Sequence[int] | None = None) -> Exception:
        """Break the group; ``dead`` are those to blame if all had arrived, else it is whoever did not."""
        sightings = [
            Sighting(
                arrived=slot.arrived if dead is None else rank not in dead,
                left=slot.left,
                last=last_call(slot.header),
                since=slot.since,
                process=f"process {slot.pid}",
                farewell=Standing.read(self._board.read_farewell(rank)),
            )
            for rank, slot in enumerate(self._slots())
        ]
        self._link.give_up()
        failure = self._board.read_failure()
        if failure is not None:
            self.broken = failed_error(self.title, rank=failure[0], why=failure[1])
        elif sightings[self.rank].arrived:
            self.broken = self.missing(call, sightings)
        else:
            self.broken = late_error(**self.facts(call), rank=self.rank)
        return self.broken

    def announce_failure(self, why: str) -> None:
        """Leave the reason on the board, and wake whoever waits to read it."""
        self._board.write_failure(why)
        self._link.give_up()

    def peer_failure(self, numbers: Sequence[int] | None = None) -> Trouble | None:
        """Look at the board and at the other processes; ``numbers`` are what to call this node's ranks."""
        called = range(self.size) if numbers is None else numbers
        failure = self._board.read_failure()
        if failure is not None:
            return failed_trouble(called[failure[0]], failure[1])
        gone = [called[rank] for rank, slot in enumerate(self._slots()) if slot.left and rank != self.rank]
        return gone_trouble(gone) if gone else None

    def _slots(self) -> list[Any]:
        return [read_slot(self._control_view, rank, sees_processes=self._sees_processes) for rank in range(self.size)]

    def leave(self) -> None:
        """Tell whoever waits, or will wait, for this rank that it has gone."""
        if not self._left:
            self._left = True
            self._board.write_farewell(self.standing.words())
            self._link.leave()

    def all_leave(self, *, within: float) -> bool:
        """Leave, and look on the board what the others say by the time when all have left."""
        self._board.write_leaving()
        self.leave()
        return self._board.all_leave(lambda: all(slot.left for slot in self._slots()), within=within)
