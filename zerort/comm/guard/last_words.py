"""`LastWords`: what the ranks of a job tell each other when it ends, over a communicator of their own.

    raised   an unhandled error: what it is like, and whether another rank's end is its cause
    left     the answer of a rank that has ended already
    told     its error has been printed

The groups may be broken or closed by then, so nothing of theirs is used. Nobody waits for an answer for long: a rank
that says nothing is computing, or stuck, or dead (decision 0066).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mpi4py import MPI

__all__ = ["LastWords", "Words"]

_PATIENCE = 2.0
"""Seconds to wait for the next rank's words: those that raise the same do so at about the same time."""

_TELLING = 3.0
"""Seconds that other ranks get to print what they raised."""


@dataclass(frozen=True, slots=True)
class Words:
    """What one rank says."""

    rank: int
    kind: str
    """``"raised"``, ``"left"`` or ``"told"``."""
    like: str = ""
    """The same text on ranks that raised the same."""
    follows: bool = False
    """Whether it raised only because another rank failed or left."""
    story: str = ""
    """Who left too early, in one line; empty if nobody did."""
    code: int = 0
    """Of a rank that left: its exit code, as far as it is known."""


class LastWords:
    """One rank's side.

    Args:
        comm: All ranks of the job; duplicated. Collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._only_thread = None if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else threading.get_ident()
        self._told: set[int] = set()
        self._mail: list[Any] = []

    @property
    def usable(self) -> bool:
        """Whether this thread may call MPI, now."""
        return not MPI.Is_finalized() and self._only_thread in (None, threading.get_ident())

    def exchange(self, mine: Words) -> dict[int, Words]:
        """Tell everyone ``mine`` and return what was heard of each rank, this one's included."""
        self._send(mine, (rank for rank in range(self.size) if rank != self.rank))
        heard = {self.rank: mine}
        deadline = time.monotonic() + _PATIENCE
        while len(heard) < self.size and time.monotonic() < deadline:
            for words in self._receive():
                heard[words.rank] = words
                deadline = time.monotonic() + _PATIENCE
            time.sleep(2e-3)
        return heard

    def wait_until_told(self, ranks: Iterable[int]) -> None:
        """Wait until each of ``ranks`` has printed its error, but not for ever."""
        waiting, deadline = set(ranks), time.monotonic() + _TELLING
        while waiting - self._told and time.monotonic() < deadline:
            self._receive()
            time.sleep(2e-3)

    def say_told(self, to: int) -> None:
        """Say that this rank has printed its error, and wait for the end, which rank ``to`` brings about."""
        self._send(Words(self.rank, "told"), [to])
        deadline = time.monotonic() + 2 * _TELLING
        while time.monotonic() < deadline:
            self._receive()  # which also sends
            time.sleep(2e-3)

    def see_others_out(self, tell: Callable[[str], None], *, code: int = 0, patience: float | None = None) -> bool:
        """Wait until every rank ends, as MPI would do next; ``tell`` the first story that one of them raises with.

        Whoever raises is told this rank's exit ``code``: it may have left its groups before it knew that.

        Returns:
            Whether they all did within ``patience`` seconds, if that is given.
        """
        everyone_ends, nap, first = self._comm.Ibarrier(), 1e-4, True
        deadline = math.inf if patience is None else time.monotonic() + patience
        while not everyone_ends.Test():
            if time.monotonic() >= deadline:
                return False
            for words in self._receive():
                if words.story and first:
                    first = False
                    tell(words.story)
                self._send(Words(self.rank, "left", code=code), [words.rank])
            time.sleep(nap)
            nap = min(2 * nap, 0.02)
        return True

    def _send(self, words: Words, ranks: Iterable[int]) -> None:
        raw = json.dumps(asdict(words)).encode()
        self._mail += [(self._comm.Isend([raw, MPI.BYTE], dest=rank), raw) for rank in ranks]

    def _receive(self) -> list[Words]:
        came, status = [], MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
            raw = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([raw, MPI.BYTE], source=status.Get_source())
            words = Words(**json.loads(raw))
            if words.kind == "told":
                self._told.add(words.rank)
            else:
                came.append(words)
        return came
