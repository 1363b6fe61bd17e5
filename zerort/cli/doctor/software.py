"""What the doctor finds about Python, NumPy, our kernels and the environment."""

from __future__ import annotations

import difflib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import numpy as np

from zerort import native
from zerort.cli.doctor.finding import Finding, bad, ok, warn
from zerort.cli.machine import core_count
from zerort.config import GroupOptions
from zerort.config.environment import KNOWN_VARIABLES, given_variables
from zerort.errors import CallError

__all__ = ["check_software", "group_options"]


def group_options() -> GroupOptions:
    """Return the options that the environment asks for; the defaults if it asks for nonsense."""
    try:
        return GroupOptions.from_environment()
    except CallError:
        return GroupOptions()


def check_software() -> Iterator[Finding]:
    """Yield what is found about everything that was installed beside MPI."""
    yield ok("python", f"{platform.python_version()}, {sys.executable}")  # an older one cannot import this file
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {core_count()} cores"
    if sys.platform == "linux":
        yield ok("platform", system)
    else:
        yield bad("platform", system, cure="Run on Linux: shared windows need /dev/shm and futexes.")
    yield ok("numpy", np.__version__)
    yield _check_torch()
    what, cure = native.explain()
    yield ok("kernels", what) if native.AVAILABLE else warn("kernels", what, cure=cure)
    yield from _check_environment()


def _check_torch() -> Finding:
    """Look for torch without importing it, which takes a second."""
    try:
        return ok("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return ok("torch", "not installed: zerort_torch needs it (pip install torch), NumPy loops do not")


def _check_environment() -> Iterator[Finding]:
    given = given_variables()
    known = {name: text for name, text in given.items() if name in KNOWN_VARIABLES}
    try:
        GroupOptions.from_environment()
    except CallError as error:
        told, _, cure = str(error).partition(". ")
        yield bad("environment", f"{told}.", cure=cure)
    else:
        if known or not given:
            told = ", ".join(f"{name}={text}" for name, text in known.items())
            yield ok("environment", told or "no ZERORT_ variable set")
    for name in given.keys() - known.keys():
        close = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)
        meant = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(KNOWN_VARIABLES)}."
        yield warn("environment", f"{name} is set, and nothing reads it", cure=f"{meant} Rename or unset it.")
