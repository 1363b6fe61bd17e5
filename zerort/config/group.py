"""`GroupOptions`: how a group works, and the environment that can set it (`ENVIRONMENT`).

Frozen, and proven when made.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from zerort.config.sizes import parse_bytes
from zerort.errors import CallError

__all__ = ["ENVIRONMENT", "GroupOptions", "Variable", "parse_switch"]

_LINE: Final = 64  # bytes: a cache line, and whole elements of every dtype


def _default_flight_dir() -> str:
    # One per user: on a shared machine /tmp/zerort-flight would belong to whoever crashed first.
    return os.path.join(tempfile.gettempdir(), f"zerort-flight-{os.getuid()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group communicates. The defaults suit most machines; all ranks of a group need the same values.

    >>> GroupOptions(timeout=60, staging_nbytes=parse_bytes("1MiB")).staging_nbytes
    1048576
    """

    timeout: float = 300.0
    """Seconds that a rank waits for the others before the group breaks."""

    eager_nbytes: int = 1024**2
    """Bytes. Collectives up to this size run on the caller's thread while the stream is idle; 0: only barriers do."""

    staging_nbytes: int = 4 * 1024**2
    """Bytes of one rank's staging slab in the node's shared window; a multiple of 64."""

    message_nbytes: int = 1024**3
    """Bytes of the largest single MPI message; a multiple of 64 below 2 GiB, where MPI's counts end."""

    exchange_nbytes: int = 8 * 1024**2
    """Bytes of one block of a network exchange: what a rank holds of the others' arrays; a multiple of 64."""

    shm_dir: str = "/dev/shm"
    """The directory, in memory, that the ranks of a node share."""

    flight_dir: str = field(default_factory=_default_flight_dir)
    """The directory that flight records are dumped to when a group fails; made when needed."""

    flight_length: int = 256
    """Collective calls that the flight recorder remembers."""

    cross_memory: bool = True
    """Whether ranks of a node may read each other's memory directly (``process_vm_readv``)."""

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
        values = dict(overrides)
        for name, variable in ENVIRONMENT.items():
            text = os.environ.get(name, "").strip()
            if not text or variable.field in overrides:
                continue
            try:
                values[variable.field] = variable.parse(text)
                cls(**{variable.field: values[variable.field]})  # proves this field alone, so that its name is known
            except ValueError as error:
                raise CallError(
                    f"Expected {name} to be {variable.expects}, got {text!r}. Correct or unset it. ({error})"
                ) from None
        return cls(**values)


def _check_int(what: str, value: object, *, minimum: int, maximum: int | None = None, multiple: int = 1) -> None:
    if type(value) is int and value >= minimum and value % multiple == 0 and (maximum is None or value <= maximum):
        return
    bounds = f"an int of at least {minimum}" if maximum is None else f"an int from {minimum} to {maximum}"
    raise CallError(
        f"Expected {what} to be {bounds}{f' and a multiple of {multiple}' * (multiple > 1)}, got {value!r}."
    )


def parse_switch(text: str) -> bool:
    """Read a switch: 1 or 0, true or false, yes or no, on or off.

    Raises:
        CallError: It reads as neither.
    """
    switches = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switches:
        raise CallError(f"Expected one of {', '.join(switches)}; got {text!r}.")
    return switches[text.lower()]


class Variable(NamedTuple):
    """One environment variable: which field it sets, and how."""

    field: str
    """The field of `GroupOptions`."""

    parse: Callable[[str], Any]
    """Turns the text into the field's value; raises ValueError."""

    expects: str
    """What the text has to be, as a noun phrase."""

    help: str
    """What the field does, in one line."""


_SIZE: Final = "a size such as '4MiB' or '256K'"
ENVIRONMENT: Final[Mapping[str, Variable]] = MappingProxyType(
    {
        "ZERORT_TIMEOUT": Variable("timeout", float, "seconds above 0", "how long a rank waits for the others"),
        "ZERORT_EAGER_BYTES": Variable("eager_nbytes", parse_bytes, _SIZE, "up to here, run on the caller's thread"),
        "ZERORT_STAGING_BYTES": Variable("staging_nbytes", parse_bytes, _SIZE, "one rank's slab in the node's window"),
        "ZERORT_MESSAGE_BYTES": Variable("message_nbytes", parse_bytes, _SIZE, "the largest single MPI message"),
        "ZERORT_EXCHANGE_BYTES": Variable("exchange_nbytes", parse_bytes, _SIZE, "one block of a network exchange"),
        "ZERORT_SHM_DIR": Variable("shm_dir", str, "an absolute path", "memory that the ranks of a node share"),
        "ZERORT_FLIGHT_DIR": Variable("flight_dir", str, "a path", "where flight records are dumped"),
        "ZERORT_FLIGHT_LENGTH": Variable("flight_length", int, "a count above 0", "calls a flight record remembers"),
        "ZERORT_CROSS_MEMORY": Variable("cross_memory", parse_switch, "1 or 0", "let ranks read each other's memory"),
        "ZERORT_FULL_TRACEBACK": Variable("full_traceback", parse_switch, "1 or 0", "show errors with all frames"),
    }
)
"""Every environment variable that zerort reads."""
