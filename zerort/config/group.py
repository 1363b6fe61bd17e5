"""`GroupOptions`: how a group works. Frozen, proven when made, set by the environment (environment.py)."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zerort.config.environment import ENVIRONMENT, options_from
from zerort.errors import CallError

__all__ = ["STAGING_NBYTES", "GroupOptions"]

STAGING_NBYTES: Final = 4 * 1024**2
"""The default of `GroupOptions.staging_nbytes`."""

_LINE: Final = 64  # bytes: a cache line, and whole elements of every dtype


def _default_flight_dir() -> str:
    # One per user: on a shared machine /tmp/zerort-flight would belong to whoever crashed first.
    return os.path.join(tempfile.gettempdir(), f"zerort-flight-{os.getuid()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group communicates. The defaults suit most machines; all ranks of a group need the same values.

    >>> from zerort.config import parse_bytes
    >>> GroupOptions(timeout=60, staging_nbytes=parse_bytes("1MiB")).staging_nbytes
    1048576
    """

    timeout: float = 300.0
    """Seconds that a rank waits for the others before the group breaks."""

    eager_nbytes: int = 1024**2
    """Bytes. Collectives up to this size run on the caller's thread while the stream is idle; 0: only barriers do.

    Between hosts, and wherever ranks talk over MPI, at most 64 KiB: a network takes longer for more."""

    staging_nbytes: int = STAGING_NBYTES
    """Bytes of one rank's staging slab in the node's shared window; a multiple of 64.

    The default is less where a host has more than 8 ranks: 64 MiB for all of them. Another value is kept as it is."""

    message_nbytes: int = 1024**3
    """Bytes of the largest single MPI message; a multiple of 64 below 2 GiB, where MPI's counts end."""

    exchange_nbytes: int = 8 * 1024**2
    """Bytes, about, that a rank holds of the arrays of other hosts while they are exchanged; a multiple of 64."""

    shm_dir: str = "/dev/shm"
    """The directory, in memory, that the ranks of a node share."""

    flight_dir: str = field(default_factory=_default_flight_dir)
    """The directory that flight records are dumped to when a group fails; made when needed."""

    flight_length: int = 256
    """Collective calls that the flight recorder remembers."""

    cross_memory: bool = True
    """Whether ranks of a node may read each other's memory directly (``process_vm_readv``)."""

    sockets: Literal["auto", "always", "never"] = "auto"
    """Whether ranks of different hosts talk over TCP connections of their own instead of over MPI: ``"auto"``, unless
    MPI is clearly faster when the group opens, as it is on InfiniBand; ``"always"``; or ``"never"``."""

    full_traceback: bool = False
    """Whether an unhandled error is printed with all frames, those inside zerort included."""

    def __post_init__(self) -> None:
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise CallError(f"Expected timeout to be a number of seconds, got {self.timeout!r}.")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise CallError(f"Expected timeout to be above 0 and finite, got {self.timeout!r}. Use 86400 for a day.")
        _check_int("eager_nbytes", self.eager_nbytes, minimum=0)
        _check_int("staging_nbytes", self.staging_nbytes, minimum=_LINE, multiple=_LINE)
        _check_int("message_nbytes", self.message_nbytes, minimum=_LINE, maximum=2**31 - _LINE, multiple=_LINE)
        _check_int("exchange_nbytes", self.exchange_nbytes, minimum=_LINE, multiple=_LINE)
        if not isinstance(self.shm_dir, str) or not os.path.isabs(self.shm_dir):
            raise CallError(f"Expected shm_dir to be the absolute path of a directory, got {self.shm_dir!r}.")
        if not isinstance(self.flight_dir, str) or not self.flight_dir:
            raise CallError(f"Expected flight_dir to be the path of a directory, got {self.flight_dir!r}.")
        _check_int("flight_length", self.flight_length, minimum=1)
        if self.sockets not in ("auto", "always", "never"):
            raise CallError(f"Expected sockets to be 'auto', 'always' or 'never', got {self.sockets!r}.")
        for switch in ("cross_memory", "full_traceback"):
            if not isinstance(getattr(self, switch), bool):
                raise CallError(f"Expected {switch} to be True or False, got {getattr(self, switch)!r}.")

    @classmethod
    def from_environment(cls, **overrides: Any) -> GroupOptions:
        """Read the variables of `ENVIRONMENT`; what is passed here wins, and its variable is not read.

        A variable that is empty counts as not set.

        Args:
            **overrides: Fields by name.

        Raises:
            CallError: If a variable does not read as what its field takes; the message names it.
        """
        return options_from(ENVIRONMENT, cls, overrides)


def _check_int(what: str, value: object, *, minimum: int, maximum: int | None = None, multiple: int = 1) -> None:
    if type(value) is int and value >= minimum and value % multiple == 0 and (maximum is None or value <= maximum):
        return
    bounds = f"an int of at least {minimum}" if maximum is None else f"an int from {minimum} to {maximum}"
    raise CallError(
        f"Expected {what} to be {bounds}{f' and a multiple of {multiple}' * (multiple > 1)}, got {value!r}."
    )
