"""Run the numerical tests under other kernels than those that libraries choose for this CPU: ``python tests/cpus.py``.

    python tests/cpus.py               every row of KERNELS, at 2 and 3 ranks
    python tests/cpus.py zen numpy     these
    python tests/cpus.py oldest        all libraries at once as on the oldest CPU, some tests at 3 ranks: under a minute

A row that means nothing here (no x86-64, no such instructions) is left out and named. All rows run; the closing lines
say what failed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

try:
    from numpy._core._multiarray_umath import __cpu_dispatch__ as numpy_dispatch
except ImportError:  # NumPy 1
    from numpy.core._multiarray_umath import __cpu_dispatch__ as numpy_dispatch

ROOT = Path(__file__).resolve().parents[1]
ON_RANKS = ("-m", "zerort.testing", "2", "3", "--", "-p", "no:hypothesispytest")
UNIT = (
    *("-m", "pytest", "-q", "tests/unit/workload/test_byte_model.py"),
    *(f"tests/unit/native/test_{one}.py" for one in ("cast", "measure", "optim", "reduce")),
    *(f"tests/unit/optim/test_{one}.py" for one in ("adafactor", "around", "custom", "elementwise")),
    *(f"tests/unit/engine/test_{one}.py" for one in ("float64", "runtime", "checkpoint")),
)
RANKS = (*ON_RANKS, "tests/ranks/test_walk.py", "tests/ranks/test_deterministic.py")
TORCH = (*ON_RANKS, "tests/torch/test_losses.py", "tests/torch/test_weights.py", "tests/torch/test_ways_to_train.py")
SOME = ("-m", "pytest", "-q", "tests/unit/native/test_optim.py", "tests/unit/engine/test_float64.py")
SOME_ON_RANKS = (
    *("-m", "zerort.testing", "3", "--", "-p", "no:hypothesispytest", "tests/torch/test_losses.py"),
    *("-k", "(first_step_in_float32 or (twenty_steps and cnn)) and node and 3]"),
)
NUMPY_PLAIN = {"NPY_DISABLE_CPU_FEATURES": " ".join(numpy_dispatch)}
"""NumPy's baseline: its features have other names from release to release, so it is asked for them."""


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels, and the tests that they have a part in."""

    environment: dict[str, str]
    suites: tuple[tuple[str, ...], ...]
    """What Python is started with."""
    needs: str = ""
    """A flag of the CPU."""


KERNELS = {
    "aten": Row({"ATEN_CPU_CAPABILITY": "default"}, (TORCH,)),
    "sse41": Row({"ONEDNN_MAX_CPU_ISA": "SSE41"}, (TORCH,), "sse4_1"),
    "avx2": Row({"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, (TORCH,), "avx2"),
    "haswell": Row({"OPENBLAS_CORETYPE": "Haswell"}, (UNIT, RANKS), "avx2"),
    "zen": Row({"OPENBLAS_CORETYPE": "Zen"}, (UNIT, RANKS), "avx2"),
    "numpy": Row(NUMPY_PLAIN, (UNIT, RANKS)),
    "oldest": Row(
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OPENBLAS_CORETYPE": "Nehalem",
            **NUMPY_PLAIN,
        },
        (SOME, SOME_ON_RANKS),
        "sse4_1",
    ),
}


def main() -> int:
    names = sys.argv[1:] or [name for name in KERNELS if name != "oldest"]
    unknown = set(names) - KERNELS.keys()
    if unknown:
        print(f"Expected rows out of {', '.join(KERNELS)}; got {', '.join(sorted(unknown))}.")
        return 2
    flags = cpu_flags()
    ran, failed = [], []
    for name in names:
        row = KERNELS[name]
        if platform.machine() != "x86_64" or (row.needs and row.needs not in flags):
            print(f"== {name}: LEFT OUT, this {platform.machine()} CPU has no such kernels", flush=True)
            continue
        ran.append(name)
        print(f"== {name}: {' '.join(f'{key}={value!r}' for key, value in row.environment.items())}", flush=True)
        for words in row.suites:
            done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | row.environment, check=False)
            if done.returncode:
                failed.append(f"{name}: python {' '.join(words)}")
    passed = f"== passed: {' '.join(ran)}" if ran else "== nothing ran"
    print("\n".join([f"*** FAILED under {one}" for one in failed] or [passed]), flush=True)
    return 1 if failed else 0


def cpu_flags() -> set[str]:
    """Return what the CPU can do, in Linux's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


if __name__ == "__main__":
    sys.exit(main())
