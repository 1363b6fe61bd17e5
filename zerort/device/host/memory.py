"""How much memory a process may still have: of its host, of its control group, of its own limits."""

from __future__ import annotations

import os
import resource

__all__ = ["available_nbytes", "fields_of", "left_of_limits"]

_CGROUP = "/sys/fs/cgroup"


def available_nbytes() -> int:
    """Return the bytes that new arrays can have before this machine, or this process's control group, swaps or kills.

    >>> available_nbytes() > 0
    True
    """
    available = next((nbytes for name, nbytes in fields_of("/proc/meminfo") if name == "MemAvailable"), None)
    if available is None:
        raise OSError("Expected a line MemAvailable in /proc/meminfo, got none.")
    limit, used = _of_cgroup("memory.max"), _of_cgroup("memory.current")
    if limit is None or used is None:
        return available
    cached = _of_cgroup("memory.stat", "inactive_file") or 0  # given back when somebody needs it
    return max(min(available, limit - used + cached), 0)


def left_of_limits() -> int | None:
    """Return the bytes that this process's own limits (``ulimit -v``, ``ulimit -d``) leave it; None: it has none."""
    held = dict(fields_of("/proc/self/status"))
    left = [
        max(limit - held[field], 0)
        for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return min(left, default=None)


def fields_of(path: str) -> list[tuple[str, int]]:
    """Return the sizes that a file of the kernel lists in kB, by name, in bytes."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = (line.partition(":") for line in file)
        return [(name, int(value.split()[0]) * 1024) for name, _, value in lines if value.rstrip().endswith(" kB")]


def _of_cgroup(name: str, field: str = "") -> int | None:
    """Return a number of this process's control group (v2); None: there is none, or no limit."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            path = next((line.rstrip("\n")[3:] for line in file if line.startswith("0::")), None)
        if path is None:
            return None
        with open(os.path.join(_CGROUP, path.lstrip("/"), name), encoding="ascii") as file:
            return next(int(line.removeprefix(field)) for line in file if line.startswith(field))
    except (OSError, ValueError, StopIteration):
        return None
