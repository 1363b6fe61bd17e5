"""Describe the GPUs of this machine as plain values, for ``zerort doctor``, which asks in another process."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from zerort.device.cuda.library import cupy, load_nccl, version_text
from zerort.device.cuda.pinned import PinnedMemory
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
    wheels = _installed_nccl()
    facts["nccl_others"] = sorted(set(wheels.values()) - set(loaded))
    facts["nccl_wheels"] = [list(wheels), len(set(wheels.values()))]
    facts["torch_cuda"] = _torch_cuda()
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


def _installed_nccl() -> dict[str, str]:
    """Return the libraries that pip brought, for torch as a rule, by wheel and version."""
    found = {}
    for wheel in _NCCL_WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnccl.so"):
                found[f"{wheel} {metadata.version(wheel)}"] = os.path.realpath(str(file.locate()))
    return found


def _torch_cuda() -> str:
    """Return the CUDA that torch is built for, without importing it; empty if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version = Path(spec.origin).with_name("version.py")
    told = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", version.read_text() if version.exists() else "", re.MULTILINE)
    return told[1] if told else ""


def _try_to_pin() -> str:
    memory = np.frombuffer(mmap.mmap(-1, _TO_PIN), np.uint8)
    try:
        PinnedMemory(memory).close()
    except DeviceError as error:
        return str(error)
    return ""
