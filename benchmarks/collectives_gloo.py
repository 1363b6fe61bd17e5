"""Collectives of zerort and of torch.distributed (gloo), taking turns in one run.

    mpirun -n 2 python benchmarks/collectives_gloo.py

Prints, per collective and size, the median time of each over repetitions and how many times faster zerort is. Arrays
are fp32; zerort's come from ``group.zeros`` (window) or are plain arrays (own), gloo's are tensors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import zerort as zr
from zerort.config import parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64K,1M,16M,64M", help="bytes of the full array (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of every method (default: %(default)s)")
    options = parser.parse_args()
    group = zr.open_group()
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        sys.exit("collectives_gloo.py needs torch: pip install torch")
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    dist.init_process_group("gloo", rank=group.rank, world_size=group.size)
    if group.rank == 0:
        print(f"{group}; torch {torch.__version__}; {os.cpu_count()} cores; median of {options.repeat}")
        titles = f"{'collective':16}{'bytes':>12}{'gloo us':>12}{'window us':>12}{'own us':>12}"
        print(f"{titles}{'gloo/window':>13}{'gloo/own':>10}")
    for size in map(parse_bytes, options.sizes.split(",")):
        compare(group, torch, dist, size, options.repeat)
    dist.destroy_process_group()
    group.close()


def compare(group: zr.Group, torch: Any, dist: Any, nbytes: int, repeat: int) -> None:
    """Time each collective at one size and print a line for each."""
    numel = nbytes // 4 // group.size * group.size
    share = numel // group.size
    tensor, part = torch.ones(numel), torch.ones(share)
    window, shard = group.zeros(numel, "float32"), group.zeros(share, "float32")
    own, own_shard, out = np.ones(numel, np.float32), np.ones(share, np.float32), np.ones(numel, np.float32)
    mine = window[group.rank * share :][:share]
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch has renamed them
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    methods = {
        "reduce_scatter": (
            lambda: scatter(part, tensor),
            lambda: group.reduce_scatter(window, out=mine).wait(),
            lambda: group.reduce_scatter(own, out=own_shard).wait(),
        ),
        "all_reduce": (
            lambda: dist.all_reduce(tensor),
            lambda: group.all_reduce(window, out=window).wait(),
            lambda: group.all_reduce(own, out=own).wait(),
        ),
        "all_gather": (
            lambda: gather(tensor, part),
            lambda: group.all_gather(shard, out=out).wait(),
            lambda: group.all_gather(own_shard, out=out).wait(),
        ),
    }
    for name, calls in methods.items():
        window[:], own[:], tensor[:] = 0, 0, 0
        gloo, ours, plain = (statistics.median(times) for times in take_turns(group, calls, repeat))
        if group.rank == 0:
            row = f"{name:16}{numel * 4:12,}{gloo * 1e6:12.1f}{ours * 1e6:12.1f}{plain * 1e6:12.1f}"
            print(f"{row}{gloo / ours:12.1f}x{gloo / plain:9.1f}x", flush=True)
    for array in (window, shard):
        group.free(array)


def take_turns(group: zr.Group, calls: Sequence[Callable[[], object]], repeat: int) -> list[list[float]]:
    """Return, for each call, the seconds of its repetitions; in every repetition each call has its turn."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for call, seconds in zip(calls, times, strict=True):
            group.barrier().wait()
            count, began = 0, time.perf_counter()
            while count < 3:
                call()
                count += 1
            spent = np.array([(time.perf_counter() - began) / count])
            seconds.append(float(group.all_reduce(spent, reduction="max").wait()[0]))
    return times


if __name__ == "__main__":
    main()
