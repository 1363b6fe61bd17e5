"""Hold what a user decides: a `Plan` says what lives where, `GroupOptions` say how a group works.

A ZeRO stage is a row of data, not a mode (`ZERO`), and the plans nothing can serve are rows too (`_LAWS`):

    stage   parameter     gradient      state
    0       REPLICATED    REPLICATED    REPLICATED
    1       REPLICATED    PARTIAL       SHARDED
    2       REPLICATED    SHARDED       SHARDED
    3       SHARDED       SHARDED       SHARDED

All values are frozen and prove themselves. What the environment can set stands in `ENVIRONMENT`.
Imports only `zerort.errors` and `zerort.layout`.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from zerort.errors import CallError, PlanError
from zerort.layout.placement import Placement

__all__ = [
    "ENVIRONMENT",
    "ZERO",
    "GroupOptions",
    "Plan",
    "Residence",
    "Tier",
    "Variable",
    "format_bytes",
    "parse_bytes",
    "parse_switch",
]


class Tier(Enum):
    """Which memory a value rests in while nobody computes with it."""

    DEVICE = "device"
    """The memory computing happens in: the GPU's, or the host's on a machine without one."""

    HOST = "host"
    """Host memory; pinned where there is a GPU."""

    NVME = "nvme"
    """Files on a local disk."""

    def __repr__(self) -> str:
        return f"Tier.{self.name}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Residence:
    """Where one kind of value lives: how it lies over the ranks, and in which memory.

    >>> print(Residence(Placement.SHARDED, tier=Tier.NVME))
    SHARDED on NVME
    """

    placement: Placement
    """How the value lies over the group."""

    tier: Tier = Tier.DEVICE
    """The memory it rests in."""

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise CallError(f"Expected a Placement ({_names(Placement)}), got {self.placement!r}.")
        if not isinstance(self.tier, Tier):
            raise CallError(f"Expected a Tier ({_names(Tier)}), got {self.tier!r}.")

    def __str__(self) -> str:
        return f"{self.placement} on {self.tier}"


ZERO: Final[Mapping[int, tuple[Placement, Placement, Placement]]] = MappingProxyType(
    {
        #   parameter             gradient              state
        0: (Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
        1: (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED),
        2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
        3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
    }
)
"""The placements of parameter, gradient and state, by ZeRO stage."""

_ANY: Final = frozenset(Placement)
_R, _P, _S = (frozenset({placement}) for placement in (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED))

# Where the first column lies as the second says, the third has to lie as the fourth says; the fifth is the cure.
_LAWS: Final = (
    ("parameter", _ANY, "parameter", _R | _S, "Parameters are values, not sums: replicate or shard them."),
    ("state", _ANY, "state", _R | _S, "Optimizer state is a value, not a sum: replicate or shard it."),
    ("parameter", _S, "gradient", _S, "A rank can only update the parameters it holds: shard the gradient too."),
    ("gradient", _S, "state", _S, "A rank can only update the state it has gradients for: shard the state too."),
    ("state", _S, "gradient", _P | _S, "Summing whole gradients for a shard of state is wasted: use PARTIAL."),
)

# What rests on a disk is a rank's own range, read and written once: the part, how it has to lie there, the cure.
_DISK_LAWS: Final = (
    ("parameter", _S, "Every rank would read all of it from the disk: shard it, as Plan.zero(3, parameter=…) does."),
    ("gradient", _S, "Sums of whole gradients grow in memory: shard them, as Plan.zero(2) and Plan.zero(3) do."),
    ("state", _S, "Every rank would write all of it to the disk: shard it, as Plan.zero(1, state=…) does."),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What lives where: one residence each for parameters, gradients and optimizer state.

    >>> print(Plan.zero(1, state=Tier.HOST))
    parameter REPLICATED on DEVICE | gradient PARTIAL on DEVICE | state SHARDED on HOST
    """

    parameter: Residence
    """The parameters at rest, between the gathers."""

    gradient: Residence
    """The gradients between backward and the step; PARTIAL means that the step sums them."""

    state: Residence
    """The optimizer's state, master weights included."""

    @classmethod
    def zero(
        cls, stage: int, *, parameter: Tier = Tier.DEVICE, gradient: Tier = Tier.DEVICE, state: Tier = Tier.DEVICE
    ) -> Plan:
        """Look up a ZeRO stage and say in which tier each part rests.

        ``Plan.zero(2, state=Tier.HOST)`` is ZeRO-Offload; ``Plan.zero(3, parameter=Tier.NVME, gradient=Tier.HOST,
        state=Tier.NVME)`` is ZeRO-Infinity.

        Args:
            stage: A row of `ZERO`.
            parameter: Where parameters rest.
            gradient: Where gradients rest.
            state: Where optimizer state rests.

        Raises:
            PlanError: If there is no such row.
        """
        row = ZERO.get(stage)
        if row is None:
            raise PlanError(f"Expected a ZeRO stage out of {', '.join(map(str, ZERO))}; got {stage!r}.")
        tiers = (parameter, gradient, state)
        return cls(*(Residence(placement, tier=tier) for placement, tier in zip(row, tiers, strict=True)))

    def __post_init__(self) -> None:
        for part in ("parameter", "gradient", "state"):
            if not isinstance(getattr(self, part), Residence):
                raise CallError(f"Expected a Residence for the {part}, got {getattr(self, part)!r}.")
        for part, where, other, allowed, cure in _LAWS:
            placement, found = getattr(self, part).placement, getattr(self, other).placement
            if placement in where and found not in allowed:
                given = "" if part == other else f" beside a {placement} {part}"
                legal = " or ".join(str(one) for one in Placement if one in allowed)
                raise PlanError(f"Expected the {other}{given} to be {legal}, got {found}. {cure}")
        for part, allowed, cure in _DISK_LAWS:
            residence = getattr(self, part)
            if residence.tier is Tier.NVME and residence.placement not in allowed:
                raise PlanError(f"Expected the {part} on NVME to be SHARDED, got {residence.placement}. {cure}")

    def __str__(self) -> str:
        return f"parameter {self.parameter} | gradient {self.gradient} | state {self.state}"


