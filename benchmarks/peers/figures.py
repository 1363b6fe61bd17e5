"""What the benchmark found, as values and as tables: a `Row` per method, and the targets with what was reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from zerort.cli.screen import new_table

FLOOR = "single"
OURS = "zero3"
CLIPPED = "zero3-clip"
COMPILED = "zero3-compiled"
OFFLOADED, OFFLOADED_PEER = "zero3-nvme", "deepspeed-nvme"
APART = 1e-6
"""How far a loss may be from the reference, relatively."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method. Times are ms per step, medians over the rounds; memory is in bytes."""

    name: str
    title: str
    rounds_ms: tuple[float, ...]
    step_ms: float
    min_ms: float
    cpu_ms: float
    """CPU time of all threads of a rank, mean over the ranks."""
    floor_ratio: float | None
    """To the floor in the same round."""
    ours_ratio: float | None
    """ZeRO-3's step to this one's in the same round."""
    start_seconds: float
    """To be ready, without importing torch and making the model."""
    pss: int
    """Largest sum over the ranks, from the start of the job on."""
    rss: int
    """Most of a rank, on the rank that had most; shared pages count in full."""
    apart: float | None
    """Largest relative distance of a loss from the reference; None for the floor, whose ranks learn apart."""


class Alone(NamedTuple):
    """What is found out about a method while no other one lives."""

    start_seconds: float
    pss: int
    rss: int
    losses: list[float]


class Timed(NamedTuple):
    """A turn of a method: ms per step, means over the ranks."""

    ms: float
    cpu_ms: float


def make_rows(
    titles: Mapping[str, str],
    alone: Mapping[str, Alone],
    rounds: Sequence[Mapping[str, Timed]],
    expected: Mapping[str, Sequence[float]],
) -> list[Row]:
    """Return a row for each method, in the order of ``alone``; ``expected`` has the losses that each should have."""
    steps = {name: [one[name].ms for one in rounds] for name in alone}

    def ratio(mine: str, other: str) -> float | None:
        if mine not in steps or other not in steps:
            return None
        return statistics.median(a / b for a, b in zip(steps[mine], steps[other], strict=True))

    return [
        Row(
            name=name,
            title=titles[name],
            rounds_ms=tuple(steps[name]),
            step_ms=statistics.median(steps[name]),
            min_ms=min(steps[name]),
            cpu_ms=statistics.median(one[name].cpu_ms for one in rounds),
            floor_ratio=ratio(name, FLOOR),
            ours_ratio=ratio(OURS, name),
            start_seconds=found.start_seconds,
            pss=found.pss,
            rss=found.rss,
            apart=None
            if name == FLOOR
            else max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected[name], strict=True)),
        )
        for name, found in alone.items()
    ]


