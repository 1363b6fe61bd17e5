"""Tables for people, in nccl-tests' order of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.collectives.footprint import Footprint
from zerort.cli.bench.collectives.rows import Row, Side
from zerort.cli.bench.harness import wrong_line
from zerort.cli.screen import new_table
from zerort.config import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["collectives_head", "collectives_legend", "collectives_table"]

_NONE = "-"
_SIDE = (("time\nµs", 9), ("algbw\nGB/s", 7), ("busbw\nGB/s", 7), ("#wrong\n", 6))


def collectives_head(machine: dict[str, Any]) -> list[str]:
    """Return the lines between the machine's and the tables."""
    arrays = {
        "window": "in the node's window (group.zeros)",
        "own": "plain NumPy arrays",
        "new": "plain NumPy arrays, results new ones (no out=)",
    }[machine["arrays"]]
    return [
        f"# MPI: {machine['mpi'] or 'none'}",
        f"# {machine['group']}",
        f"# {machine['ranks']} rank{'s' * (machine['ranks'] > 1)} on {machine['cores']} cores; our arrays {arrays}",
        f"# memory limit: {machine['limit_gbs']:.1f} GB/s (in-place a += b, fp32, all ranks at once); a bare sum of "
        f"{max(machine['ranks'], 2)} private arrays: {machine['sum_gbs'] / machine['limit_gbs']:.0%} of it",
    ]


def collectives_table(title: str, rows: Sequence[Row], *, compare: bool) -> Table:
    """Return the table of one operation."""
    table = new_table(title)
    for name, width in (("size\nB", 10), ("count\n", 10), ("dtype\n", 8), ("redop\n", 5)):
        table.add_column(name, min_width=width, justify="right", no_wrap=True)
    for group in ("out of place", "in place"):
        for at, (name, width) in enumerate(_SIDE):
            table.add_column(f"{'' if at else group}\n{name}", min_width=width, justify="right", no_wrap=True)
    if compare:
        table.add_column("MPI\ntime\nµs", min_width=9, justify="right", no_wrap=True)
        table.add_column("in place\ntime\nµs", min_width=9, justify="right", no_wrap=True)
        table.add_column("MPI /\nours\n", min_width=6, justify="right", no_wrap=True, style="bold")
    errors = any(row.error is not None for row in rows)
    if errors:
        table.add_column("error\nours\nulp", min_width=5, justify="right", no_wrap=True)
        if compare:
            table.add_column("\nMPI\nulp", min_width=5, justify="right", no_wrap=True)
    table.add_column("of the\nmemory\nlimit", min_width=6, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row.nbytes), str(row.count), row.dtype, row.redop, *_side(row.out_of_place), *_side(row.in_place)]
        if compare:
            cells += [_time(row.mpi), _time(row.mpi_in_place), _ratio(row.ratio)] if row.mpi_best else ["n/a"] * 3
        if errors:
            cells += [_error(row.error), _error(row.mpi_error)][: 2 if compare else 1]
        cells.append(_NONE if row.fraction is None else f"{row.fraction:.0%}")
        table.add_row(*cells, style="red" if row.wrong else None)
    return table


def collectives_legend(rows: Sequence[Row], footprint: Footprint | None, *, compare: bool) -> list[str]:
    """Return the lines below the tables."""
    wrong = sum(row.wrong for row in rows)
    lines = [
        "# time: median of 7 repetitions, each the mean over many iterations on the slowest rank. algbw = size / time;",
        "#   busbw = algbw, times (n-1)/n for all_gather, reduce_scatter and all_to_all, 2(n-1)/n for all_reduce.",
    ]
    if compare:
        lines.append(
            "# MPI: its own call on plain arrays, interleaved with ours; the better of its two places, as with ours."
        )
        unknown = sorted({row.dtype for row in rows if row.error is not None and row.mpi_best is None})
        lines += [
            f"# n/a: this MPI library has no {dtype} that mpi4py can reach, so it cannot sum it." for dtype in unknown
        ]
    if any(row.op == "all_gather shared" for row in rows):
        lines.append("# all_gather shared: the node holds the array once and nothing is copied: the time of a meeting.")
    if any(row.error is not None for row in rows):
        lines += [
            "# error: of sums of 16-bit floats that fill their mantissa: the largest distance from the exact sum, in",
            "#   units of the last place (ulp). 0.50: rounded once, which is the best there is.",
        ]
    lines += [
        "# of the memory limit: bytes that must be read and written, over all ranks (reduce_scatter, reduce: (n+1)·S;",
        "#   all_reduce, all_to_all: 2n·S; all_gather, broadcast: 2n·S, in place 2(n-1)·S), per second of our better",
        "#   time, over the speed of an in-place a += b by all ranks at once, taken between the same repetitions.",
        "#   Above 100 %: the arrays fit into the caches, the limit's do not.",
        wrong_line("elements", wrong),
    ]
    if footprint is not None:
        where = f"{footprint.ranks} ranks on {footprint.nodes} node{'s' * (footprint.nodes > 1)}"
        lines.append(
            f"# memory of a gather of {format_bytes(footprint.nbytes)} on {where} (growth of the sum of PSS): "
            f"shared {_signed(footprint.shared_nbytes)}, copied out {_signed(footprint.copied_nbytes)}"
        )
    return lines


def _side(side: Side | None) -> list[str]:
    if side is None:
        return [_NONE] * len(_SIDE)
    return [_time(side), _bandwidth(side.algbw), _bandwidth(side.busbw), str(side.wrong)]


def _time(side: Side | None) -> str:
    if side is None:
        return _NONE
    return f"{side.time_us:.2f}" if side.time_us < 1000 else f"{side.time_us:.0f}"


def _bandwidth(gbs: float) -> str:
    return _NONE if gbs == 0 else f"{gbs:.2f}" if gbs < 1000 else f"{gbs:.0f}"


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def _error(error: float | None) -> str:
    return _NONE if error is None else f"{error:.2f}"


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"
