"""Coverage and doctests go by the names of files: they know all that drives a GPU, wherever it has moved."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NEED_CUPY = """
import importlib, pkgutil, sys
sys.modules["cupy"] = None
import zerort
from zerort.errors import DeviceError
for found in pkgutil.walk_packages(zerort.__path__, "zerort."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except DeviceError:
            print(found.name)
"""


def test_coverage_measures_all_that_needs_cupy_and_doctests_leave_it_out():
    done = subprocess.run([sys.executable, "-c", NEED_CUPY], capture_output=True, text=True, timeout=120, check=True)
    need = {ROOT / f"{name.replace('.', '/')}.py" for name in done.stdout.split()}
    assert len(need) > 5
    (include,) = re.findall(r"^include = \[([^]]*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    measured = {
        path for glob in re.findall(r'"\*/([^"]+)"', include) for path in ROOT.glob(glob) if path.suffix == ".py"
    }
    assert need <= measured
    globs = re.findall(r"--ignore-glob='(\*/zerort/[^']+)'", (ROOT / "Makefile").read_text())
    left_out = {path for path in ROOT.glob("zerort/**/*.py") if any(fnmatch(str(path), glob) for glob in globs)}
    assert need <= left_out
    assert not [path for path in left_out - need if ">>> " in path.read_text()], "examples that nobody runs"
