"""Cut optimizer state anew, and compare that with copying the bytes that change their rank.

    mpirun -n 2 python benchmarks/rebalance_copy.py                       # AdamW's state of 1 GiB, over both ranks
    mpirun -n 2 python benchmarks/rebalance_copy.py --size 128MiB --rounds 3
    mpirun -n 2 python benchmarks/rebalance_copy.py --plan 3 --scratch /mnt/nvme

The bytes that change their rank are copied into memory that is new, as it is to who gets them: by those ranks, each as
many as it gets, then by all ranks at once, each an equal part. What stays on its rank does not move where state is in a
host's memory (decision 0179). Rounds take turns in one run; ratios are those of medians, then of the fastest rounds: on
a busy machine these say more.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable

import numpy as np

import zerort as zr
from zerort.config import format_bytes, parse_bytes
from zerort.engine.report import Rebalanced

UNITS = 8


def main() -> None:
    """Take turns, show the ratio."""
    options = parse()
    tier = zr.Tier.DEVICE if options.scratch is None else zr.Tier.NVME
    plan = zr.Plan.zero(options.plan, state=tier)
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=1e-3), scratch=options.scratch) as rt:
        numel = options.size // 8 // UNITS  # two moments in float32
        for at in range(UNITS):
            rt.register(f"unit{at}", {"w": zr.TensorSpec((numel,))})
        for unit in rt.units.values():
            unit.reduce({"w": np.ones(numel, np.float32)})
        rt.step()  # so that state is there
        light, heavy = [1] * rt.size, [3, *[1] * (rt.size - 1)]
        rt.rebalance(shard_weights=heavy)
        source = np.ones(options.size, np.uint8)  # once: pages that copies and moves leave are there for the next ones
        turns: list[list[float]] = []
        nbytes = 0
        for number in range(options.rounds):
            done: list[Rebalanced] = []

            def move_shards(weights: list[int] = heavy if number % 2 else light, done: list[Rebalanced] = done) -> None:
                done.append(rt.rebalance(shard_weights=weights))

            before = held(rt)
            move = timed(rt, move_shards)
            nbytes = done[0].nbytes
            copies = [timed(rt, copy_of(source, count)) for count in (arrived(before, held(rt)), nbytes // rt.size)]
            turns.append([move, *copies])
        if rt.rank == 0:
            show(rt, options.size, nbytes, np.array(turns))


def show(rt: zr.Runtime, size: int, nbytes: int, seconds: np.ndarray) -> None:
    """Print what was measured: seconds of a move, and of copying what moves, round by round."""
    (move, *copies), (best, *fastest) = np.median(seconds, axis=0), seconds.min(axis=0)
    print(
        f"{rt.size} ranks, state of {format_bytes(size)} over all; {format_bytes(nbytes)} of it change their rank in "
        f"{move:.3f} s ({nbytes / move / 1e9:.2f} GB/s)"
    )
    for who, usual, least in zip(("the ranks that get it", "all ranks, equal parts"), copies, fastest, strict=True):
        print(f"  copying it, by {who:22} {usual:.3f} s; ratio {move / usual:.2f}, of the fastest {best / least:.2f}")


def held(rt: zr.Runtime) -> list[tuple[int, int]]:
    """Return the bytes of state, first and last, that this rank holds of each unit."""
    found = []
    for unit in rt.units.values():
        for section in unit.sections:
            own = section.partition.of(rt.rank)
            found.append((8 * own.first, 8 * own.stop))
    return found


def arrived(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> int:
    """Return how many bytes a rank has got."""
    both = zip(before, after, strict=True)
    return sum(last - first - max(min(last, end) - max(first, begin), 0) for (begin, end), (first, last) in both)


def copy_of(source: np.ndarray, nbytes: int) -> Callable[[], None]:
    """Return what copies so many bytes into new memory: mappings of its own, or an allocator would use old ones."""

    def copy() -> None:
        if nbytes:
            new = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            new.madvise(mmap.MADV_HUGEPAGE)  # as state has them
            np.frombuffer(new, np.uint8)[:] = source[:nbytes]

    return copy


def timed(rt: zr.Runtime, work: Callable[[], object]) -> float:
    """Return the seconds of the rank that takes longest, all of them working at once."""
    rt.group.barrier().wait()
    began = time.perf_counter()
    work()
    took = np.array([time.perf_counter() - began])
    return float(rt.group.all_gather(took).wait().max())


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("1GiB"), help="bytes of state (default: 1GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--plan", type=int, default=1, choices=(1, 2, 3), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--scratch", help="keep state on this disk instead of in memory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
