"""What a runtime tells: `StepReport` of every step, `MemoryReport`, `Restored`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerort.config import format_bytes

__all__ = ["MemoryReport", "Restored", "StepReport"]


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

    clipped: bool = False
    """Whether gradients were scaled down to ``clip_norm``."""

    loss_scale: float = 1.0
    """What this step's losses were expected to be multiplied by. The next step's is `Runtime.loss_scale`."""

    without_gradient: tuple[str, ...] = ()
    """Trainable tensors that no rank had a gradient for; they and their state stayed as they were."""

    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the arrays that went through each collective since the step before."""

    bytes_tiered: Mapping[str, int] = field(default_factory=dict)
    """Bytes of this rank that went between tiers since the step before, by ``"nvme read"`` and ``"nvme write"``; empty
    if all rests in memory."""

    stalls: Mapping[str, float] = field(default_factory=dict)
    """Seconds this rank waited for each stream since the step before: gather, reduce, step, nvme."""

    stop: bool = False
    """Whether a signal asked some rank to stop (SIGINT, SIGTERM, SIGUSR1): save, and leave the loop. Another step
    raises `StopRequested`."""

    digest: str = ""
    """A checksum of all parameters after the step, the same for any number of ranks; in deterministic mode."""

    def __str__(self) -> str:
        what = "updated" if self.updated else f"not updated: {self.why}"
        stalls = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.stalls.items())
        moved = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.bytes_moved.items())
        tiered = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.bytes_tiered.items())
        return (
            f"update {self.update}: {what}; |g| {self.grad_norm:.4g}{' (clipped)' * self.clipped}; lr {self.lr:.3g}; "
            f"moved {moved or 'nothing'}; {f'{tiered}; ' * bool(tiered)}waited {stalls or 'for nothing'}"
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
    """Gradient buckets in flight: reserved, whether in use or not."""

    gathered: int = 0
    """Slots for gathered units: reserved, whether in use or not."""

    gathered_peak: int = 0
    """Most bytes of gathered units that were in slots at once. 0 where ranks share memory: a gather takes none."""

    streaming: int = 0
    """Memory of chunks on their way between a disk and memory."""

    nvme: int = 0
    """Bytes at rest on a disk: no memory."""

    @property
    def resting(self) -> int:
        """Bytes at rest in memory: parameters, gradients and state."""
        return self.parameter + self.gradient + self.state

    def __str__(self) -> str:
        parts = ["parameter", "gradient", "state", "buckets", "gathered"]
        parts += [part for part in ("streaming", "nvme") if getattr(self, part)]
        return ", ".join(f"{part} {format_bytes(getattr(self, part))}" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `Runtime.load` found beside the values."""

    updates: int
    """Updates done when the checkpoint was written."""

    progress: Any
    """What this rank had passed to `save` as ``progress``; rank 0's if there were fewer ranks then."""

    every_progress: tuple[Any, ...]
    """What every rank had passed, by the rank it had then."""
