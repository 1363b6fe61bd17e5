"""A limit on a process's memory that the kernel keeps, and what the process uses of it. Linux; no rights needed.

    RLIMIT_DATA   private memory: each rank may add its share, and the next allocation fails (MemoryError)
    RLIMIT_AS     all mappings, windows that ranks share included: each rank maps all of them, so each may add what the
                  ranks may add together

A cgroup would count the ranks as one, but needs rights that users of a cluster do not have. Memory that is reserved and
never touched counts, too; so threads get small stacks, and malloc one arena instead of one of 64 MiB for each thread.
"""

from __future__ import annotations

import ctypes
import resource
import threading

__all__ = ["limit_memory", "peak_nbytes", "resident_nbytes", "used_nbytes"]

_M_ARENA_MAX = -8
_STACK_NBYTES = 512 * 1024


def limit_memory(mine: int, *, together: int) -> None:
    """Let this process add ``mine`` bytes of its own, and map ``together`` bytes, from now on. There is no way back."""
    threading.stack_size(_STACK_NBYTES)
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    for kind, now, more in ((resource.RLIMIT_DATA, "VmData", mine), (resource.RLIMIT_AS, "VmSize", together)):
        limit = _status(now) + more
        resource.setrlimit(kind, (limit, limit))


def used_nbytes(ranks: int) -> int:
    """Return the memory that this process holds; libraries count in parts, as ``ranks`` processes have the same ones.

    Unlike PSS it does not depend on strangers that run beside the job and have these libraries, too.
    """
    return _status("RssAnon") + _status("RssShmem") + _status("RssFile") // ranks


def resident_nbytes() -> int:
    """Return the memory that this process holds now; what it shares with others counts in parts (PSS)."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def peak_nbytes() -> int:
    """Return the most that this process has ever held, as the kernel counts: what it shares counts in full."""
    return _status("VmHWM")


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))
