"""`Board`: where the ranks of a node leave texts for each other, behind the rendezvous in the same shared file.

Three lines per rank: what it tells the others now (`Transport.exchange_texts`), why it failed, if it did, and what it
said when it left. The last two stay for as long as anyone looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from zerort.native.rendezvous import control_nbytes

__all__ = ["Board", "board_nbytes"]

_NEWS_NBYTES = 8192
_FAILURE_NBYTES = 2048
_FAREWELL_NBYTES = 2048
_RANK_NBYTES = _NEWS_NBYTES + _FAILURE_NBYTES + _FAREWELL_NBYTES

_NAP = 0.005
"""Seconds between two looks at whether the others leave, too."""

_LEAVING, _LEFT_ALONE = "leaves", "left alone"
"""What a rank that leaves writes on the board, and what if others did not come to leave with it."""


def board_nbytes(size: int) -> int:
    """Return the bytes of a file in which ``size`` ranks meet and leave texts."""
    return control_nbytes(size) + size * _RANK_NBYTES


class Board:
    """One rank's view of the texts.

    Args:
        memory: The whole shared file.
        rank: Whose lines this rank writes.
        size: Ranks that read and write here.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self._memory = memory
        self._rank = rank
        self._size = size

    def write_news(self, text: str) -> None:
        """Write this rank's news over its last one."""
        self._write(self._place(self._rank), _NEWS_NBYTES, text)

    def read_news(self) -> list[str]:
        """Return every rank's news."""
        return [self._read(self._place(rank), _NEWS_NBYTES) for rank in range(self._size)]

    def write_leaving(self) -> None:
        """Say that this rank leaves, as its last news: one that dies does not say so."""
        self.write_news(_LEAVING)

    def all_leave(self, have_left: Callable[[], bool], *, within: float) -> bool:
        """Say whether all ranks leave with this one; those who come later hear if it no longer waited for them."""
        until = time.monotonic() + within
        while not have_left():
            if time.monotonic() > until:
                self.write_news(_LEFT_ALONE)
                return False
            time.sleep(_NAP)
        return all(text == _LEAVING for text in self.read_news())

    def write_failure(self, text: str) -> None:
        """Say why this rank failed."""
        self._write(self._place(self._rank) + _NEWS_NBYTES, _FAILURE_NBYTES, text)

    def read_failure(self) -> tuple[int, str] | None:
        """Return (rank, why) of the lowest rank that failed; None if none did."""
        for rank in range(self._size):
            text = self._read(self._place(rank) + _NEWS_NBYTES, _FAILURE_NBYTES)
            if text:
                return rank, text
        return None

    def write_farewell(self, text: str) -> None:
        """Say how far this rank has come, because it leaves."""
        self._write(self._place(self._rank) + _NEWS_NBYTES + _FAILURE_NBYTES, _FAREWELL_NBYTES, text)

    def read_farewell(self, rank: int) -> str:
        """Return what ``rank`` said when it left; nothing if it is here, or was killed."""
        return self._read(self._place(rank) + _NEWS_NBYTES + _FAILURE_NBYTES, _FAREWELL_NBYTES)

    def _place(self, rank: int) -> int:
        return control_nbytes(self._size) + rank * _RANK_NBYTES

    def _write(self, first: int, nbytes: int, text: str) -> None:
        raw = text.encode()[: nbytes - 1].decode(errors="ignore").encode() + b"\0"
        self._memory[first : first + len(raw)] = raw

    def _read(self, first: int, nbytes: int) -> str:
        return bytes(self._memory[first : first + nbytes]).split(b"\0", 1)[0].decode(errors="replace")
