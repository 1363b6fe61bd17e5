"""What processes of one machine can find out about each other: whether they see each other, files and memory.

Containers and kernels may hide any of these. Each question is asked by all ranks at once and answered for all alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from zerort.native import address_of
from zerort.native.rendezvous import allow_reading, can_read, disallow_reading, is_alive

__all__ = ["can_open_each_other", "can_read_each_other", "process_space", "see_each_other"]

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
