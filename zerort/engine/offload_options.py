"""`OffloadOptions`: how values stream between memories and a disk. Frozen, proven when made, set by the environment.

zr.open(plan=…, scratch="/mnt/nvme", offload=zr.OffloadOptions(depth=4, checksum=False))
ZERORT_SCRATCH=/mnt/nvme0:/mnt/nvme1  ZERORT_OFFLOAD_DEPTH=4
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from zerort.config import Variable, parse_bytes, parse_switch
from zerort.errors import CallError

__all__ = ["LEAST_CHUNK", "OFFLOAD_ENVIRONMENT", "SCRATCH", "OffloadOptions", "Scratch", "scratch_directories"]

Scratch = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

SCRATCH: Final = "ZERORT_SCRATCH"
"""The variable that names the directories for offloaded values, several of them separated by colons."""

LEAST_CHUNK: Final = 8192

_PLACES: Final = ("auto", "host", "device")


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

    update_on: Literal["auto", "host", "device"] = "auto"
    """Where an update is computed of which some rests on the host, or on a disk, and some on a GPU: ``"auto"`` measures
    once what is faster. A runtime without GPUs has no choice. The results are the same to the bit."""

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
        values: dict[str, Any] = {}
        for name, variable in OFFLOAD_ENVIRONMENT.items():
            text = os.environ.get(name, "").strip()
            if not text:
                continue
            try:
                values[variable.field] = variable.parse(text)
                cls(**{variable.field: values[variable.field]})
            except ValueError as error:
                raise CallError(
                    f"Expected {name} to be {variable.expects}, got {text!r}. Correct or unset it. ({error})"
                ) from None
        return cls(**values)


def scratch_directories(given: Scratch | None) -> tuple[str, ...]:
    """Return where offloaded values go: as given, as `SCRATCH` says, or the system's directory for temporary files."""
    if given is None:
        given = [one for one in os.environ.get(SCRATCH, "").split(":") if one] or tempfile.gettempdir()
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


OFFLOAD_ENVIRONMENT: Final[Mapping[str, Variable]] = MappingProxyType(
    {
        "ZERORT_OFFLOAD_CHUNK_BYTES": Variable(
            "chunk_nbytes", parse_bytes, "a size such as '8MiB'", "of each value, what streams through memory at once"
        ),
        "ZERORT_OFFLOAD_DEPTH": Variable("depth", int, "a count above 0", "chunks in memory at once"),
        "ZERORT_OFFLOAD_CHECKSUM": Variable("checksum", parse_switch, "1 or 0", "check what comes back from the disk"),
        "ZERORT_OFFLOAD_DIRECT": Variable("direct", parse_switch, "1 or 0", "go past the page cache"),
        "ZERORT_OFFLOAD_THREADS": Variable("threads", int, "a count above 0", "threads that read, and that write"),
        "ZERORT_OFFLOAD_RETRIES": Variable("retries", int, "a count", "how often EIO is tried again"),
        "ZERORT_OFFLOAD_UPDATE_ON": Variable("update_on", str, "auto, host or device", "where updates are computed"),
    }
)
"""Every environment variable that sets a field of `OffloadOptions`."""
