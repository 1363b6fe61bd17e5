"""Starting: what is missing is said, with what to do about it; the wheel stays as it is."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import cupy_backends
import pytest

import cusim
from cusim.build import HERE, build, versions

RUNTIME = next(Path(cupy_backends.__file__).parent.glob("cuda/api/runtime.*.so"))


def python(code, timeout=None, **environment):
    """Run code in a Python that has not started the emulator."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), **environment}
    words = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout)


def test_starting_twice_is_starting_once():
    cusim.start()
    assert cusim.started() is cusim.started()


def test_whoever_finds_it_built_waits_for_nobody():
    """In one checkout it may be in the making for another CuPy, which takes a minute."""
    with (build().parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = python("import cusim.build; print('built', cusim.build.build())", timeout=50)
    assert done.stdout.startswith("built"), done.stderr


def test_cupy_must_not_be_imported_before():
    done = python("import cupy_backends, cusim; cusim.start()")
    assert "Expected cupy not to be imported yet, got it. Call cusim.start() first." in done.stderr


def test_cupy_must_be_installed():
    done = python(
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\nimport cusim; cusim.start()"
    )
    assert "Expected CuPy, got none. Install it: `make .venv/.cuda`" in done.stderr


def test_a_compiler_must_be_installed():
    done = python("import cusim; cusim.start()", CUSIM_CXX="no-such-compiler")
    assert "Expected a C++ compiler, got no 'no-such-compiler'. Install g++" in done.stderr


def test_questions_before_the_start_say_so():
    done = python("import cusim; cusim.findings()")
    assert "Call cusim.start() before importing cupy." in done.stderr


def test_the_hook_runs_the_next_hook_too(tmp_path):
    """Python takes the first sitecustomize alone; a tool's own must not be lost."""
    (tmp_path / "sitecustomize.py").write_text("print('the next one')")
    path = os.pathsep.join([cusim.environment()["PYTHONPATH"], str(tmp_path)])
    assert python("print('the program')", PYTHONPATH=path, CUSIM="0").stdout == "the next one\nthe program\n"


@pytest.fixture
def other_wheel(tmp_path):
    """CuPy's packages with another runtime module: links to the installed ones, but for that file."""

    def make(change):
        site = Path(cupy_backends.__file__).parents[1]
        for package in ("cupy", "cupyx", "cuda"):
            if (site / package).exists():
                (tmp_path / package).symlink_to(site / package)
        copy_with_links(site / "cupy_backends", tmp_path / "cupy_backends", RUNTIME)
        change(tmp_path / RUNTIME.relative_to(site))
        return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport cusim; cusim.start()\nimport cupy"

    return make


def copy_with_links(source, target, copied):
    target.mkdir()
    for path in source.iterdir():
        if copied.is_relative_to(path) and path.is_dir():
            copy_with_links(path, target / path.name, copied)
        elif path == copied:
            (target / path.name).write_bytes(path.read_bytes())
        else:
            (target / path.name).symlink_to(path)


def test_a_stripped_wheel_is_refused(other_wheel):
    done = python(other_wheel(lambda path: subprocess.run(["strip", str(path)], check=True)))
    assert "of a CuPy wheel from PyPI" in done.stderr
    assert "the module is stripped" in done.stderr
    assert "pip install --force-reinstall cupy-cuda12x" in done.stderr


def test_an_unknown_wheel_is_refused(other_wheel):
    def rename(path):  # a runtime whose calls have other names: nothing to relink
        path.write_bytes(re.sub(rb"cuda([A-Z])", rb"kuda\1", path.read_bytes()))

    done = python(other_wheel(rename))
    assert "the module has no call into a bundled CUDA runtime" in done.stderr


def test_another_machine_is_refused():
    linux32 = 8  # a personality of Linux's under which an x86-64 says that it is another machine
    done = python(f"import ctypes; ctypes.CDLL(None).personality({linux32})\nimport cusim; cusim.start()")
    assert "CusimError: Expected an x86-64 machine" in done.stderr
    assert "got i686" in done.stderr


def test_versions_are_those_of_the_compiler_and_of_the_headers_wheel(tmp_path):
    """The same paths may hold other releases tomorrow, and what they built is of no use then."""
    headers = tmp_path / "nvidia" / "cuda_runtime" / "include"
    headers.mkdir(parents=True)
    (tmp_path / "nvidia_cuda_runtime_cu12-12.9.79.dist-info").mkdir()
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho release 7\n")
    compiler.chmod(0o755)
    assert versions(str(compiler), headers) == ["release 7\n", "nvidia_cuda_runtime_cu12-12.9.79.dist-info"]


def test_the_wheel_stays_as_it_is():
    code = f"import hashlib; print(hashlib.sha256(open({str(RUNTIME)!r}, 'rb').read()).hexdigest())"
    before = hashlib.sha256(RUNTIME.read_bytes()).hexdigest()
    done = python("import cusim; cusim.start(); import cupy; cupy.ones(3).sum()\n" + code)
    assert done.stdout.strip() == before, done.stderr


def test_without_the_emulator_cupy_finds_no_device():
    done = python("import cupy; print(cupy.cuda.is_available())")
    assert done.stdout.strip() == "False" or "cudaErrorInsufficientDriver" in done.stderr  # CuPy 14's no, and 13's
