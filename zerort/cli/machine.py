"""Describe where a figure was taken, for the head of a table and for JSON."""

from __future__ import annotations

import datetime
import os
import platform
import socket
from types import ModuleType
from typing import Any

import numpy as np

import zerort
from zerort import native
from zerort.config import format_bytes
from zerort.device.host.memory import available_nbytes

__all__ = ["available_nbytes", "core_count", "describe_machine", "library_title", "machine_lines"]


def core_count() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict[str, Any]:
    """Return what a reader of a figure would ask for, by name."""
    return {
        "zerort": zerort.__version__,
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cores": core_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernels": native.describe(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """Return the same for people."""
    return [
        f"# zerort {machine['zerort']} on {machine['host']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])}, Linux {machine['kernel']}",
        f"# Python {machine['python']}, NumPy {machine['numpy']}, kernels {machine['kernels']}",
    ]


def library_title(mpi: ModuleType) -> str:
    """Return the name and version of the MPI library that mpi4py uses."""
    first = mpi.Get_library_version().strip(" \0\n").splitlines()[0]
    return " ".join(first.split(",")[0].replace("Version:", "").split())


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Processor", "cpu model")):
                return line.partition(":")[2].strip()
    return platform.machine()
