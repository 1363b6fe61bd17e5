"""`NodeFlights`: the flight record of a node's rank, part of which native code writes.

A call that takes the shortcut is noted by the native `CallLog`, in less time than one line of Python; the two records
are put together when someone reads them.
"""

from __future__ import annotations

from typing import Any

from zerort.trace import FlightRecorder

__all__ = ["NodeFlights"]

_FACTS = ("op", "dtype", "numel", "name", "site")


class NodeFlights(FlightRecorder):
    """The last calls of one rank.

    Args:
        length: Calls to remember.
        log: The native record of the same length; None if there is none.
    """

    __slots__ = ("_log",)

    def __init__(self, length: int, log: Any) -> None:
        super().__init__(length)
        self._log = log

    def rows(self) -> list[dict[str, Any]]:
        """Return the remembered calls, oldest first, as plain values."""
        rows = super().rows()
        if self._log is None:
            return rows
        # A call that the shortcut began and Python finished is in both; Python knows how it ended.
        found = {row["sequence"]: row for row in map(_row, self._log.rows())} | {row["sequence"]: row for row in rows}
        return [found[sequence] for sequence in sorted(found)][-self._length :]


def _row(note: tuple[int, tuple[Any, ...], int, int]) -> dict[str, Any]:
    sequence, facts, began, ended = note
    return {
        "sequence": sequence,
        **dict(zip(_FACTS, facts, strict=True)),
        "submitted_ns": began,
        "finished_ns": ended or None,
        "status": "done" if ended else "running",
    }
