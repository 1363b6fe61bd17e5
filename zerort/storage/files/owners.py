"""`Owner`: which process a file or directory belongs to, and whether that process is known to be gone.

Host, boot, process number and start time name a process for good: numbers of processes are used again. Scratch
directories and the leases of checkpoints are signed with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from typing import NamedTuple

__all__ = ["Owner", "is_dead", "this_owner"]


class Owner(NamedTuple):
    """What names a process."""

    host: str
    """8 digits that stand for the host."""
    boot: str
    """The first digits of the kernel's boot id."""
    pid: int
    start: int
    """When the process began, in the kernel's ticks: numbers of processes are used again."""


def this_owner() -> Owner:
    """Return what names this process."""
    pid = os.getpid()
    machine = _text("/etc/machine-id") + socket.gethostname()
    boot = _text("/proc/sys/kernel/random/boot_id").replace("-", "")[:8] or "00000000"
    return Owner(hashlib.sha256(machine.encode()).hexdigest()[:8], boot, pid, _start_of(pid) or 0)


def is_dead(owner: Owner, *, on_this_machine: bool = True) -> bool:
    """Say whether the process is known to be gone. Of other hosts nothing is known.

    Args:
        owner: Whose life is asked about.
        on_this_machine: It left its name on a disk of this machine. Elsewhere one of another boot may be alive on
            another machine with our host's name.
    """
    me = this_owner()
    if owner.host != me.host:
        return False
    if owner.boot != me.boot:
        return on_this_machine
    return _start_of(owner.pid) != owner.start


def _start_of(pid: int) -> int | None:
    """Return when a process began; None if there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command's name stands in brackets and may hold anything, brackets too.
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""
