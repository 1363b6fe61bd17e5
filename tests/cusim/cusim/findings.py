"""Findings: what programs did wrong, as the emulator saw it; another seed to look again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from cusim.start import started


def findings() -> list[str]:
    """Give what this process did wrong since the start or the last `clear`, as ``"race: …"``, ``"bounds: …"``."""
    library = started()
    lines = []
    for index in range(library.cusim_findings()):
        room = ctypes.create_string_buffer(1 << 14)
        library.cusim_finding(index, room, len(room))
        lines.append(room.value.decode())
    return lines


def findings_in(directory: Path) -> list[str]:
    """Give what the processes started with ``environment(report=directory)`` did wrong."""
    return [line for path in sorted(directory.glob("findings.*.txt")) for line in path.read_text().splitlines()]


def clear() -> None:
    """Forget all findings, and the fault that a kernel left behind."""
    started().cusim_forget_findings()
    started().cusim_forget_fault()


def reseed(seed: int) -> None:
    """Delay what streams and the host do from now on as another seed says; 0: not at all."""
    started().cusim_reseed(ctypes.c_uint64(seed))


def host_reads(array: Any, name: str = "the host") -> None:
    """Tell the race check that host code reads an array in pinned memory now; it cannot see that by itself."""
    _host_access(array, name, write=False)


def host_writes(array: Any, name: str = "the host") -> None:
    """Tell the race check that host code writes an array in pinned memory now."""
    _host_access(array, name, write=True)


def _host_access(array: Any, name: str, *, write: bool) -> None:
    pointer, nbytes = array.ctypes.data, array.nbytes
    started().cusim_host_access(name.encode(), ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes), int(write))