def _names(choices: type[Enum]) -> str:
    return ", ".join(repr(choice) for choice in choices)


# ── bytes as people write them ──────────────────────────────────────────────────────────────────────────────────────

_UNITS: Final = ("", "K", "M", "G", "T", "P")
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(I?B)?|B)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``"4MiB"``, ``"256K"``, ``"1.5 GiB"``, ``"4096"``.

    As in GNU tools, ``K`` and ``KiB`` are 1024 bytes and ``KB`` is 1000; case does not matter.

    >>> parse_bytes("256K"), parse_bytes("1KB"), parse_bytes("1.5GiB")
    (262144, 1000, 1610612736)

    Raises:
        CallError: If it does not read as a whole number of bytes.
    """
    found = _BYTES.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is not None:
        digits, unit, suffix = found.groups(default="")
        base = 1000 if suffix.upper() == "B" else 1024
        amount = Fraction(digits) * Fraction(base) ** _UNITS.index(unit.upper())
        if amount.denominator == 1:
            return amount.numerator
    raise CallError(f"Expected a whole number of bytes such as '4096', '256K' or '4MiB', got {text!r}.")


def format_bytes(nbytes: int) -> str:
    """Write a number of bytes for people, rounded to two decimals.

    >>> format_bytes(4 * 1024**2), format_bytes(1_234_567), format_bytes(17)
    ('4MiB', '1.18MiB', '17B')

    Raises:
        CallError: If it is negative.
    """
    if nbytes < 0:
        raise CallError(f"Expected a number of bytes of at least 0, got {nbytes}.")
    power = 0
    while power + 1 < len(_UNITS) and round(nbytes / 1024**power, 2) >= 1024:
        power += 1
    amount = f"{nbytes / 1024**power:.2f}".rstrip("0").rstrip(".")
    return f"{amount}{_UNITS[power]}iB" if power else f"{nbytes}B"


# ── how a group works ───────────────────────────────────────────────────────────────────────────────────────────────

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
        if not isinstance(self.cross_memory, bool):
            raise CallError(f"Expected cross_memory to be True or False, got {self.cross_memory!r}.")

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
    }
)
"""Every environment variable that zerort reads."""
