"""Build: compiles ``src/*.cpp`` with g++ into a cache, one directory per state of sources and tools.

build/cusim/objects/<hash>.o        one per source, so that a change compiles what it touched
build/cusim/<hash>/libcusim.so      the emulator
build/cusim/<hash>/libcuda.so.1     and its other names: empty, and needing libcusim.so
build/cusim/<hash>/kernels/         CuPy's cache of compiled kernels (CUPY_CACHE_DIR)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cusim.errors import CusimError

HERE = Path(__file__).resolve().parent
DEVICE_HEADERS = HERE / "device"
FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-ftls-model=initial-exec", "-Wall", "-Wextra")
LIBRARY = "libcusim.so"
# The names under which CuPy asks for it, for the cuda12x and cuda13x wheels.
NAMES = (
    "libcuda.so.1",
    "libnccl.so.2",
    "libcurand.so.10",
    *(f"lib{name}.so.{release}" for name in ("nvrtc", "cublas", "cublasLt") for release in (12, 13)),
)


def build() -> Path:
    """Give the directory of the built emulator, building it when the sources have changed."""
    compiler = os.environ.get("CUSIM_CXX") or "g++"
    found = shutil.which(compiler)
    if found is None:
        raise CusimError(
            f"Expected a C++ compiler, got no {compiler!r}. Install g++, or name another one: CUSIM_CXX=..."
        )
    cuda = _cuda_headers()
    command = [found, *FLAGS, f"-I{HERE / 'shim'}", "-isystem", str(cuda)]
    headers = _hash(
        [*sorted((HERE / "src").glob("*.h")), *sorted(HERE.glob("shim/**/*.h")), DEVICE_HEADERS / "abi.h"],
        [*command, *versions(found, cuda)],
    )
    sources = sorted((HERE / "src").glob("*.cpp"))
    device = sorted(path for path in DEVICE_HEADERS.rglob("*.h"))
    whole = _cache() / _hash([*sources, *device], [headers, *NAMES])
    if not (whole / "done").exists():  # whoever finds it does not wait for another CuPy's
        with _lock(_cache() / "lock"):
            if not (whole / "done").exists():
                _compile(command, sources, headers, whole)
    return whole


def _compile(command: Sequence[str], sources: Sequence[Path], headers: str, into: Path) -> None:
    objects = _cache() / "objects"
    objects.mkdir(exist_ok=True)
    into.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        result = objects / f"{_hash([source], [headers])}.o"
        if not result.exists():
            fresh = result.with_suffix(".part")
            _run([*command, "-c", str(source), "-o", str(fresh)])
            fresh.rename(result)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, sources))
    _run(
        [
            command[0],
            "-shared",
            f"-Wl,-soname,{LIBRARY}",
            "-o",
            str(into / LIBRARY),
            *map(str, made),
            "-ldl",
            "-lrt",
            "-lpthread",
        ]
    )
    for name in NAMES:
        needs = ["-Wl,--no-as-needed", str(into / LIBRARY), "-Wl,-rpath,$ORIGIN"]
        _run([command[0], "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(into / name), *needs])
    (into / "done").touch()


def _cuda_headers() -> Path:
    site = Path(sysconfig.get_path("purelib"))
    for place in ("nvidia/cuda_runtime/include", "nvidia/cu13/include"):
        if (site / place / "cuda_runtime_api.h").exists():
            return site / place
    raise CusimError(
        f"Expected CUDA's headers (cuda_runtime_api.h) under {site / 'nvidia'}, got none. "
        "Install them: `make .venv/.cuda`, or `pip install nvidia-cuda-runtime-cu12`."
    )


def versions(compiler: str, cuda_headers: Path) -> list[str]:
    """Give the versions of the compiler and of the wheels of CUDA's headers, which their paths do not tell."""
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return [told, *sorted(path.name for path in cuda_headers.parents[2].glob("nvidia_cuda_runtime*.dist-info"))]


def _cache() -> Path:
    path = Path(os.environ.get("CUSIM_CACHE") or HERE.parent / "build")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CusimError(f"Expected the emulator to compile, got:\n{' '.join(command)}\n{done.stderr}")


def _hash(files: Sequence[Path], words: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode() + b"\0")
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
