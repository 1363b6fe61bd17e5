"""`RuntimeOptions`: how a runtime trains. Frozen, and proven when made."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerort.buffer import Leaves
from zerort.codec import ROWS
from zerort.config import Plan, Wire
from zerort.config.offload import OffloadOptions, Scratch, scratch_directories
from zerort.errors import CallError, PlanError
from zerort.layout import Placement
from zerort.layout.dtypes import TRAINABLE
from zerort.optim import LossScale, LossScaler

__all__ = ["Accumulate", "RuntimeOptions", "accumulation", "keeps_whole_gradients"]

Accumulate = Literal["sharded", "local"]


def keeps_whole_gradients(
    plan: Plan, *, micro_steps: int, accumulate: Accumulate | None, in_tree: bool = False
) -> bool:
    """Say whether each rank keeps whole gradients: the plan's, or the sums of its own micro-steps.

    Args:
        plan: What lives where.
        micro_steps: Gradients that are summed in a step, on each rank.
        accumulate: As in `RuntimeOptions`.
        in_tree: Whether they are summed in a fixed tree.

    Raises:
        PlanError: Shards are to be accumulated of gradients that the plan keeps whole.
    """
    placement = plan.gradient.placement
    if accumulate == "sharded" and placement is not Placement.SHARDED:
        raise PlanError(
            f"Expected a plan that shards gradients with accumulate='sharded', got {placement} ones, which every rank "
            "keeps whole. Use zr.Plan.zero(2) or zr.Plan.zero(3), or accumulate='local'."
        )
    return placement is not Placement.SHARDED or ((micro_steps > 1 or in_tree) and accumulate == "local")


def accumulation(plan: Plan, *, micro_steps: int, accumulate: Accumulate | None, in_tree: bool = False) -> str:
    """Say how the gradients of several micro-steps are summed, for a plan's text; nothing of a single one.

    >>> accumulation(Plan.zero(3), micro_steps=4, accumulate=None)
    '4 micro-steps accumulated sharded'
    """
    if micro_steps == 1:
        return ""
    is_whole = keeps_whole_gradients(plan, micro_steps=micro_steps, accumulate=accumulate, in_tree=in_tree)
    return f"{micro_steps} micro-steps accumulated {'local, in whole gradients' if is_whole else 'sharded'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How a runtime trains. All ranks need the same values."""

    prefetch: int = 1
    """Units that are gathered ahead of the one in use. At most ``prefetch + 1`` are gathered at once; those that come
    next again stay when they are released."""

    buckets: int = 2
    """Gradient buckets that may be in flight at once, where gradients do not rest whole on every rank."""

    micro_steps: int = 1
    """Calls of `Unit.reduce` per unit and step, whose gradients are summed."""

    accumulate: Accumulate | None = None
    """How the gradients of several micro-steps are summed. ``"sharded"``: over the ranks in every micro-step, so that
    each rank keeps its shard of the sum and no more, wherever the plan puts it. ``"local"``: on each rank first, in
    whole gradients, with the communication of one micro-step. None: sharded where the plan shards gradients."""

    reduction: Literal["mean", "sum"] = "mean"
    """Whether gradients are averaged over ranks and micro-steps, or summed."""

    clip_norm: float | None = None
    """Largest norm of all gradients together; larger ones are scaled down to it. None: not clipped."""

    loss_scale: LossScale | float | None = None
    """What losses are multiplied by before backward: dynamic, fixed, or not at all. See `Runtime.loss_scale`."""

    nonfinite: Literal["raise", "skip"] = "raise"
    """What a NaN or infinity in a gradient does without loss scaling: `NonFiniteError`, or a report of the skip."""

    gradient_dtype: str | None = None
    """What gradients are collected and summed in; None: the parameter's dtype, but float32 where NCCL would sum
    float16, which rounds, and overflows, on the way. ``"float32"`` for long sums in bf16; those of float64 parameters
    stay in float64."""

    virtual_shards: int | None = None
    """How many micro-batches a step has, over all ranks: their gradients are summed in one fixed tree, so that the same
    bits come from any number of ranks up to this. See `Runtime.micro_batches`."""

    digest: bool | None = None
    """Whether every step's report has a checksum of all parameters, which reads all of them, and has tables by rows
    updated in all of their rows. None: with `virtual_shards`."""

    shard_weights: Sequence[float] | None = None
    """How much of every shard each rank takes, by capacity; None: alike."""

    wire: Wire | None = None
    """How values travel between ranks; None: as they are."""

    frozen_format: Literal["int8", "int4"] | None = None
    """What frozen parameters rest in: blocks of codes, which are decoded whenever their unit is gathered. None: as they
    are. Whole numbers stay as they are."""

    scratch: Scratch | None = None
    """The directory for what rests on NVME, or several, each on a disk of its own. They have to be there. None: as
    ``ZERORT_SCRATCH`` says, or the system's directory for temporary files."""

    create_scratch: bool = False
    """Make directories of `scratch` that are not there, with those above them. Without this a disk that is not mounted,
    or a name that is mistyped, is an error instead of a directory on another disk."""

    offload: OffloadOptions | None = None
    """How values stream to and from it; None: the defaults, or what the environment says."""

    last_step: str | os.PathLike[str] | None = None
    """A directory that all ranks see, in which every step leaves a checkpoint instead of the one before; the first step
    makes it, but nothing above it. What ends a step halfway, a disk that fails or is full or a kill, then costs that
    step alone: `Runtime.resume`. On the disk of `scratch` this costs a sync and links of what rests there, and its room
    once more; what is in memory is written."""

    history: str | os.PathLike[str] | None = None
    """A file in which the most memory that steps take is kept, by batch size and plan: what `Runtime.predict` and
    ``zerort plan --history`` predict other steps from. It may hold other runs' lines, and other models'. None: nothing
    is measured."""

    def __post_init__(self) -> None:
        if self.history is not None and not (isinstance(self.history, (str, os.PathLike)) and str(self.history)):
            raise CallError(f"Expected history to be a file, got {self.history!r}.")
        if self.scratch is not None:
            scratch_directories(self.scratch)
        if self.last_step is not None and not (isinstance(self.last_step, (str, os.PathLike)) and str(self.last_step)):
            raise CallError(f"Expected last_step to be a directory, got {self.last_step!r}.")
        if not isinstance(self.offload, (OffloadOptions, type(None))):
            raise CallError(f"Expected offload to be OffloadOptions, got {self.offload!r}.")
        if not isinstance(self.wire, (Wire, type(None))):
            raise CallError(f"Expected wire to be one such as zr.Wire(gather='int8'), got {self.wire!r}.")
        _expect_int("prefetch", self.prefetch, minimum=0)
        _expect_int("buckets", self.buckets, minimum=1)
        _expect_int("micro_steps", self.micro_steps, minimum=1)
        _expect_choice("reduction", self.reduction, ("mean", "sum"))
        _expect_choice("accumulate", self.accumulate, (None, "sharded", "local"))
        _expect_choice("nonfinite", self.nonfinite, ("raise", "skip"))
        _expect_choice("gradient_dtype", self.gradient_dtype, (None, *TRAINABLE))
        _expect_choice("frozen_format", self.frozen_format, (None, *ROWS))
        _expect_bool("create_scratch", self.create_scratch)
        if self.digest is not None:
            _expect_bool("digest", self.digest)
        _expect_number("clip_norm", self.clip_norm, cure="Write clip_norm=1.0, say; None for no clipping.")
        if not isinstance(self.loss_scale, LossScale):
            _expect_number(
                "loss_scale", self.loss_scale, cure="Write loss_scale=zr.LossScale() for a dynamic one; None for none."
            )
        if self.shard_weights is not None:
            _expect_weights(self.shard_weights)
        if self.virtual_shards is not None:
            _expect_int("virtual_shards", self.virtual_shards, minimum=1)
            if self.micro_steps != 1:
                raise CallError(
                    f"Expected micro_steps=1 with virtual_shards, got {self.micro_steps}. There the number of "
                    "micro-steps is virtual_shards / ranks, rounded up."
                )

    def micro_steps_of(self, size: int) -> int:
        """Return how many micro-batches each of ``size`` ranks computes in a step."""
        return self.micro_steps if self.virtual_shards is None else Leaves(self.virtual_shards, size).most

    @property
    def makes_digests(self) -> bool:
        """Whether every step's report has a digest."""
        return self.virtual_shards is not None if self.digest is None else self.digest

    @property
    def may_skip(self) -> bool:
        """Whether a step with NaN or infinity in its gradients is skipped instead of raising."""
        return self.nonfinite == "skip" or self.loss_scale is not None

    def make_scaler(self) -> LossScaler | None:
        """Return what scales losses, if anything does."""
        scale = self.loss_scale
        if scale is None:
            return None
        return LossScaler(scale if isinstance(scale, LossScale) else LossScale(initial=float(scale), interval=None))

    def describe(self) -> dict[str, Any]:
        """Return what all ranks have to agree on, for JSON."""
        return {name: repr(getattr(self, name)) for name in self.__slots__}


def _expect_int(what: str, value: object, *, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise CallError(f"Expected {what} to be an int of at least {minimum}, got {value!r}.")


def _expect_bool(what: str, value: object) -> None:
    if type(value) is not bool:
        raise CallError(f"Expected {what} to be True or False, got {value!r}.")


def _expect_number(what: str, value: object, *, cure: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value) and value > 0):  # type: ignore[arg-type,operator]
        raise CallError(f"Expected {what} to be a number above 0 and finite, got {value!r}. {cure}")


def _expect_weights(value: object) -> None:
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not numbers or not all(isinstance(one, (int, float)) and math.isfinite(one) and one >= 0 for one in numbers):
        raise CallError(f"Expected shard_weights to be numbers of at least 0, one for each rank, got {value!r}.")


def _expect_choice(what: str, value: object, choices: tuple[object, ...]) -> None:
    if not isinstance(value, (str, type(None))) or value not in choices:
        raise CallError(f"Expected {what} to be one of {', '.join(map(repr, choices))}; got {value!r}.")
