"""The compiled module, if there is one and it is wanted, and the one warning if there is not.

``ZERORT_NATIVE=0`` asks for the NumPy forms: then nothing is loaded and nothing is said. A compiled module that is
missing or does not load is said once, when a kernel is first used: importing zerort stays silent. It may be missing
because Python found a checkout, in whose directory it was started, before what is installed: that is told from a
missing compiler. Imports `dtypes` only.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from typing import TYPE_CHECKING

from zerort.native.dtypes import native_dtypes

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["AVAILABLE", "describe", "explain", "kernels", "use_numpy_form"]

FORCED_OFF = os.environ.get("ZERORT_NATIVE", "1") == "0"
"""True if the environment asks for the NumPy forms."""

CURE = (
    "Install a C++ compiler (g++ or clang++) and install zerort again (`pip install --force-reinstall --no-deps .`, or "
    "`pip install -e .`, in its checkout); or set ZERORT_NATIVE=0 to ask for the NumPy forms."
)

_why_missing: str | None = None


def _load() -> ModuleType | None:
    global _why_missing
    if FORCED_OFF:
        return None
    try:
        module = importlib.import_module("zerort.native._kernels")
    except ImportError as error:
        _why_missing = str(error)
        return None
    module.register_dtypes(native_dtypes())
    return module


kernels = _load()
"""The compiled module, or None."""

AVAILABLE: bool = kernels is not None
"""True if the kernels run as compiled code."""

_warned = False


def use_numpy_form() -> None:
    """Take note that a NumPy form is about to serve; the first time, warn if that is nobody's wish.

    Call it from a kernel of the facade, directly: the warning names that kernel's caller.
    """
    global _warned
    # A kernel comes here with compiled code at hand only if that refused arrays which the checks then let pass.
    assert kernels is None, "zerort: the compiled kernel and zerort.native.checks disagree; please report this call"
    if FORCED_OFF or _warned:
        return
    _warned = True
    warnings.warn(
        f"zerort's native kernels are missing ({_why_missing}): the NumPy forms serve, several times slower. {_cure()}",
        RuntimeWarning,
        stacklevel=3,
    )


def describe() -> str:
    """Say in one line which form of the kernels serves, and why."""
    what, cure = explain()
    return what if AVAILABLE or FORCED_OFF else f"{what}. {cure}"


def explain() -> tuple[str, str]:
    """Return which form of the kernels serves, and why; and how to get the compiled one, empty if it is that."""
    if AVAILABLE:
        return "native", ""
    if FORCED_OFF:
        return "NumPy, as asked for with ZERORT_NATIVE=0", "Unset ZERORT_NATIVE; the NumPy forms are slower."
    return f"NumPy, because the native kernels are missing ({_why_missing})", _cure()


def _cure() -> str:
    here, installed = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), _installed_elsewhere()
    if not installed:
        return CURE
    return (
        f"They are installed, in {installed}, but Python found the sources in {here} first: it looks into the current "
        "directory before all others. Run from another directory, or set PYTHONSAFEPATH=1 (Python 3.11); or "
        "`pip install -e .` in the checkout."
    )


def _installed_elsewhere() -> str:
    """Return where zerort is installed with its kernels, if what was imported is another; empty if it is not."""
    import importlib.metadata as metadata

    try:
        distribution = metadata.distribution("zerort")
    except metadata.PackageNotFoundError:
        return ""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):  # has no sources of its own
        return ""
    installed = str(distribution.locate_file("zerort"))
    is_this = os.path.realpath(installed) == os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    kernels = [name for name in _names_in(os.path.join(installed, "native")) if name.startswith("_kernels.")]
    return installed if not is_this and any(not name.endswith(".pyi") for name in kernels) else ""


def _names_in(directory: str) -> list[str]:
    return os.listdir(directory) if os.path.isdir(directory) else []
