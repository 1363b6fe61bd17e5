"""What the doctor finds about where ranks run: each beside its GPU, on enough cores.

Every rank looks at its own place (`look_at_place`), for launchers bind ranks differently; rank 0 judges them all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerort.cli.doctor.finding import Finding, ok, warn
from zerort.errors import DeviceError

__all__ = ["judge_places", "look_at_place"]

ENOUGH_CORES = 4
"""For a rank with a GPU: its loop, the threads of its streams and its group, and those of a disk."""


def look_at_place(local_rank: int, *, sys: Path = Path("/sys")) -> dict[str, Any]:
    """Return on how many cores this rank may run, its GPU, and whether any of the cores is beside it.

    Args:
        local_rank: Which of its machine's ranks this is.
        sys: Where the kernel tells of devices.
    """
    cores = os.sched_getaffinity(0)
    bus = _gpu_of(local_rank)
    place: dict[str, Any] = {"cores": len(cores), "gpu": bus, "node": None, "beside": True}
    if bus is not None:
        node = _read(sys / "bus/pci/devices" / bus.lower() / "numa_node")
        if node and int(node) >= 0:  # -1: this machine has one, or does not tell
            near = _numbers(_read(sys / f"devices/system/node/node{node}/cpulist"))
            place.update(node=int(node), beside=not near or bool(near & cores))
    return place


def judge_places(places: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings about what every rank's `look_at_place` returned; none where ranks have no GPUs."""
    with_gpu = {rank: place for rank, place in enumerate(places) if place["gpu"] is not None}
    if not with_gpu:
        return
    few = [f"rank {rank}: {place['cores']}" for rank, place in with_gpu.items() if place["cores"] < ENOUGH_CORES]
    far = [f"rank {rank}: node {place['node']}" for rank, place in with_gpu.items() if not place["beside"]]
    if few:
        yield warn(
            "cores per rank",
            f"fewer than {ENOUGH_CORES} for a rank with a GPU: {', '.join(few)}",
            cure="Let each rank have more: mpirun -bind-to numa (MPICH) or --bind-to numa (Open MPI); Slurm: -c 8.",
        )
    else:
        yield ok("cores per rank", f"{min(place['cores'] for place in with_gpu.values())} or more")
    if far:
        yield warn(
            "numa",
            f"no core beside its GPU, which hangs on another NUMA node: {', '.join(far)}",
            cure="Bind ranks to the node of their GPU (nvidia-smi topo -m shows it), or give each rank all cores.",
        )


def _gpu_of(local_rank: int) -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        from zerort.device.cuda.library import count_gpus, cupy

        bus: str = cupy.cuda.runtime.deviceGetPCIBusId(local_rank % count_gpus())
    except (DeviceError, ZeroDivisionError):
        return None
    return bus


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list like ``0-3,8``."""
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in ranges.split(",") if part]
    return {number for first, last in ends for number in range(int(first), int(last) + 1)}