def methods_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of all methods."""
    table = new_table(title)
    table.add_column("method\n\n", no_wrap=True)
    for head in (
        "step\nms\nmedian",
        "\nms\nfastest",
        "CPU time\nms\n",
        "step /\nfloor\nmedian",
        "step /\nfloor\nfastest",
        f"{OURS} /\nthis\nmedian",
        "sum of PSS\npeak\nMiB",
        f"{OURS} /\nthis\n",
        "worst RSS\npeak\nMiB",
        f"{OURS} /\nthis\n",
        "start\ns\n",
        "loss\noff by\n",
    ):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    floor = next(row for row in rows if row.name == FLOOR)
    ours = next((row for row in rows if row.name == OURS), None)
    for row in rows:
        table.add_row(
            row.title,
            f"{row.step_ms:.1f}",
            f"{row.min_ms:.1f}",
            f"{row.cpu_ms:.1f}",
            _ratio(row.floor_ratio),
            _ratio(row.min_ms / floor.min_ms),
            _ratio(row.ours_ratio),
            f"{row.pss / 2**20:.0f}",
            _ratio(ours and ours.pss / row.pss),
            f"{row.rss / 2**20:.0f}",
            _ratio(ours and ours.rss / row.rss),
            f"{row.start_seconds:.2f}",
            "-" if row.apart is None else f"{row.apart:.0e}",
            style="bold" if row is ours else None,
        )
    return table


class Target(NamedTuple):
    """A figure that ZeRO-3 is to reach."""

    what: str
    limit: float
    reached: float

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.reached <= self.limit


def targets(rows: Sequence[Row], *, ranks: int, clipped: bool) -> list[Target]:
    """Return what ZeRO-3 is to reach and what it does, as far as the methods for it were run."""
    by_name = {row.name: row for row in rows}
    ours = by_name.get(OURS)
    if ours is None:
        return []
    found: list[Target] = []

    def step(other: str, limit: float) -> None:
        if other in by_name and (ratio := by_name[other].ours_ratio) is not None:
            found.append(Target(f"{OURS} step / {by_name[other].title}", limit, ratio))

    def memory(field: str, other: str, limit: float, mine: str = OURS) -> None:
        if other in by_name and mine in by_name:
            small, large = by_name[mine], by_name[other]
            words = {"pss": "sum of PSS", "rss": "worst RSS"}[field]
            found.append(
                Target(f"{mine} {words} / {large.title}", limit, getattr(small, field) / getattr(large, field))
            )

    if ranks == 2:
        step(FLOOR, 1.06 if clipped else 1.03)
        if CLIPPED in by_name and (ratio := by_name[CLIPPED].floor_ratio) is not None:
            found.append(Target(f"{CLIPPED} step / {by_name[FLOOR].title}", 1.06, ratio))
        step("ddp", 0.93)
        step("fsdp2", 0.70)
        step("deepspeed", 0.65)
        memory("pss", "fsdp2", 0.60)
        memory("pss", "deepspeed", 0.45)
        memory("rss", "ddp", 0.82)
        for mine, other, limit in ((COMPILED, OURS, 1.02), (OFFLOADED, OFFLOADED_PEER, 0.60)):
            if mine in by_name and other in by_name:
                pairs = zip(by_name[mine].rounds_ms, by_name[other].rounds_ms, strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                found.append(Target(f"{mine} step / {by_name[other].title}", limit, ratio))
        memory("pss", OFFLOADED_PEER, 0.50, OFFLOADED)
        for small, large in (("zero3", "zero2"), ("zero2", "zero1"), ("zero1", "ddp")):
            memory("pss", large, 1.0, small)
        found.append(Target(f"{OURS} start, s", 0.8, ours.start_seconds))
    elif ranks == 8:
        step("fsdp2", 0.80)
    found += [
        Target(f"{row.name} loss off by", APART, row.apart)
        for row in rows
        if row.name.startswith("zero") and row.apart is not None
    ]
    return found


def targets_table(found: Sequence[Target]) -> Table:
    """Return the targets and what was reached."""
    table = new_table("targets")
    table.add_column("figure", no_wrap=True)
    for head in ("at most", "reached", ""):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    for one in found:
        small = one.limit < 1e-3
        cells = [f"{value:.0e}" if small else f"{value:.2f}" for value in (one.limit, one.reached)]
        table.add_row(one.what, *cells, "met" if one.met else "NOT MET", style=None if one.met else "red")
    return table


def legend(*, steps: int, rounds: int, checked: int, persistent: bool) -> list[str]:
    """Return the lines below the tables."""
    how = "All methods stay loaded and take turns; who waits sleeps in a read."
    if not persistent:
        how = "Each turn is a job of its own with 2 steps before it: all at once would not fit into memory."
    return [
        f"# {rounds} rounds, each with {steps} steps in a row of every method, in turn; ratios are medians of those",
        "#   within a round, or of the fastest rounds. A step: mean over the ranks, from a meeting of all to the next.",
        f"#   {how}",
        "# floor: as many independent processes as ranks, at once, each with its own model, fused AdamW.",
        f"# memory, start and losses: each method alone, {checked} steps. PSS: looked at every 20 ms from the start of",
        "#   the job on, summed over the ranks; start: without importing torch and making the model, from bytecode.",
        "# loss off by: largest relative distance from one process that averages over all ranks' batches.",
    ]


def as_json(row: Row) -> dict[str, Any]:
    """Return a row's fields by name."""
    return {field: getattr(row, field) for field in Row.__slots__}


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
