"""What ``bench step`` found, as values and as tables: one `StepRow` per plan, and one for the floor.

All ranks meet before and after each row of steps, so a step takes the same time on all of them. Its *slowest* rank is
the one that computed the longest: the others' waits for it are imbalance, its own are the runtime's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.step.contenders import PARTS, Sample
from zerort.cli.screen import new_table
from zerort.config import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BASE", "FLOOR", "StepRow", "make_rows", "parts_table", "steps_legend", "steps_table"]

FLOOR = "floor"
"""What computes without the runtime."""

BASE = "zero0"
"""What the steps of other plans are compared with."""

_REST = "rest"


@dataclass(frozen=True, slots=True)
class StepRow:
    """One plan's step. Times are ms per step; medians over the rounds unless they say otherwise."""

    plan: str
    step_ms: float
    min_ms: float
    """Of the fastest round."""
    compute_ms: float
    """On the slowest rank."""
    exposed_ms: float
    """On the slowest rank's main thread: not computing."""
    exposed: float
    """The same as a part of the step."""
    exposed_worst_ms: float
    """On the rank where it was most: with its waits for slower ranks."""
    cpu_ms: float
    """CPU time of all threads, mean over the ranks."""
    runtime_cpu_ms: float
    """The same without computing: what the runtime costs, whether hidden or not."""
    parts_ms: dict[str, float]
    """Of the exposed time on the slowest rank: means over the rounds, so that they add up."""
    ratio: float | None
    """To the step of the base (zero0) in the same round."""
    floor_ratio: float
    """To the floor in the same round."""
    at_rest_nbytes: int
    """Bytes at rest, on the rank that has most."""
    moved_nbytes: int
    """Bytes of the arrays that went through collectives in a step."""
    loss: float | None
    """After the last step; None for the floor, which learns nothing."""
    rounds_ms: tuple[float, ...]
    """Every round's step."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


def make_rows(
    rounds: Sequence[Mapping[str, Sequence[Sample]]],
    *,
    at_rest: dict[str, int],
    moved: dict[str, int],
    losses: dict[str, float],
    base: str = BASE,
) -> list[StepRow]:
    """Return a row for each contender.

    Args:
        rounds: For each round, every rank's sample by contender.
        at_rest: Bytes at rest by plan.
        moved: Bytes moved by plan.
        losses: The last loss by plan.
        base: The contender that ratios are taken to.
    """
    names = list(rounds[0])
    steps = {name: [max(sample.step for sample in one[name]) for one in rounds] for name in names}

    def ratio(name: str, base: str) -> float | None:
        if base not in steps:
            return None
        return statistics.median(mine / other for mine, other in zip(steps[name], steps[base], strict=True))

    rows = []
    for name in names:
        slowest = [max(one[name], key=lambda sample: sample.compute) for one in rounds]
        exposed = [1e3 * sample.exposed for sample in slowest]
        parts = {part: 1e3 * statistics.fmean(one.parts[part] for one in slowest) for part in PARTS}
        parts[_REST] = statistics.fmean(exposed) - sum(parts.values())
        floor_ratio = ratio(name, FLOOR)
        assert floor_ratio is not None
        rows.append(
            StepRow(
                plan=name,
                step_ms=1e3 * statistics.median(steps[name]),
                min_ms=1e3 * min(steps[name]),
                compute_ms=1e3 * statistics.median(sample.compute for sample in slowest),
                exposed_ms=statistics.median(exposed),
                exposed=statistics.median(sample.exposed / sample.step for sample in slowest),
                exposed_worst_ms=statistics.median(1e3 * max(s.exposed for s in one[name]) for one in rounds),
                cpu_ms=1e3 * statistics.median(statistics.fmean(s.cpu for s in one[name]) for one in rounds),
                runtime_cpu_ms=1e3
                * statistics.median(statistics.fmean(s.runtime_cpu for s in one[name]) for one in rounds),
                parts_ms=parts,
                ratio=ratio(name, base),
                floor_ratio=floor_ratio,
                at_rest_nbytes=at_rest.get(name, 0),
                moved_nbytes=moved.get(name, 0),
                loss=losses.get(name),
                rounds_ms=tuple(1e3 * one for one in steps[name]),
            )
        )
    return rows


def steps_table(title: str, rows: Sequence[StepRow], *, base: str = BASE) -> Table:
    """Return the table of all contenders."""
    table = new_table(title)
    table.add_column("plan\n\n", no_wrap=True)
    heads = ("step\nms\nmedian", "\nms\nfastest", "compute\nms\n", "exposed\nms\n", "exposed\n% of step\n")
    for head in (
        *heads,
        "CPU time\nms\n",
        "of it\nruntime\n",
        f"step /\n{base}\n",
        "step /\nfloor\n",
        "at rest\nper rank\n",
        "moved\nper step\n",
    ):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        is_floor = row.plan == FLOOR
        table.add_row(
            row.plan,
            f"{row.step_ms:.1f}",
            f"{row.min_ms:.1f}",
            f"{row.compute_ms:.1f}",
            f"{row.exposed_ms:.1f}",
            f"{row.exposed:.1%}",
            f"{row.cpu_ms:.1f}",
            f"{row.runtime_cpu_ms:.1f}",
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            f"{row.floor_ratio:.3f}",
            "-" if is_floor else format_bytes(row.at_rest_nbytes),
            "-" if is_floor else format_bytes(row.moved_nbytes),
        )
    return table


def parts_table(rows: Sequence[StepRow]) -> Table:
    """Return the table of what the exposed time is spent on."""
    table = new_table("where the exposed time goes: ms per step on the slowest rank, means over the rounds")
    table.add_column("plan", no_wrap=True)
    for part in (*PARTS, _REST):
        table.add_column(part, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        table.add_row(row.plan, *(f"{row.parts_ms[part]:.2f}" for part in (*PARTS, _REST)))
    return table


def steps_legend(*, steps: int, rounds: int) -> list[str]:
    """Return the lines below the tables."""
    return [
        f"# {rounds} rounds, each with {steps} steps in a row of every plan and the floor, in turn; ratios are medians",
        "#   of those within a round. The ranks meet before and after each row of steps.",
        "# compute: in the model, on the rank that computed longest; exposed: the rest of that rank's step.",
        "# CPU time: of all threads, mean over the ranks; of it runtime: not in the model, be it hidden or not. Other",
        "#   programs do not add to it, and where ranks are as many as cores, no more can be exposed but waiting.",
        "# floor: the same rows through the same model on all ranks at once; plain arrays, nothing sent or updated.",
        "# moved: bytes of the arrays that went through collectives; a gather in shared memory moves none.",
        "# pack: gradients into buckets. fire: look for NaN, start the sum. wait: for the others, or doing their work.",
        "#   norm: of the summed gradients. update: the optimizer. rest: batches, the sum of the loss, last meeting.",
    ]
