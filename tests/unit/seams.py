"""Put something in the place of a part: of a call of the system, or of a name where it is used; never by a path."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["free", "inside"]


def free(nbytes: int | Callable[[str], int] | None) -> Any:
    """Let file systems have so many bytes free: a number, one for each path, or None where they do not tell."""

    def statvfs(path: str) -> SimpleNamespace:
        found = nbytes(path) if callable(nbytes) else nbytes
        return SimpleNamespace(f_blocks=int(found is not None), f_bfree=found, f_bavail=found, f_frsize=1)

    return mock.patch.object(os, "statvfs", statvfs)


def inside(user: Any, **parts: Any) -> Any:
    """Give the module in which a function or class is defined, wherever that is, other parts to use."""
    return mock.patch.multiple(inspect.getmodule(user), **parts)
