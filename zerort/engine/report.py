"""What a runtime tells: `StepReport` of every step with its `UnitNorms`, `MemoryReport`, `Rebalanced`, `Restored`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerort.config import format_bytes
from zerort.optim import norm_of
from zerort.typing import Array

__all__ = ["MemoryReport", "Rebalanced", "Restored", "Slowest", "StepReport", "UnitNorms"]


class UnitNorms(Mapping[str, float]):
    """The norms of gradients by unit, computed when somebody asks: from the sums that made the norm of all of them.

    >>> norms = UnitNorms({"block0": [np.array([9.0, 16.0])], "block1": [np.array([144.0])], "head": [np.array([1.0])]})
    >>> norms["block0"], norms.matching("block*")
    (5.0, 13.0)

    Args:
        sums: Sums of squares, by unit; those of each of its sections, 1-D.
        scale: What norms are multiplied by.
    """

    __slots__ = ("_scale", "_sums")

    def __init__(self, sums: Mapping[str, Sequence[Array]], *, scale: float = 1.0) -> None:
        self._sums = sums
        self._scale = scale

    def __getitem__(self, unit: str) -> float:
        return self._norm(self._sums[unit])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def matching(self, pattern: str) -> float:
        """Return the norm of all units together whose names match a pattern, such as ``"h.*"``; 0.0 if none does."""
        units = [unit for unit in self._sums if fnmatch.fnmatchcase(unit, pattern)]
        return self._norm([one for unit in units for one in self._sums[unit]])

    def _norm(self, sums: Sequence[Array]) -> float:
        return norm_of(np.concatenate(sums)) * self._scale if sums else 0.0

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The rank that the others waited for."""

    rank: int
    """Which."""

    seconds: float
    """Its own time since the step before: without waits for other ranks."""

    others_seconds: float
    """The mean of the other ranks' own times."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.seconds:.4g} s, others {self.others_seconds:.4g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, the same on every rank but for `stalls` and `bytes_tiered`. Nothing is skipped silently."""

    update: int
    """Updates done so far, this one included if there was one."""

    updated: bool
    """Whether parameters changed."""

    why: str = ""
    """Why not, if they did not: which tensor overflowed, or held NaN, on which rank."""

    lr: float = 0.0
    """The learning rate of parameters in no parameter group."""

    grad_norm: float = 0.0
    """The norm of all gradients together, unscaled and averaged, before clipping."""

    norms: UnitNorms = field(default_factory=lambda: UnitNorms({}), repr=False, compare=False)
    """The same by unit: ``report.norms["block0"]``; ``report.norms.matching("block*")`` of several together."""

    clipped: bool = False
    """Whether gradients were scaled down to ``clip_norm``."""

    loss_scale: float = 1.0
    """What this step's losses were expected to be multiplied by. The next step's is `Runtime.loss_scale`."""

    weight: float | None = None
    """The sum of all ranks' ``step(weight=)``, which gradients were divided by; None: by ranks and micro-steps."""

    without_gradient: tuple[str, ...] = ()
    """Trainable tensors that no rank had a gradient for; they and their state stayed as they were."""

    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the arrays that went through each collective since the step before; of those that are coded, the
    codes'."""

    bytes_uncoded: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the arrays that went through collectives as codes, before they were coded; empty without ``wire=``,
    ``frozen_format=`` and `zerort.Sparsity`."""

    wire: str = ""
    """What travelled as codes, which changes the results, such as ``"gather int8, reduce int4"``, with feedback of
    which, and whether they depend on the number of ranks; ``"gather delta (lossless)"`` changes none. Empty if nothing
    did."""

    state: str = ""
    """The form that optimizer state is kept in where that changes the results: ``"int8 moments"``; else empty."""

    frozen: str = ""
    """What frozen parameters rest in where that changes the results: ``"int8"``; else empty."""

    sparsity: Mapping[str, float] = field(default_factory=dict)
    """Which share of a tensor's elements is pruned after this step, by full name, of tensors with a `Sparsity`."""

    rows: str = ""
    """Tables whose rows stay as they are while nobody touches them, which changes the results: ``"lazy embed.table"``;
    else empty."""

    bytes_tiered: Mapping[str, int] = field(default_factory=dict)
    """Bytes of this rank that went between tiers since the step before, by ``"nvme read"`` and ``"nvme write"``; empty
    if all rests in memory."""

    stalls: Mapping[str, float] = field(default_factory=dict)
    """Seconds this rank waited for each stream since the step before: gather, reduce, step, nvme."""

    slowest: Slowest | None = None
    """The rank that took longest since the step before, and how long; None in the first step."""

    straggler: str = ""
    """The rank that stays slower than the others, with its host and device; empty if there is none."""

    stop: bool = False
    """Whether a signal asked some rank to stop (SIGINT, SIGTERM, SIGUSR1): save, and leave the loop. Another step
    raises `StopRequested`."""

    digest: str = ""
    """A checksum of all parameters after the step, the same for any number of ranks: with ``virtual_shards``, or
    ``digest=True``; rows of tables are up to date in it."""

    def __str__(self) -> str:
        what = "updated" if self.updated else f"not updated: {self.why}"
        stalls = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.stalls.items())
        moved = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.bytes_moved.items())
        tiered = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.bytes_tiered.items())
        coded = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.bytes_uncoded.items())
        how = f"{self.wire}; " * bool(self.wire)
        pruned = sum(self.sparsity.values()) / max(len(self.sparsity), 1)
        sparse = f"{len(self.sparsity)} tensors pruned, {pruned:.1%} on average; " * bool(self.sparsity)
        return (
            f"update {self.update}: {what}; |g| {self.grad_norm:.4g}{' (clipped)' * self.clipped}; lr {self.lr:.3g}; "
            f"{f'{self.state}; ' * bool(self.state)}{f'frozen parameters in {self.frozen}; ' * bool(self.frozen)}"
            f"{sparse}{f'{self.rows}; ' * bool(self.rows)}"
            f"moved {moved or 'nothing'}{f' ({how}uncoded: {coded})' * bool(coded)}; "
            f"{f'{tiered}; ' * bool(tiered)}waited {stalls or 'for nothing'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes that this rank holds for a runtime."""

    parameter: int
    """Parameters at rest."""

    gradient: int
    """Gradients at rest."""

    state: int
    """Optimizer state at rest in memory, master weights included."""

    buckets: int
    """Gradient buckets in flight, and their codes: reserved, whether in use or not; and what coding has lost of
    gradients (``Wire(feedback=True)``)."""

    gathered: int = 0
    """Slots for gathered units, and for their codes while these travel: reserved, whether in use or not."""

    host_copy: int = 0
    """Whole parameters that stay on this host between gathers, once for all of its ranks that share memory: the base of
    ``Wire(gather="delta")`` and of ``Wire(gather="int4", feedback=True)``, or ``Plan.zero(3, secondary="host")``. On
    GPUs: on this rank's."""

    gathered_peak: int = 0
    """Most bytes of gathered units that were in slots at once. 0 where ranks share memory: a gather takes none."""

    gathered_apart: int = 0
    """Most bytes of parameters that were gathered without a slot at once, while ranks used different units of a model
    and shared no memory. Of `zerort.forecast`: what they take at most if they do. Not in `in_memory`, nor in a budget:
    it comes with such a gather and goes with it."""

    streaming: int = 0
    """Memory of chunks on their way between a disk and memory."""

    nvme: int = 0
    """Bytes at rest on a disk: no memory."""

    @property
    def at_rest(self) -> int:
        """Bytes at rest in memory: parameters, gradients and state."""
        return self.parameter + self.gradient + self.state

    @property
    def in_memory(self) -> int:
        """Bytes of memory: at rest, in slots, and on their way."""
        return self.at_rest + self.buckets + self.gathered + self.host_copy + self.streaming

    def __str__(self) -> str:
        parts = ["parameter", "gradient", "state", "buckets", "gathered"]
        parts += [part for part in ("host_copy", "streaming", "nvme") if getattr(self, part)]
        return ", ".join(f"{part.replace('_', ' ')} {format_bytes(getattr(self, part))}" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """What `Runtime.rebalance` did, and why; the same on every rank."""

    changed: bool
    """Whether shards or shares are others than before."""

    shard_weights: tuple[float, ...] | None
    """How much of every shard each rank has now; None: alike."""

    shares: tuple[float, ...] | None = None
    """How much of a batch of `Runtime.take` each rank takes now; None: as `shard_weights`."""

    nbytes: int
    """Bytes that changed their rank, over all ranks."""

    seconds: float
    """How long they took, on the rank that took longest."""

    step_seconds: tuple[float, float] | None = None
    """What the slowest rank took for its part of a step, as measured, and what it is to take now: of ``"auto"``."""

    why: str = ""
    """Why ``"auto"`` did this, or nothing."""

    def __str__(self) -> str:
        moved = f"{format_bytes(self.nbytes)} moved in {self.seconds:.3g} s" if self.nbytes else "nothing moved"
        steps = "a step {:.3g} s, was {:.3g} s".format(*reversed(self.step_seconds)) if self.step_seconds else ""
        parts = [f"shards {_weights(self.shard_weights)}", f"shares {_weights(self.shares)}" * bool(self.shares)]
        return f"{', '.join(filter(None, [*parts, moved, steps]))}{f': {self.why}' * bool(self.why)}"


def _weights(weights: tuple[float, ...] | None) -> str:
    """Return weights in parts of their sum.

    >>> _weights((1, 1, 2)), _weights(None)
    ('0.250 0.250 0.500', 'alike')
    """
    return "alike" if weights is None else " ".join(f"{one / sum(weights):.3f}" for one in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `Runtime.load` found beside the values."""

    updates: int
    """Updates done when the checkpoint was written."""

    progress: Any
    """What this rank had passed to `save` as ``progress``; rank 0's if there were fewer ranks then."""

    every_progress: tuple[Any, ...]
    """What every rank had passed, by the rank it had then."""
