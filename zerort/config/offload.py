"""`OffloadOptions`: how values stream between memories and a disk. Frozen, proven when made, set by the environment.

zr.open(plan=…, scratch="/mnt/nvme", offload=zr.OffloadOptions(depth=4, checksum=False))
ZERORT_SCRATCH=/mnt/nvme0:/mnt/nvme1  ZERORT_OFFLOAD_DEPTH=4
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from zerort.config.environment import OFFLOAD_ENVIRONMENT, SCRATCH, options_from, read_variable
from zerort.errors import CallError

__all__ = ["LEAST_CHUNK", "OffloadOptions", "Scratch", "scratch_directories"]

Scratch = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

LEAST_CHUNK: Final = 8192

_PLACES: Final = ("host", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """How values stream between memory and a disk. All ranks need the same values.

    >>> OffloadOptions(depth=4, checksum=False).chunk_nbytes
    8388608
    """

    chunk_nbytes: int = 8 * 1024**2
    """Bytes of a float32 value in a chunk, which has as many elements of every other value, too."""

    depth: int = 3
    """Chunks in memory at once. 1 does one thing after the other, for debugging."""

    checksum: bool = True
    """Keep a crc32c of every 256 KiB in memory and compare it when the bytes come back."""

    direct: bool = True
    """Go past the page cache where the file system allows it."""

    threads: int = 4
    """Threads of a rank that read, and as many that write."""

    retries: int = 2
    """How often a read or write that failed with EIO is tried again."""

    update_on: Literal["host", "device"] = "device"
    """Where an update is computed of which some rests on the host, or on a disk, and some on a GPU. ``"host"`` may be
    faster where several GPUs share a slow bus: `zerort bench copies` tells. A runtime without GPUs has no choice. The
    results are the same to the bit."""

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk, at most."""
        return self.chunk_nbytes // 4

    def __post_init__(self) -> None:
        _expect_int("chunk_nbytes", self.chunk_nbytes, minimum=LEAST_CHUNK)
        _expect_int("depth", self.depth, minimum=1)
        _expect_int("threads", self.threads, minimum=1)
        _expect_int("retries", self.retries, minimum=0)
        if self.update_on not in _PLACES:
            raise CallError(f"Expected update_on to be one of {', '.join(_PLACES)}, got {self.update_on!r}.")
        for name in ("checksum", "direct"):
            if type(getattr(self, name)) is not bool:
                raise CallError(f"Expected {name} to be True or False, got {getattr(self, name)!r}.")

    @classmethod
    def from_environment(cls) -> OffloadOptions:
        """Read the variables of `OFFLOAD_ENVIRONMENT`; one that is empty counts as not set.

        Raises:
            CallError: A variable does not read as what its field takes; the message names it.
        """
        return options_from(OFFLOAD_ENVIRONMENT, cls)


def scratch_directories(given: Scratch | None) -> tuple[str, ...]:
    """Return where offloaded values go: as given, as `SCRATCH` says, or the system's directory for temporary files."""
    if given is None:
        given = [one for one in read_variable(SCRATCH).split(":") if one] or tempfile.gettempdir()
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not listed or not all(isinstance(one, (str, os.PathLike)) and os.fspath(one) for one in listed):
        raise CallError(f"Expected scratch to be a directory or several, got {given!r}.")
    found = tuple(os.path.abspath(os.fspath(one)) for one in listed)
    if len(set(found)) < len(found):
        raise CallError(f"Expected different directories in scratch, got {', '.join(found)}. One per disk.")
    return found


def _expect_int(what: str, value: object, *, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise CallError(f"Expected {what} to be an int of at least {minimum}, got {value!r}.")
