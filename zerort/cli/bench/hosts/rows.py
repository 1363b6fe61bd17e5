"""What ``bench hosts`` found, as values and tables: a collective's row, with the wire's bound and plain sockets beside.

For each operation and size: ours, MPI's own, plain sockets, all timed in turn; and the bound that the links' rate sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.collectives.rows import Row, Side
from zerort.cli.bench.harness import wrong_line
from zerort.cli.screen import new_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["HostRow", "hosts_legend", "hosts_table"]

_NONE = "-"


@dataclass(frozen=True, slots=True)
class HostRow(Row):
    """One operation at one size, between hosts."""

    wire_us: float | None = None
    """The bound of the wire; None if its rate is not known, or nothing has to move."""
    sockets: Side | None = None
    """Plain sockets that carry as much."""

    @staticmethod
    def of(row: Row, *, wire_us: float | None = None, sockets: Side | None = None) -> HostRow:
        """Return a collective's row with what it is held against."""
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(Row)}
        return HostRow(**fields, wire_us=wire_us, sockets=sockets)

    @property
    def wire_ratio(self) -> float | None:
        """Our time over the wire's bound."""
        return None if not self.wire_us else self.best.time_us / self.wire_us

    @property
    def sockets_ratio(self) -> float | None:
        """Our time over that of plain sockets."""
        return None if self.sockets is None else self.best.time_us / self.sockets.time_us

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        return {**Row.as_json(self), "wire_ratio": self.wire_ratio, "sockets_ratio": self.sockets_ratio}


def hosts_table(title: str, rows: Sequence[HostRow]) -> Table:
    """Return the table of one operation."""
    table = new_table(title)
    heads = ("size\nB", "zerort\nµs", "\nmin", "\nmax", "busbw\nGB/s", "MPI\nµs", "ours /\nMPI")
    for head in (*heads, "wire\nµs", "ours /\nwire", "sockets\nµs", "ours /\nsockets", "#wrong\n"):
        table.add_column(head, min_width=7, justify="right", no_wrap=True)
    for row in rows:
        best, mpi = row.best, row.mpi_best
        table.add_row(
            str(row.nbytes),
            *(_time(one) for one in (best.time_us, best.min_us, best.max_us)),
            _NONE if best.busbw == 0 else f"{best.busbw:.3f}",
            _NONE if mpi is None else _time(mpi.time_us),
            _ratio(None if row.ratio is None else 1 / row.ratio),
            _time(row.wire_us),
            _ratio(row.wire_ratio),
            _NONE if row.sockets is None else _time(row.sockets.time_us),
            _ratio(row.sockets_ratio),
            str(row.wrong),
            style="red" if row.wrong else None,
        )
    return table


def hosts_legend(rows: Sequence[HostRow], *, rounds: int) -> list[str]:
    """Return the lines below the tables."""
    return [
        f"# time: median of {rounds} repetitions, each the mean over some iterations on the slowest rank. MPI: its own",
        "#   call on plain arrays, interleaved with ours. all_gather shared: the host holds the gathered array once.",
        "# wire: what the busiest host has to send or receive, at the rate of its link, and the delay once: a bound.",
        "# sockets: plain TCP connections between all pairs of hosts at once that carry as much, and compute nothing.",
        wrong_line("elements", sum(row.wrong for row in rows)),
    ]


def _time(microseconds: float | None) -> str:
    if not microseconds:
        return _NONE
    return f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
