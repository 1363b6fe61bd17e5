"""Remember the last collective calls of a rank, for the post-mortem.

    sequence   op               …   submitted_ns   finished_ns   status
    1041       reduce_scatter   …   …              …             done
    1042       all_gather       …   …              null          running      <- this rank stands here

Every collective writes one row, so writing is kept to a clock reading, one list and one store; all formatting waits
until someone asks. Rows of different ranks are compared by ``sequence``.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

from zerort.layout.integers import as_int
from zerort.trace.files import make_private, plain, wall_offset_ns, write_json

__all__ = ["FlightEntry", "FlightRecorder"]

FlightEntry = list[Any]
"""One call, as `FlightRecorder.begin` hands it out for `FlightRecorder.end`. Its items are the recorder's own."""

_FIELDS: Final = (
    "sequence",
    "op",
    "dtype",
    "numel",
    "name",
    "site",
    "submitted_ns",
    "finished_ns",
    "status",
)
_FINISHED, _STATUS, _ORDER = 7, 8, 9  # an entry is its fields, and behind them its place in the order of calls

_dumps = itertools.count()  # a process may hold several groups, and none shall overwrite another's record


class FlightRecorder:
    """A ring of the last `length` calls.

    Threads may record at the same time: an entry is a list of its own and is stored with one assignment, so an `end`
    that comes after the ring has gone round touches only an entry that nobody looks at any more.

    Args:
        length: Calls to remember.

    Raises:
        CallError: If the length is not a positive integer.

    >>> recorder = FlightRecorder(8)
    >>> entry = recorder.begin(0, "all_reduce", "float32", 1024, "loss", "train.py:12")
    >>> recorder.rows()[0]["status"]
    'running'
    >>> recorder.end(entry, "done")
    >>> recorder.rows()[0]["status"]
    'done'
    """

    __slots__ = ("_calls", "_length", "_slots")

    def __init__(self, length: int) -> None:
        self._length = as_int(length, what="the flight recorder's length", minimum=1)
        self._slots: list[FlightEntry | None] = [None] * self._length
        self._calls = itertools.count()  # next() on it is atomic, unlike += on an attribute

    def begin(
        self,
        sequence: int,
        op: str,
        dtype: object,
        numel: int,
        name: str | None,
        site: object,
    ) -> FlightEntry:
        """Note that a call was submitted. Nothing is formatted here, so pass values as they are.

        Args:
            sequence: The call's number within its group, the same on every rank.
            op: The collective.
            dtype: The elements' dtype.
            numel: The number of elements.
            name: What the user calls it, if anything.
            site: Where it was called: a text, or ``(file, line)``.

        Returns:
            The entry, for `end`.
        """
        order = next(self._calls)
        entry = [sequence, op, dtype, numel, name, site, perf_counter_ns(), None, "running", order]
        self._slots[order % self._length] = entry
        return entry

    def end(self, entry: FlightEntry, status: str = "done") -> None:
        """Note that a call has come to its end.

        Args:
            entry: What `begin` returned.
            status: ``"done"``, or what went wrong.
        """
        entry[_FINISHED] = perf_counter_ns()
        entry[_STATUS] = status

    def rows(self) -> list[dict[str, Any]]:
        """Return the remembered calls, oldest first, as plain values.

        Times are by `time.perf_counter_ns`; ``finished_ns`` is None for a call that has not come to its end.
        """
        # One copy of the slots, then a sort: other threads go on recording meanwhile.
        entries = sorted((entry for entry in list(self._slots) if entry is not None), key=lambda entry: entry[_ORDER])
        return [_row(entry) for entry in entries]

    def dump(self, path_or_dir: str | os.PathLike[str], *, rank: int, reason: str) -> Path | None:
        """Write the record as JSON. A dump is made while something else fails, so it warns where others raise.

        Args:
            path_or_dir: A file that ends in ``.json``, replaced if it exists; or a directory, which gets a file named
                after host, process and rank. Missing directories are made, for this user alone.
            rank: This process's rank in its group.
            reason: Why the record is dumped.

        Returns:
            The file, or None if it could not be written; then a RuntimeWarning says why.
        """
        host = os.uname().nodename
        target = Path(path_or_dir)
        if target.suffix != ".json":
            safe = re.sub(r"[^\w.-]", "_", host)
            target = target / f"flight-{safe}-{os.getpid()}-{next(_dumps)}-rank{rank}.json"
        document = {
            "rank": rank,
            "host": host,
            "pid": os.getpid(),
            "reason": str(reason),
            "dumped_ns": perf_counter_ns(),
            "wall_offset_ns": wall_offset_ns(),
            "calls": self.rows(),
        }
        try:
            make_private(target.parent)
            write_json(target, document, private=True)
        except OSError as error:
            warnings.warn(
                f"Rank {rank} could not write its flight record to {target}: {error.strerror or error}. "
                "Set ZERORT_FLIGHT_DIR to a directory with space that every rank can write to.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return target


def _row(entry: FlightEntry) -> dict[str, Any]:
    """Return an entry's fields by name, as plain values; a site becomes ``file:line``."""
    row = dict(zip(_FIELDS, entry, strict=False))  # the order of calls, behind the fields, stays here
    if isinstance(row["site"], tuple):
        row["site"] = ":".join(map(str, row["site"]))
    return {field: plain(value) for field, value in row.items()}
