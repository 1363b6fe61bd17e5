"""What buckets compute with, given from above: the host's kernels, or a GPU's."""

from __future__ import annotations

from typing import Any, Final, Protocol, SupportsInt

from zerort import native

__all__ = ["HOST_KERNELS", "BucketKernels"]


class BucketKernels(Protocol):
    """Kernels over the flat arrays of one device. They have happened for whatever the caller does next there."""

    def add_into(self, out: Any, source: Any) -> None:
        """Add ``source`` to ``out``; narrower floats are widened."""

    def cast_into(self, out: Any, source: Any) -> None:
        """Convert ``source`` to ``out``'s dtype."""

    def copy_checked(self, out: Any, source: Any) -> int | None:
        """Copy or cast, and return the first element of ``out`` that is not finite, -1 if all are; None: not looked."""

    def check(self, array: Any) -> int | None:
        """Return the first element that is not finite, -1 if all are; None: not looked."""

    def look_for_nonfinite(self, array: Any) -> SupportsInt:
        """Return the first element that is not finite, or -1; or the promise of it: ``int`` waits."""


class _HostKernels:
    add_into = staticmethod(native.add_into)
    cast_into = staticmethod(native.cast_into)
    copy_checked = staticmethod(native.copy_checked)
    check = staticmethod(native.first_nonfinite)
    look_for_nonfinite = staticmethod(native.first_nonfinite)


HOST_KERNELS: Final[BucketKernels] = _HostKernels()
"""Those of `zerort.native`."""
