"""`Plan`: placement and tier of parameters, gradients and optimizer state. `_LAWS` has what may not be combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from zerort.config.budget import Budget
from zerort.config.residence import ZERO, Residence, Tier, TierName, tier_of
from zerort.errors import CallError, PlanError
from zerort.layout.placement import Placement

__all__ = ["Plan"]

_PARTS: Final = ("parameter", "gradient", "state")

_ANY: Final = frozenset(Placement)
_R, _P, _S = (frozenset({placement}) for placement in (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED))

# (part, if its placement is in, then part, must be in, hint)
_LAWS: Final = (
    ("parameter", _ANY, "parameter", _R | _S, "Parameters are values, not sums: replicate or shard them."),
    ("state", _ANY, "state", _R | _S, "Optimizer state is a value, not a sum: replicate or shard it."),
    ("parameter", _S, "gradient", _S, "A rank can only update the parameters it holds: shard the gradient too."),
    ("gradient", _S, "state", _S, "A rank can only update the state it has gradients for: shard the state too."),
    ("state", _S, "gradient", _P | _S, "Summing whole gradients for a shard of state is wasted: use PARTIAL."),
)

# (part, what its placement on a disk must be, hint): a rank reads and writes its own range there, once.
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

    secondary: Literal["host"] | None = None
    """Where gathered parameters stay until the next update, beside the shards at rest: ``"host"``, once on each, so
    that backward crosses no wire. None: nowhere."""

    @classmethod
    def zero(
        cls,
        stage: int,
        *,
        parameter: Tier | TierName = Tier.DEVICE,
        gradient: Tier | TierName = Tier.DEVICE,
        state: Tier | TierName = Tier.DEVICE,
        secondary: Literal["host"] | None = None,
    ) -> Plan:
        """Look up a ZeRO stage and say in which tier each part rests.

        ``Plan.zero(2, state=Tier.HOST)`` is ZeRO-Offload; ``Plan.zero(3, parameter=Tier.NVME, gradient=Tier.HOST,
        state=Tier.NVME)`` is ZeRO-Infinity; ``Plan.zero(3, secondary="host")`` is hpZ of ZeRO++.

        Args:
            stage: A row of `ZERO`.
            parameter: Where parameters rest: a `Tier`, or its name, ``"nvme"``.
            gradient: Where gradients rest.
            state: Where optimizer state rests.
            secondary: ``"host"``: gathered parameters stay once on each host until the next update.

        Raises:
            CallError: There is no such tier.
            PlanError: There is no such row, or no such plan.
        """
        row = ZERO.get(stage) if isinstance(stage, int) and not isinstance(stage, bool) else None
        if row is None:
            raise PlanError(f"Expected a ZeRO stage out of {', '.join(map(str, ZERO))}; got {stage!r}.")
        tiers = map(tier_of, (parameter, gradient, state))
        parts = (Residence(placement, tier=tier) for placement, tier in zip(row, tiers, strict=True))
        return cls(**dict(zip(_PARTS, parts, strict=True)), secondary=secondary)

    @staticmethod
    def fit(*, device: str | int = 0, host: str | int = 0, nvme: str | int = 0, stage: int = 3) -> Budget:
        """Say how much there is of each memory instead of what goes where; ``zr.open(plan=...)`` takes it as a plan.

        What is hottest goes highest: parameters, then gradients, then optimizer state, of which a part may stay in
        memory while the rest streams; device before host before NVMe. What moves values (slots of gathered units,
        gradient buckets, slots of the stream) is counted too; threads and the like take up to 32 MiB besides. Without a
        GPU, device and host are one memory. Announce the model before its first unit is registered, with
        `Runtime.expect`: then the budget is shared out over all of it.

        >>> print(Plan.fit(host="8GiB", nvme="200GiB"))
        ZeRO-3 within device 0B, host 8GiB, nvme 200GiB per rank

        Args:
            device: What one rank may use of the memory computing happens in: ``"2GiB"``, or bytes.
            host: Of host memory.
            nvme: Of the disk.
            stage: A row of `ZERO`: what is sharded.

        Raises:
            CallError: A size cannot be read.
            PlanError: There is no such stage, or no memory at all.
        """
        return Budget.build(device=device, host=host, nvme=nvme, stage=stage)

    def __post_init__(self) -> None:
        for part in _PARTS:
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

        if self.secondary not in (None, "host"):
            raise PlanError(f"Expected secondary to be 'host', or None for no second copy, got {self.secondary!r}.")
        if self.secondary is not None and self.parameter.placement is not Placement.SHARDED:
            raise PlanError(
                f"Expected SHARDED parameters with secondary='host', got {self.parameter.placement} ones, which every "
                "rank keeps whole. Use zr.Plan.zero(3), or leave secondary= out."
            )
        if self.secondary is not None and self.parameter.tier is Tier.NVME:
            raise PlanError(
                "Expected parameters in memory with secondary='host', which keeps the whole model there on each host, "
                "got parameters on NVME. Use parameter=Tier.DEVICE, or leave secondary= out."
            )

    def check_device(self, *, on_gpus: bool) -> None:
        """Raise unless ranks that compute on GPUs, or on the host, can have it.

        Raises:
            PlanError: They cannot.
        """
        if self.secondary is not None and on_gpus:
            raise PlanError(
                "Expected ranks that compute on the host with secondary='host', got GPUs, which share no memory to "
                "keep it in. Leave secondary= out."
            )

    def describe(self, *, gpus: bool) -> str:
        """Say what lives where on ranks that compute on GPUs, or on the host: there is one memory then."""
        parts = [f"{part} {getattr(self, part).describe(gpus=gpus)}" for part in _PARTS]
        return " | ".join(parts + ["gathered parameters on each host"] * (self.secondary is not None))

    def __str__(self) -> str:
        return self.describe(gpus=True)
