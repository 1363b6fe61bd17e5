"""Loss scaling for float16: the loss is multiplied by a scale so that small gradients do not vanish, and no more.

    overflow          scale * backoff, at least minimum; the update is skipped
    interval without  scale * growth, at most maximum

`LossScale` is what a user decides, `LossScaler` what a run has come to. All ranks see the same overflows, so they come
to the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerort.errors import CallError
from zerort.optim.checks import check_count, check_number
from zerort.optim.optimizer import JSON

__all__ = ["LossScale", "LossScaler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How the loss is scaled. Powers of two scale exactly; ``interval=None`` keeps the scale as it is.

    >>> LossScale(initial=1024.0, interval=None).initial
    1024.0
    """

    initial: float = 65536.0
    """The scale to begin with."""

    growth: float = 2.0
    """What the scale is multiplied by after `interval` updates without overflow; above 1."""

    backoff: float = 0.5
    """What the scale is multiplied by after an overflow; above 0 and below 1."""

    interval: int | None = 2000
    """Updates without overflow before the scale grows; None: the scale never changes."""

    minimum: float = 1.0
    """The least scale; above 0."""

    maximum: float = 2.0**24
    """The largest scale."""

    def __post_init__(self) -> None:
        check_number("growth", self.growth, above=1.0)
        check_number("backoff", self.backoff, above=0.0, below=1.0)
        if self.interval is not None:
            check_count("interval", self.interval, minimum=1)
        check_number("minimum", self.minimum, above=0.0)
        check_number("maximum", self.maximum, minimum=self.minimum)
        check_number("initial", self.initial, minimum=self.minimum)
        if self.initial > self.maximum:
            raise CallError(
                f"Expected initial to be at most maximum={self.maximum!r}, got {self.initial!r}. Lower it, or raise "
                "maximum."
            )


class LossScaler:
    """The scale of a run, and the updates since it last changed.

    >>> scaler = LossScaler(LossScale(initial=8.0, interval=1))
    >>> scaler.update(overflow=True)
    >>> scaler.scale
    4.0
    """

    def __init__(self, options: LossScale) -> None:
        self.options = options
        self._scale = float(options.initial)
        self._good = 0

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now; gradients are divided by it before the update."""
        return self._scale

    def update(self, overflow: bool) -> None:  # noqa: FBT001 (the one thing there is to say)
        """Take note of an update that was made, or skipped because of `overflow`."""
        options = self.options
        if options.interval is None:
            return
        if overflow:
            self._scale = max(options.minimum, self._scale * options.backoff)
            self._good = 0
            return
        self._good += 1
        if self._good >= options.interval:
            self._scale = min(options.maximum, self._scale * options.growth)
            self._good = 0

    def state(self) -> dict[str, JSON]:
        """Return what a checkpoint must hold, in a form for JSON."""
        return {"scale": self._scale, "good_updates": self._good}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Go on from what `state` returned. The options of this run hold: its bounds, and a scale that never changes.

        Raises:
            CallError: If it is not such a state.
        """
        if set(state) != {"scale", "good_updates"}:
            raise CallError(
                f"Expected a loss scale's state with scale and good_updates, got {sorted(state)}. "
                "Pass what LossScaler.state() returned."
            )
        scale, good = state["scale"], state["good_updates"]
        check_number("scale", scale, above=0.0)
        check_count("good_updates", good, minimum=0)
        assert isinstance(scale, (int, float))
        assert isinstance(good, int)
        if self.options.interval is not None:
            self._scale = min(self.options.maximum, max(self.options.minimum, float(scale)))
            self._good = good

    def __repr__(self) -> str:
        return f"LossScaler(scale={self._scale!r}, good_updates={self._good})"
