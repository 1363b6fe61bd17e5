"""Run CuPy's own tests on the emulated device: ``python tests/cusim/cusim/cupy_tests.py``, a few minutes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / "build" / "cupy-tests"

# Test file -> what of it is left out (expressions of pytest's -k), and why.
FILES: dict[str, dict[str, str]] = {
    "cuda_tests/test_stream.py": {},
    "cuda_tests/test_memory.py": {
        "MemoryAsyncPool and (total_bytes or free_bytes or large_chunk)": "what a pool keeps back",
    },
    "cuda_tests/test_pinned_memory.py": {},
    "cuda_tests/test_nccl.py": {},
    "cuda_tests/test_runtime.py": {"mallocFromPoolAsync": "pools beside the default one"},
    "cuda_tests/test_device.py": {"cusolver_handle or cusparse_handle": "cuSOLVER, cuSPARSE"},
    "core_tests/test_dlpack.py": {},
    "core_tests/test_userkernel.py": {"Texture": "textures"},
    "core_tests/test_raw.py": {
        "NVCC or TestRawPicklable": "nvcc",
        "(jitify and not no-jitify) or TestRawJitify": "Jitify",
        "in-memory": "CuPy's other cache",
        "load_cubin or context_switch_RawModule": "images made by nvcc",
        "dynamical_parallelism": "kernels that launch kernels",
        "compile_kernel or compile_module": "the words of NVIDIA's warnings",
        "Texture": "textures",
        "grid_sync": "cooperative launches",
    },
}


def main() -> int:
    """Run every file; return 0 if all of them passed."""
    tests = _source() / "tests"
    environment = {
        **os.environ,
        "CUSIM": "1",
        "PYTHONPATH": str(HERE / "hook"),
        "CUSIM_DEVICES": "4",
        "CUSIM_FREES": "0",  # these tests look at the allocator
    }
    worst = 0
    for name, left_out in FILES.items():
        chosen = " and ".join(f"not ({words})" for words in left_out) or "test"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-k", chosen]
        command.append(f"cupy_tests/{name}")
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines() or done.stderr.splitlines()
        for line in lines:
            if line.startswith(("FAILED", "ERROR")):
                print(line)
        reasons = ", ".join(dict.fromkeys(left_out.values()))
        print(f"{name}: {lines[-1]}{f' (left out: {reasons})' if reasons else ''}", flush=True)
        worst = max(worst, done.returncode)
    return worst


def _source() -> Path:
    """Give the unpacked source package of the CuPy that is installed."""
    wheel = next(one for one in importlib.metadata.distributions() if one.name.startswith("cupy-cuda"))
    package = f"cupy-{wheel.version}"
    if not (WORK / package).exists():
        # pip asks the package for its requirements before it saves it, and that asks for a CUDA toolkit: but not there.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=cupy"]
        command += ["--dest", str(WORK), f"cupy=={wheel.version}"]
        subprocess.run(command, env={**os.environ, "READTHEDOCS": "True"}, check=True)
        with tarfile.open(WORK / f"{package}.tar.gz") as archive:
            archive.extractall(WORK, filter="data")
    return WORK / package


if __name__ == "__main__":
    sys.exit(main())
