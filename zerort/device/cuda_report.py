"""What a person wants to know of the GPUs here, as plain values: for ``zerort doctor``, which asks in another process.

May import: device.cuda_library, device.cuda_pinned.
"""

from __future__ import annotations

import mmap
import os
from importlib import metadata
from typing import Any

import numpy as np

from zerort.device.cuda_library import cupy, load_nccl, version_text
from zerort.device.cuda_pinned import PinnedMemory
from zerort.errors import DeviceError

__all__ = ["describe_gpus"]

_NCCL_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_TO_PIN = 64 * 1024**2


def describe_gpus() -> dict[str, Any]:
    """Return CuPy's, the driver's and NCCL's versions, the GPUs, who reaches whom, and whether memory can be pinned."""
    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    facts: dict[str, Any] = {
        "cupy": cupy.__version__,
        "driver": _version(runtime.driverGetVersion()),
        "runtime": _version(runtime.runtimeGetVersion()),
        "gpus": [_describe(number) for number in range(count)],
        "without_peer": [
            [one, other]
            for one in range(count)
            for other in range(count)
            if one != other and not runtime.deviceCanAccessPeer(one, other)
        ],
        "to_pin": _TO_PIN,
        "pin_error": _try_to_pin() if count else "",
    }
    try:
        facts["nccl"] = version_text(load_nccl().get_version())
        facts["nccl_error"] = ""
    except DeviceError as error:
        facts["nccl"], facts["nccl_error"] = None, str(error)
    loaded = _loaded("libnccl.so")
    facts["nccl_loaded"] = loaded
    facts["nccl_others"] = sorted(set(_installed_nccl()) - set(loaded))
    return facts


def _describe(number: int) -> dict[str, Any]:
    found = cupy.cuda.runtime.getDeviceProperties(number)
    return {
        "name": found["name"].decode(),
        "nbytes": int(found["totalGlobalMem"]),
        "sm": f"{found['major']}.{found['minor']}",
        "bus": cupy.cuda.runtime.deviceGetPCIBusId(number),
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _loaded(name: str) -> list[str]:
    """Return the files of a library that this process has mapped: what is really used, whatever was installed."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        words = [line.split() for line in maps]
    return sorted({os.path.realpath(row[5]) for row in words if len(row) > 5 and name in os.path.basename(row[5])})


def _installed_nccl() -> list[str]:
    """Return the libraries that pip brought, for torch as a rule."""
    found = []
    for wheel in _NCCL_WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        found += [os.path.realpath(str(file.locate())) for file in files if file.name.startswith("libnccl.so")]
    return found


def _try_to_pin() -> str:
    memory = np.frombuffer(mmap.mmap(-1, _TO_PIN), np.uint8)
    try:
        PinnedMemory(memory).close()
    except DeviceError as error:
        return str(error)
    return ""
