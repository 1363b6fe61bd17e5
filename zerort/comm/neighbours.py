"""What processes of one machine can find out about each other: whether they see each other, files, memory; share cores.

Containers and kernels may hide any of these. Each question is asked by all ranks at once and answered for all alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zerort.native import address_of
from zerort.native.rendezvous import allow_reading, can_read, disallow_reading, is_alive

__all__ = [
    "are_crowded",
    "can_open_each_other",
    "can_read_each_other",
    "cpu_quotas",
    "process_space",
    "running_kernel",
    "see_each_other",
    "share_cores",
]

Tell = Callable[[str], list[str]]


def see_each_other(tell: Tell) -> bool:
    """Find out whether every rank sees every other's process: not in containers of their own, nor behind hidepid."""
    told = [text.rsplit(",", 1) for text in tell(f"{process_space()},{os.getpid()}")]
    sees = len({space for space, _ in told}) == 1 and all(is_alive(int(pid)) for _, pid in told)
    return all(answer == "yes" for answer in tell("yes" if sees else "no"))


def can_open_each_other(tell: Tell) -> bool:
    """Find out, by trying, whether every rank may open every other's open files: security modules may forbid it."""
    with open(os.devnull, "rb") as file:
        mine = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        return all(answer == "yes" for answer in tell("yes" if all(map(_opens, tell(mine))) else "no"))


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def can_read_each_other(tell: Tell, *, wanted: bool) -> bool:
    """Find out, once and by trying, whether every rank may read every other's memory; not if one does not want it.

    If so, `disallow_reading` is this rank's to call when it closes.
    """
    # A number nobody else has: a process of the same id in another container must not pass for this rank.
    landmark = np.frombuffer(os.urandom(8), np.uint64).copy()
    if wanted:
        allow_reading()
    mine = f"{int(wanted)},{os.getpid()},{address_of(landmark)},{landmark[0]}"
    told = [map(int, text.split(",")) for text in tell(mine)]
    can = all(wants and can_read(pid, address=where, expected=what) for wants, pid, where, what in told)
    everyone = all(answer == "yes" for answer in tell("yes" if can else "no"))
    if wanted and not everyone:
        disallow_reading()
    return everyone


def process_space() -> str:
    """Return what is equal on ranks that see each other's processes: in containers of their own they do not."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown, of process {os.getpid()}"


def share_cores(tell: Tell, *, counts: bool = True) -> bool:
    """Find out whether ranks must share cores: there are too few where they may run, or a quota grants too few.

    Of those who are told, ranks of this machine count, also those in containers that pass for hosts of their own
    (decision 0170).

    Args:
        tell: Exchanges texts with all who ask.
        counts: Whether this rank is one of those whose cores are asked for.
    """
    machine = running_kernel()
    mine = [machine if counts else None, sorted(os.sched_getaffinity(0)), cpu_quotas()]
    told = [json.loads(text) for text in tell(json.dumps(mine))]
    here = [(set(cores), dict(quotas)) for place, cores, quotas in told if place == machine]
    return are_crowded([cores for cores, _ in here], [quotas for _, quotas in here])


def running_kernel() -> str:
    """Return what is equal on ranks of one machine, whatever containers or network namespaces they are in."""
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename


def are_crowded(cores: Sequence[set[int]], quotas: Sequence[dict[str, float]]) -> bool:
    """Say whether not every rank can have a core of its own.

    Args:
        cores: Of each rank, on which it may run.
        quotas: Of each rank, the cores' worth of time that it shares with all ranks that name the same quota.

    >>> are_crowded([{0}, {1}], [{}, {}]), are_crowded([{0, 1}, {0, 1}, {0, 1}], [{}] * 3)
    (False, True)
    """
    named = [name for of_rank in quotas for name in of_rank]
    if any(named.count(name) > granted for of_rank in quotas for name, granted in of_rank.items()):
        return True
    taken: dict[int, int] = {}  # core: rank

    def find(rank: int, tried: set[int]) -> bool:
        """Give a rank a core, moving others on to another of theirs."""
        free = next((core for core in cores[rank] if core not in taken), None)
        if free is not None:
            taken[free] = rank
            return True
        for core in cores[rank] - tried:
            tried.add(core)
            if find(taken[core], tried):
                taken[core] = rank
                return True
        return False

    return len(cores) > len(set().union(*cores)) or not all(find(rank, set()) for rank in range(len(cores)))


def cpu_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> dict[str, float]:
    """Return what limits this process's CPU time: the control groups, and how many cores' worth each grants.

    Args:
        root: Where control groups are mounted; version 2, or version 1 with a folder for ``cpu``.
        own: The file that names those of this process.
    """
    found = {}
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in [root] if not controllers else [root / controllers, root / "cpu"]:
            folder = base / path.lstrip("/")
            for place in [folder, *folder.parents]:  # a container sees its own group as the root
                granted = _granted(place)
                if granted is not None:
                    at = place.stat()
                    found[f"{at.st_dev}:{at.st_ino}"] = granted
                if place == base:
                    break
    return found


def _granted(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us").strip(),
        _text(folder / "cpu.cfs_period_us").strip(),
    ]
    quota, period = words[0], words[-1]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
