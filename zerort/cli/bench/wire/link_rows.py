"""What a step on a slow link took, uncoded and coded, as values, as a table and as a plot.

exposed communication     a step less the uncoded step on a link without a limit: codecs' work counts, too
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.pictures import drawing
from zerort.cli.bench.step.rows import FLOOR
from zerort.cli.screen import new_table
from zerort.config import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CODED", "UNCODED", "LinkRow", "draw_links", "link_legend", "link_rows", "link_table"]

UNCODED, CODED = "uncoded", "coded"


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Steps over links of one rate: medians in ms."""

    rate: str | None
    """None: no limit, or not known."""
    uncoded_ms: float
    coded_ms: float
    floor_ms: float
    """The same computing, nothing sent or updated."""
    unlimited_ms: float
    """The uncoded step on a link without a limit."""
    uncoded_nbytes: int
    """Moved in a step."""
    coded_nbytes: int

    @property
    def uncoded_exposed_ms(self) -> float:
        """What the link adds to an uncoded step."""
        return self.uncoded_ms - self.unlimited_ms

    @property
    def coded_exposed_ms(self) -> float:
        """What the link and the codecs add to a coded step."""
        return self.coded_ms - self.unlimited_ms

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        exposed = {"uncoded_exposed_ms": self.uncoded_exposed_ms, "coded_exposed_ms": self.coded_exposed_ms}
        return {**dataclasses.asdict(self), **exposed}


def link_rows(found: Sequence[tuple[str | None, Sequence[Mapping[str, Any]]]]) -> list[LinkRow]:
    """Return a row for each rate.

    Args:
        found: Rates, the one without a limit first, and the rows of `bench step` there, as in JSON.
    """
    rows: list[LinkRow] = []
    for rate, steps in found:
        by = {one["plan"]: one for one in steps}
        rows.append(
            LinkRow(
                rate=rate,
                uncoded_ms=by[UNCODED]["step_ms"],
                coded_ms=by[CODED]["step_ms"],
                floor_ms=by[FLOOR]["step_ms"],
                unlimited_ms=rows[0].uncoded_ms if rows else by[UNCODED]["step_ms"],
                uncoded_nbytes=by[UNCODED]["moved_nbytes"],
                coded_nbytes=by[CODED]["moved_nbytes"],
            )
        )
    return rows


def link_table(rows: Sequence[LinkRow]) -> Table:
    """Return the rows as a table."""
    table = new_table("a ZeRO-3 step on two hosts of one rank: gathered as int8, reduced as int4, with error feedback")
    table.add_column("link\n\n", no_wrap=True)
    for head in (
        "floor\nms\n",
        "uncoded\nms\n",
        "coded\nms\n",
        "coded /\nuncoded\n",
        "coded /\nunlimited\n",
        "exposed\nuncoded\nms",
        "exposed\ncoded\nms",
        "exposed\ncoded /\nuncoded",
        "moved\nuncoded\n",
        "moved\ncoded\n",
    ):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        is_limited = row.rate is not None
        table.add_row(
            row.rate or "no limit",
            f"{row.floor_ms:.0f}",
            f"{row.uncoded_ms:.0f}",
            f"{row.coded_ms:.0f}",
            f"{row.coded_ms / row.uncoded_ms:.2f}",
            f"{row.coded_ms / row.unlimited_ms:.2f}",
            f"{row.uncoded_exposed_ms:.0f}" if is_limited else "-",
            f"{row.coded_exposed_ms:.0f}",
            f"{row.coded_exposed_ms / row.uncoded_exposed_ms:.2f}" if is_limited else "-",
            format_bytes(row.uncoded_nbytes),
            format_bytes(row.coded_nbytes),
        )
    return table


def link_legend(*, rounds: int, steps: int) -> list[str]:
    """Return the lines below the table."""
    return [
        f"# {rounds} rounds, each with {steps} steps in a row uncoded, coded and without the runtime (floor), in turn; "
        "medians.",
        "# One job for each link, one after the other: compare their floors before their steps.",
        "# exposed: the step less the uncoded one without a limit, so that the codecs' work counts. moved: per rank.",
    ]


def draw_links(path: Path, rows: Sequence[LinkRow]) -> None:
    """Write a picture of the steps."""
    with drawing(path, panel=(1.6 + 1.8 * len(rows), 3.6)) as (_, panels):
        panel = panels[0][0]
        for shift, label, times in (
            (-0.27, "no runtime", [row.floor_ms for row in rows]),
            (0.0, UNCODED, [row.uncoded_ms for row in rows]),
            (0.27, CODED, [row.coded_ms for row in rows]),
        ):
            bars = panel.bar([place + shift for place in range(len(rows))], times, width=0.25, label=label)
            panel.bar_label(bars, fmt="%.0f", fontsize=7)
        panel.set_xticks(range(len(rows)), labels=[row.rate or "no limit" for row in rows])
        panel.set_ylabel("ms per step")
        panel.set_title("ZeRO-3 on two hosts, int8 gathers, int4 sums", fontsize=9)
        panel.legend(fontsize=8)
