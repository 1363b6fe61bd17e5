"""`JoinState`: whether the batch that a rank computes is its own, or one that it computes again.

    rt.join pulls a batch     one more in `owns`: whether it is one of this rank's own
    unit.reduce               a repeated batch's gradients are dropped: zeros are reduced
    rt.step                   the agreement carries `has_more`, and brings back whether any rank has more
    rt.discard_gradients      the same, in an exchange of its own

A runtime without a loop of `rt.join` has pulled nothing, and drops nothing. Which micro-steps count is asked of
`counted.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zerort.errors import UnitStateError

__all__ = ["JoinState"]


@dataclass(slots=True)
class JoinState:
    """What a step has to know of a loop of `Runtime.join`, on this rank."""

    has_more: bool = False
    """Whether this rank has a batch behind the one that it computes."""
    anyone: bool = True
    """Whether any rank had one when the last step was taken."""
    owns: list[bool] = field(default_factory=list)
    """Whether each batch of this step is this rank's own; behind the step those of the last one, for `Runtime.mean`."""
    pulled: int = 0
    """Batches since the last step."""
    handed_in: bool = False
    """Whether gradients were handed in since a batch was pulled."""
    is_left: bool = False
    """Whether the loop was left between a batch's gradients and their step."""

    def pull(self, *, own: bool) -> None:
        """Take note of the next batch."""
        if not self.pulled:
            self.owns.clear()
        self.owns.append(own)
        self.pulled += 1

    def drops(self) -> bool:
        """Say whether gradients that are handed in now are of a batch that is computed again."""
        self.handed_in = self.pulled > 0
        return self.handed_in and not self.owns[-1]

    def problem(self, micro_steps: int) -> Exception | None:
        """Return what is wrong with the number of batches of a step, if anything is."""
        if self.is_left:
            return UnitStateError(
                "Expected rt.step() or rt.discard_gradients() before a loop of rt.join() is left, got neither for "
                "gradients that were handed in."
            )
        if self.pulled in (1, micro_steps) or not self.owns:
            return None
        return UnitStateError(
            f"Expected one batch of rt.join() for each rt.step(), or micro_steps={micro_steps} of them, got "
            f"{self.pulled}. To train on without the loop, leave it: break, or its close()."
        )

    def end_step(self) -> None:
        """Start anew after a step, done or not."""
        if self.is_left:
            self.owns.clear()
        self.pulled = 0
        self.handed_in = self.is_left = False
