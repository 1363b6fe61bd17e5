"""Where CuPy is not installed, nothing misses it; whoever asks for a GPU is told what to install."""

import subprocess
import sys

import pytest

PRELUDE = "import sys\nsys.modules['cupy'] = None  # as if it were not installed\n"


def run(program):
    return subprocess.run([sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, check=False)


def test_importing_zerort_imports_no_cupy():
    program = (
        "import sys, zerort, zerort.comm, zerort.optim, zerort.cli.main\nprint([m for m in sys.modules if 'cupy' in m])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_other_module_can_be_imported():
    program = (
        "import importlib, pkgutil, zerort\n"
        "for one in pkgutil.walk_packages(zerort.__path__, 'zerort.'):\n"
        "    of_gpus = one.name.endswith('_cuda') or {'cuda', 'nccl', '__main__'} & set(one.name.split('.'))\n"
        "    if not of_gpus:\n"
        "        importlib.import_module(one.name)\n"
        "print('all of them')"
    )
    done = run(program)
    assert done.stdout.strip() == "all of them", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "from zerort.comm import open_group\nopen_group(kind='nccl')",
        "from zerort.device.cuda.device import CudaDevice",
        "from zerort.optim import kernels_cuda",
    ],
    ids=["group", "device", "kernels"],
)
def test_asking_for_a_gpu_names_the_cure(program):
    done = run(program)
    assert done.returncode == 1
    assert "zerort.errors.DeviceError: Expected CuPy, which drives the GPUs" in done.stderr
    assert "pip install 'cupy-cuda12x[ctk]' nvidia-nccl-cu12" in done.stderr
