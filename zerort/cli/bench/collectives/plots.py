"""Bus bandwidth over size, one panel per operation, ours against MPI's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerort.cli.bench.collectives.rows import Row
from zerort.cli.bench.pictures import drawing
from zerort.config import format_bytes

__all__ = ["draw_collectives"]

_COLUMNS = 3


def draw_collectives(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Write the picture."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = [row for row in rows if row.nbytes]
    ops = list(dict.fromkeys(row.op for row in rows))
    columns = min(_COLUMNS, len(ops)) or 1
    lines = -(-len(ops) // columns) or 1
    with drawing(path, lines, columns, panel=(5, 3.6), dpi=130) as (figure, panels):
        for panel in panels.flat[len(ops) :]:
            panel.set_visible(False)
        for panel, op in zip(panels.flat, ops, strict=False):
            sizes = sorted({row.nbytes for row in rows if row.op == op})
            for at, dtype in enumerate(dict.fromkeys(row.dtype for row in rows if row.op == op)):
                part = [row for row in rows if row.op == op and row.dtype == dtype]
                line = panel.plot(
                    [row.nbytes for row in part],
                    [row.best.busbw for row in part],
                    "o-",
                    color=f"C{at}",
                    label=f"zerort {dtype}",
                )
                theirs = [(row.nbytes, row.mpi_best.busbw) for row in part if row.mpi_best is not None]
                if theirs:
                    panel.plot(
                        *zip(*theirs, strict=True), "s--", color=line[0].get_color(), alpha=0.6, label=f"MPI {dtype}"
                    )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(sizes, labels=[format_bytes(size) for size in sizes], rotation=45, ha="right", fontsize=8)
            panel.xaxis.set_minor_locator(NullLocator())
            low, high = panel.get_ylim()
            # In a narrow panel every number needs its label; in a wide one nine to a decade would overlap.
            shown = "125" if high / low > 10 else "12345678"
            for set_formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(functools.partial(_tick, shown)))
            panel.tick_params(axis="y", which="minor", labelsize=7)
            panel.set_title(op)
            panel.set_ylabel("bus bandwidth, GB/s")
            panel.grid(visible=True, alpha=0.3)
            panel.legend(fontsize=8)
        figure.suptitle(
            f"{machine['ranks']} ranks on {machine['cores']} cores, {machine['kind']} group, "
            f"{machine['mpi'] or 'no MPI'}",
            fontsize=10,
        )


def _tick(shown: str, value: float, at: int) -> str:
    """Write a number plainly if its first digit is among those ``shown``."""
    return f"{value:g}" if f"{value:e}"[0] in shown else ""
