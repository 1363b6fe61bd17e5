"""Start: loads the emulator before CuPy is imported, and relinks CuPy's extension modules as they load."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from cusim.build import DEVICE_HEADERS, HERE, LIBRARY, NAMES, build
from cusim.errors import CusimError

PACKAGES = ("cupy", "cupy_backends", "cupyx")
# The module through which all of CuPy's runtime calls go: without it nothing is emulated.
RUNTIME = "cupy_backends.cuda.api.runtime"
ERRORS = {
    -1: "the loaded module cannot be found in this process",
    -2: "the module is stripped: without its symbol table its calls cannot be found",
    -3: "there is no free memory near the module",
    -4: "the module's file cannot be read",
}

_library: ctypes.CDLL | None = None


def start() -> None:
    """Make CuPy find emulated devices in this process.

    Raises:
        CusimError: CuPy is missing, unknown or already imported; there is no compiler; or this is no x86-64.
    """
    global _library
    if _library is not None:
        return
    if platform.machine() != "x86_64":
        raise CusimError(
            f"Expected an x86-64 machine, whose code the emulator relinks, got {platform.machine()}. Run it on one, or "
            "the tests of the GPU path on real GPUs: CUSIM=0."
        )
    if "cupy" in sys.modules or "cupy_backends" in sys.modules:
        raise CusimError("Expected cupy not to be imported yet, got it. Call cusim.start() first.")
    if importlib.util.find_spec("cupy") is None:
        raise CusimError("Expected CuPy, got none. Install it: `make .venv/.cuda`, or `pip install cupy-cuda12x`.")
    directory = build()
    os.environ["CUSIM_DEVICE_HEADERS"] = str(DEVICE_HEADERS)
    os.environ["CUPY_CACHE_DIR"] = str(directory / "kernels")  # never ~/.cupy: a real GPU's kernels live there
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB and cuTENSOR are compiled GPU code
    os.environ.setdefault("CUDA_PATH", str(HERE / "device"))
    # Loaded here, by path; a later dlopen() of the bare name finds what is loaded.
    library = ctypes.CDLL(str(directory / LIBRARY), mode=ctypes.RTLD_GLOBAL)
    for name in NAMES:
        ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _Finder(library))
    _library = library


def started() -> ctypes.CDLL:
    """Give the emulator's library, for what Python asks of it."""
    if _library is None:
        raise CusimError("Expected a started emulator, got none. Call cusim.start() before importing cupy.")
    return _library


def environment(**settings: object) -> dict[str, str]:
    """Give the environment of a child process that starts emulated; settings are README's, ``environment(seed=3)``."""
    path = [str(HERE / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
    named = {f"CUSIM_{name.upper()}": str(value) for name, value in settings.items()}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUSIM": "1", **named}


class _Finder(MetaPathFinder):
    """Finds CuPy's modules where they are, and gives its extension modules a loader that relinks them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, ExtensionFileLoader):
            spec.loader = _RelinkingLoader(self.library, fullname, spec.loader.path)
        if fullname == "cupy" and spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CupyLoader(fullname, spec.loader.path)
        return spec


class _RelinkingLoader(ExtensionFileLoader):
    def __init__(self, library: ctypes.CDLL, name: str, path: str) -> None:
        super().__init__(name, path)
        self.library = library

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = super().create_module(spec)
        calls = self.library.cusim_relink(os.fsencode(self.path))
        if calls < 0 or (calls == 0 and spec.name == RUNTIME):
            why = ERRORS.get(calls, "the module has no call into a bundled CUDA runtime")
            raise CusimError(
                f"Expected {spec.name} of a CuPy wheel from PyPI (tested: 13 and 14), got {self.path}: {why}. "
                "Install the wheel again: `pip install --force-reinstall cupy-cuda12x`."
            )
        return module


class _CupyLoader(SourceFileLoader):
    """Loads the package itself; what its memory pool frees is watched from then on."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if os.environ.get("CUSIM_FREES", "1") != "0":
            from cusim.frees import poison_freed_arrays

            poison_freed_arrays()
