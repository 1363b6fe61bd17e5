"""Latency and bandwidth over sizes, one row of panels per number of hosts, ours against MPI's, sockets and the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerort.cli.bench.pictures import drawing
from zerort.config import format_bytes

__all__ = ["draw_hosts"]

_STYLES = {"zerort": "o-", "MPI": "s--", "sockets": "^:", "wire": "k-"}


def draw_hosts(path: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture.

    Args:
        path: Where to.
        parts: For each number of hosts, the machine and the rows, as in JSON.
    """
    from matplotlib.ticker import NullLocator

    ops = list(dict.fromkeys(row["op"] for part in parts for row in part["rows"] if row["nbytes"]))
    with drawing(path, 2 * len(parts), max(1, len(ops)), panel=(4.2, 2.8)) as (figure, panels):
        for line, part in enumerate(parts):
            for column, op in enumerate(ops):
                rows = [row for row in part["rows"] if row["op"] == op]
                hosts = len(part["machine"]["ranks_of_hosts"])
                for below, (scale, label) in enumerate(((_latency, "time, µs"), (_bandwidth, "size / time, GB/s"))):
                    panel = panels[2 * line + below][column]
                    for name, style in _STYLES.items():
                        timed = [(row, time) for row in rows if (time := _time_of(row, name))]
                        points = [(row["nbytes"], scale(row, time)) for row, time in timed]
                        if points:
                            panel.plot(*zip(*points, strict=True), style, label=name, markersize=4)
                    panel.set_xscale("log", base=2)
                    panel.set_yscale("log")
                    sizes = [row["nbytes"] for row in rows][:: max(1, len(rows) // 8)]
                    panel.set_xticks(sizes, labels=[format_bytes(size) for size in sizes], rotation=45, fontsize=7)
                    panel.xaxis.set_minor_locator(NullLocator())
                    panel.set_title(f"{op}, {hosts} hosts", fontsize=9)
                    panel.set_ylabel(label, fontsize=8)
                    panel.grid(visible=True, alpha=0.3)
                    panel.legend(fontsize=7)
        machine = parts[0]["machine"]
        figure.suptitle(
            f"links: {machine['rate'] or 'no limit'}, delay {machine['delay'] or 'none added'}; "
            f"{machine['cores']} cores, {machine['mpi']}",
            fontsize=10,
        )


def _time_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return the microseconds of a contender; None if it was not run."""
    if name == "wire":
        return row["wire_us"]  # type: ignore[no-any-return]
    side = row[{"zerort": "out_of_place", "MPI": "mpi", "sockets": "sockets"}[name]]
    return None if side is None else side["time_us"]


def _latency(row: Mapping[str, Any], microseconds: float) -> float:
    return microseconds


def _bandwidth(row: Mapping[str, Any], microseconds: float) -> float:
    return float(row["nbytes"] / microseconds / 1e3)
