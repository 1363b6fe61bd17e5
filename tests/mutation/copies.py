"""A copy of the package that may be changed, and Python that imports the copy, never the package itself."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from zerort.testing.jobs import signal_all

__all__ = ["ROOT", "check_copy", "copy_package", "python"]

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 120.0
"""Seconds that a run gets if nothing else is said."""

# Where the package is installed in place, a finder points to it before any path is looked at.
HOOK = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
"""


def copy_package(directory):
    """Copy zerort to where Python finds it first, with the native kernels, wherever those are."""
    shutil.copytree(ROOT / "zerort", directory / "zerort", ignore=shutil.ignore_patterns("__pycache__", "src"))
    kernels = find_spec("zerort.native._kernels")
    if kernels is not None and kernels.origin is not None:
        shutil.copy(kernels.origin, directory / "zerort" / "native")
    (directory / "sitecustomize.py").write_text(HOOK)


def check_copy(directory):
    """End the program if another zerort than the copy would be imported."""
    used = python(directory, "-c", "import zerort; print(zerort.__file__)").stdout.strip()
    if not used.startswith(str(directory)):
        sys.exit(f"Expected the copy of zerort in {directory} to be imported, got {used}.")


def python(directory, *words, longest=LONGEST, **settings):
    """Run Python on the copy; what it started ends with it.

    Raises:
        subprocess.TimeoutExpired: It took longer than ``longest`` seconds.
    """
    path = os.pathsep.join([str(directory), str(ROOT / "bindings")])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **settings}
    command = [sys.executable, *map(str, words)]
    # A file, not a pipe: a process that is left over would hold a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        running = subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = running.wait(longest)
        finally:
            signal_all(f"PYTHONPATH={directory}", signal.SIGKILL)
            running.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read())
