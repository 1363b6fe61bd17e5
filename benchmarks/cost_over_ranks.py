"""Count what a rank sends as the number of ranks grows, and draw it: ``python benchmarks/cost_over_ranks.py``.

    --ranks N,…    numbers of ranks, each on a host of its own       2,4,8,16,32,64
    --out FILE     the picture                                       docs/pictures/cost-over-ranks.svg

Ranks are threads, and messages go through queues that count them; what each rank sends is compared with its formula.
Plain SVG with text as text, readable on light and dark pages.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerort.comm import geometry
from zerort.comm.guard.call import Call
from zerort.comm.transports.carrier import Carrier
from zerort.comm.transports.greeting import GREETING_NBYTES, Greeter
from zerort.comm.transports.host_side import AloneOnHost
from zerort.comm.transports.messages.alarms import Alarm, Alarms
from zerort.comm.transports.shift import Topology
from zerort.testing.counted_post import CountedPost

ROOT = Path(__file__).parents[1]
SMALL_NBYTES, LARGE_NBYTES, PIECE_NBYTES = 1024, 1024**2, 64 * 1024


class Cost(NamedTuple):
    """What the busiest rank sends."""

    messages: int
    nbytes: int


class Row(NamedTuple):
    """One thing that ranks do."""

    title: str
    counted: Callable[[int], Cost]
    formula: Callable[[int], Cost]


def log2(ranks: int) -> int:
    """Return the rounds in which what doubles reaches all ranks."""
    return math.ceil(math.log2(ranks))


def call_of(ranks: int, nbytes: int) -> Call:
    """Return a sum of so many bytes."""
    return Call("all_reduce", "train.py:7", ranks, dtype="float32", numel=nbytes // 4, reduction="sum")


def busiest(post: CountedPost) -> Cost:
    """Return what the rank that sent most sent."""
    return Cost(max(map(len, post.sent.values())), max(map(sum, post.sent.values())))


def greet(ranks: int, *, nbytes: int, direct: bool) -> Cost:
    """Agree on a call, with its data."""
    post = CountedPost(range(ranks))

    def body(rank: int) -> int:
        greeter = Greeter(range(ranks), rank, room=SMALL_NBYTES, direct=direct, trade=post.trade_of(rank))
        greeter.data(nbytes)[:] = 1
        return greeter.greet(call_of(ranks, nbytes), 0, nbytes, most=nbytes)[0]

    assert post.run(body) == [0] * ranks
    return busiest(post)


def carry(ranks: int, *, gathers: bool) -> Cost:
    """Scatter, or gather, a large array."""
    post, numel = CountedPost(range(ranks)), LARGE_NBYTES // 4
    counts = geometry.split_evenly(numel, ranks)

    def body(rank: int) -> bool:
        start, finish = post.start_of(rank), post.finish_of(rank)
        carrier = Carrier(rank, Topology(range(ranks)), nbytes=PIECE_NBYTES, start=start, finish=finish)
        whole, part = np.full(numel, rank + 1, np.float32), np.full(counts[rank], rank + 1, np.float32)
        call = call_of(ranks, LARGE_NBYTES)
        if gathers:
            carrier.gather(geometry.of_all_gather(counts, rank), part, whole, call, AloneOnHost(part, whole))
            return bool((whole == np.repeat(np.arange(1, ranks + 1), counts)).all())
        carrier.scatter(geometry.of_reduce_scatter(counts, rank), part, call, AloneOnHost(whole, part))
        return bool((part == ranks * (ranks + 1) // 2).all())

    assert all(post.run(body))
    return busiest(post)


def sound(ranks: int, *, giving_up: bool) -> Cost:
    """Leave in order; or give up together over the last rank, which does not come."""
    now, mail = [0.0], [list[bytes]() for _ in range(ranks)]
    sent: list[list[int]] = [[] for _ in range(ranks)]

    def open_alarms(rank: int) -> Alarms:
        def send(to: int, raw: bytes) -> None:
            sent[rank].append(len(raw))
            mail[to].append(raw)

        def receive() -> bytes | None:
            return mail[rank].pop(0) if mail[rank] else None

        return Alarms(rank, ranks, send=send, receive=receive, clock=lambda: now[0])

    here = [open_alarms(rank) for rank in range(ranks - 1 if giving_up else ranks)]
    for rank, alarms in enumerate(here):
        alarms.sound(Alarm(rank, 5, "gave up" if giving_up else "left", "{}"))
        alarms.exchange(last=not giving_up)
    for _ in range(1000 if giving_up else 0):
        now[0] += 1e-3
        for alarms in here:
            alarms.exchange()
    if giving_up:
        assert all(len(alarms.known) == ranks - 2 for alarms in here)
    return Cost(max(map(len, sent)), max(map(sum, sent)))


def rounds_of(ranks: int, *, piece_nbytes: int = LARGE_NBYTES) -> Cost:
    """Return what a rank sends of a large array in one direction: a message per piece and rank."""
    share = math.ceil(LARGE_NBYTES / 4 / ranks) * 4
    return Cost((ranks - 1) * math.ceil(share / piece_nbytes), LARGE_NBYTES // ranks * (ranks - 1))


ROWS = (
    Row(
        "1 KiB all_reduce, direct",
        lambda n: greet(n, nbytes=SMALL_NBYTES, direct=True),
        lambda n: Cost(n - 1, (n - 1) * (GREETING_NBYTES + SMALL_NBYTES)),
    ),
    Row(
        "1 KiB all_reduce, passed on",
        lambda n: greet(n, nbytes=SMALL_NBYTES, direct=False),
        lambda n: Cost(log2(n), GREETING_NBYTES * log2(n) + (n - 1) * SMALL_NBYTES),
    ),
    Row(
        "check of a large call, passed on",
        lambda n: greet(n, nbytes=0, direct=False),
        lambda n: Cost(log2(n), GREETING_NBYTES * log2(n)),
    ),
    Row("1 MiB all_gather", lambda n: carry(n, gathers=True), rounds_of),
    Row(
        "1 MiB reduce_scatter",
        lambda n: carry(n, gathers=False),
        lambda n: rounds_of(n, piece_nbytes=PIECE_NBYTES),
    ),
)
"""What is counted exactly; ranks are a power of two."""

BOUNDS = (
    Row("leaving", lambda n: sound(n, giving_up=False), lambda n: Cost(2 * log2(n), 2 * log2(n) * 64)),
    Row("giving up", lambda n: sound(n, giving_up=True), lambda n: Cost(28 * log2(n), 28 * log2(n) * 128)),
)
"""What stays below its formula."""

WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 250, 70, 46, 90
COLORS = ("#2f6fb3", "#d1742f", "#3f9a5f", "#8a5fb3", "#c04f6a", "#4fa3a8", "#8c7a4f")
STYLE = """<style>
  text { font-family: system-ui, "Segoe UI", "DejaVu Sans", Helvetica, sans-serif; font-size: 12px; fill: #1f2328 }
  .page { fill: #ffffff } .bold { font-weight: 600 } .line { fill: none; stroke-width: 1.5 } .axis { stroke: #b7bfc8 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #0d1117 } .axis { stroke: #57606a } }
</style>"""


def draw(found: dict[str, dict[int, Cost]], formulas: dict[str, dict[int, Cost]]) -> str:
    """Return the picture: points are counted, lines are formulas."""
    ranks = sorted(next(iter(found.values())))
    height = TOP + HEIGHT + 50 + 18 * ((len(found) + 1) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 2 * WIDTH + GAP + 20} {height}">{STYLE}',
        '<rect class="page" width="100%" height="100%"/>',
    ]
    for panel, title in enumerate(("messages that a rank sends", "bytes that a rank sends")):
        left = LEFT + panel * (WIDTH + GAP)
        values = [cost[panel] for rows in (*found.values(), *formulas.values()) for cost in rows.values()]
        top, low = math.ceil(math.log10(max(values))), math.floor(math.log10(min(values)))

        def x(n: int, left: int = left) -> float:
            return left + WIDTH * math.log2(n / ranks[0]) / max(1.0, math.log2(ranks[-1] / ranks[0]))

        def y(value: float, top: int = top, low: int = low) -> float:
            return TOP + HEIGHT * (top - math.log10(value)) / (top - low)

        parts.append(f'<text class="bold" x="{left}" y="24">{title}</text>')
        for power in range(low, top + 1):
            at = y(10**power)
            parts.append(f'<line class="axis" x1="{left}" x2="{left + WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
        bottom = TOP + HEIGHT + 18
        parts += [f'<text x="{x(n):.1f}" y="{bottom}" text-anchor="middle">{n}</text>' for n in ranks]
        for color, name in zip(COLORS, found, strict=True):
            line = " ".join(f"{x(n):.1f},{y(cost[panel]):.1f}" for n, cost in formulas[name].items())
            parts.append(f'<polyline class="line" stroke="{color}" points="{line}"/>')
            for n, cost in found[name].items():
                parts.append(f'<circle cx="{x(n):.1f}" cy="{y(cost[panel]):.1f}" r="3.5" fill="{color}"/>')
    for at, (color, name) in enumerate(zip(COLORS, found, strict=True)):
        left, top = LEFT + at % 2 * (WIDTH + GAP), TOP + HEIGHT + 44 + at // 2 * 18
        bound = " (line: bound)" if any(row.title == name for row in BOUNDS) else ""
        parts.append(f'<circle cx="{left}" cy="{top - 4}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{left + 12}" y="{top}">{name}{bound}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Count, compare, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures/cost-over-ranks.svg")
    options = parser.parse_args()
    ranks = [int(word) for word in options.ranks.split(",")]
    found = {row.title: {n: row.counted(n) for n in ranks} for row in (*ROWS, *BOUNDS)}
    formulas = {row.title: {n: row.formula(n) for n in ranks} for row in (*ROWS, *BOUNDS)}
    for title, costs in found.items():
        for n, (messages, nbytes) in costs.items():
            expected = formulas[title][n]
            print(f"{title:34} {n:4} ranks: {messages:5} messages of {expected.messages:5}", end="  ")
            print(f"{nbytes:9,} bytes of {expected.nbytes:9,}")
    options.out.write_text(draw(found, formulas))


if __name__ == "__main__":
    main()
