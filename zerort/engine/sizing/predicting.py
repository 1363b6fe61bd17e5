"""`Prediction`: the memory of a step that was not taken yet, from layout and history.

    memory of a step = layout(plan)              counted to the byte, of any plan
                     + besides(batch)            a line through the peaks of past steps: a program, and activations

Activations grow with the samples of a micro-step, so two batch sizes are enough to tell the two apart. With one only,
what was there before the step stands for none. Pure, but for `predict`.
"""

from __future__ import annotations

import contextlib
import math
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from zerort.comm.agreed import agreed, expect_same, gather_json
from zerort.config import Budget, Plan, Tier, format_bytes
from zerort.device.host.memory import available_nbytes, left_of_limits
from zerort.engine.context import Context
from zerort.engine.model.unit import Unit
from zerort.engine.model.units import Units
from zerort.engine.sizing.counted import memory_of
from zerort.engine.sizing.forecast import MemoryForecast
from zerort.engine.sizing.history import Peak
from zerort.errors import CallError, PlanError

__all__ = ["Prediction", "batch_of", "besides", "predict", "prediction", "warn_unless_fits", "with_size"]

_LEAST: Final = 0.05
"""How far off a prediction of anything may be, as a part of it."""
_UNSEEN: Final = 0.25
"""How far off the activations of another batch size may be, if steps of one size alone were seen."""
_ALIKE: Final = 0.01
"""How far apart layouts of one plan may be, as a part of it."""
_OTHER_PLAN: Final = 0.1
"""How far off the difference of two layouts may be; besides, all of a step is under a plan that was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step is expected to take of memory, on the rank that takes most; the same on every rank."""

    batch: float
    """Samples of a micro-step."""
    plan: str
    """What lies where."""
    layout: int
    """Bytes of the runtime's arrays."""
    likely: int
    """Bytes of all."""
    low: int
    """At least, most likely."""
    high: int
    """At most, most likely."""
    room: int | None = None
    """Bytes that a rank can have; None: not known."""
    peaks: int = 0
    """How many batch sizes and plans it is predicted from."""

    @property
    def fits(self) -> bool:
        """Whether the likely amount is there."""
        return self.room is None or self.likely <= self.room

    def __str__(self) -> str:
        room = "" if self.room is None else f"; {'fits' if self.fits else 'does not fit'}: {format_bytes(self.room)}"
        return (
            f"{format_bytes(self.likely)} ({format_bytes(self.low)} to {format_bytes(self.high)}) for a batch of "
            f"{self.batch:g}, {format_bytes(self.layout)} of it laid out{room}"
        )


def with_size(peaks: Sequence[Peak]) -> list[Peak]:
    """Return the peaks of steps whose batch size is known."""
    return [one for one in peaks if one.batch > 0]


def batch_of(peaks: Sequence[Peak], batch: float | None, *, where: str) -> float:
    """Return the batch size to predict; None: the largest there was.

    Args:
        peaks: What is known of the model's steps; at least one.
        batch: What was asked for.
        where: The file of the history.

    Raises:
        CallError: It is no size, or steps of unknown sizes alone are known.
    """
    if batch is None:
        return max(one.batch for one in peaks)
    if isinstance(batch, bool) or not isinstance(batch, (int, float)) or not 0 <= batch < math.inf:
        raise CallError(f"Expected batch to be a number of samples of at least 0, or None, got {batch!r}.")
    if not with_size(peaks):
        raise CallError(
            f"Expected steps of a known batch size in {where} to predict one of {batch:g}, got {len(peaks)} of unknown "
            "size. Take batches with rt.take(order), or tell their size: rt.step(weight=…)."
        )
    return float(batch)


def besides(peaks: Sequence[Peak], batch: float) -> tuple[float, float]:
    """Return what a step takes beside the layout, and how far off that may be. Steps of unknown sizes do not count.

    Args:
        peaks: What is known of the model's steps; at least one. If no size is known, any step takes the most there was.
        batch: Samples of a micro-step.
    """
    peaks = with_size(peaks) or peaks
    most: dict[float, float] = {}
    for one in peaks:
        most[one.batch] = max(most.get(one.batch, -math.inf), float(one.besides))
    count = len(most)
    if count == 1:
        ((size, peak),) = most.items()
        idle = min(float(min(one.idle for one in peaks)), peak)
        each = (peak - idle) / size if size else 0.0
        found = idle + each * batch if size else peak
        return found, _LEAST * abs(found) + _UNSEEN * each * abs(batch - size)
    center = math.fsum(most) / count
    spread = math.fsum((size - center) ** 2 for size in most)
    mean = math.fsum(most.values()) / count
    slope = max(math.fsum((size - center) * (peak - mean) for size, peak in most.items()) / spread, 0.0)
    errors = [peak - mean - slope * (size - center) for size, peak in most.items()]
    noise = math.sqrt(math.fsum(one**2 for one in errors) / max(count - 2, 1))
    found = mean + slope * (batch - center)
    return found, _LEAST * abs(found) + 2 * noise * math.sqrt(1 + 1 / count + (batch - center) ** 2 / spread)


def prediction(peaks: Sequence[Peak], *, batch: float, plan: str, layout: int, room: int | None = None) -> Prediction:
    """Return what a step of ``batch`` takes, laid out in ``layout`` bytes.

    Args:
        peaks: What is known of the model's steps; at least one.
        batch: Samples of a micro-step.
        plan: What to call the plan.
        layout: Bytes of the runtime's arrays under it.
        room: Bytes that a rank can have.
    """
    peaks = with_size(peaks) or peaks
    rest, error = besides(peaks, batch)
    likely = layout + rest
    unlike = min(abs(layout - one.layout) for one in peaks)
    error += _OTHER_PLAN * unlike + _LEAST * likely * (unlike > _ALIKE * layout)
    return Prediction(
        batch=batch,
        plan=plan,
        layout=layout,
        likely=round(likely),
        low=round(max(likely - error, layout)),
        high=round(likely + error),
        room=room,
        peaks=len(peaks),
    )


def predict(context: Context, units: Units, *, batch: float | None, plan: Plan | Budget | None) -> Prediction:
    """Predict a step's memory; see `Runtime.predict`. Every rank calls this."""
    asked, layout = 0.0, 0
    with agreed(context.world, "predict"):
        if context.peaks is None:
            raise CallError(
                "Expected a runtime that keeps the peaks of its steps, got one without. zr.open(history='peaks.jsonl')."
            )
    assert context.peaks is not None
    known = _known(context, units)
    with agreed(context.world, "predict"):
        if not known:
            raise CallError(
                f"Expected steps of this model in {context.peaks.history.path}, got none. Take two steps first: the "
                "second one tells what the first one and its update took."
            )
        asked = batch_of(known, batch, where=context.peaks.history.path)
        layout = _layout_under(context, units, plan)
    expect_same(context.world, [asked, repr(plan)], what="what is predicted", error=CallError)
    told = gather_json(context.world, [socket.gethostname(), layout, *_own_room(context)], name="predict")
    alike = [sum(other[0] == one[0] for other in told) for one in told]  # ranks that share a host's memory
    room = min(now + min(left // count, most) for (_, _, now, left, most), count in zip(told, alike, strict=True))
    return prediction(
        known,
        batch=asked,
        plan=str(plan or context.budget or context.plan),
        layout=max(one[1] for one in told),
        room=room,
    )


def _known(context: Context, units: Units) -> list[Peak]:
    """Return what the first rank knows of the model's steps: hosts may have other files. Every rank calls this."""
    assert context.peaks is not None
    own = [asdict(one) for one in context.peaks.known(units)]
    return [Peak(**one) for one in gather_json(context.world, own, name="predict")[0]]


def warn_unless_fits(context: Context, units: Units, *, batch: float) -> None:
    """Warn on rank 0, once, if steps of a batch are predicted not to fit, and say what would. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        units: All units.
        batch: Samples that this rank computes at once.
    """
    assert context.peaks is not None
    most = max(gather_json(context.world, batch, name="batch"))
    if context.peaks.has_warned:
        return
    try:
        seen = predict(context, units, batch=most, plan=None)
    except CallError:  # on every rank: nothing is known yet
        return
    if seen.fits:
        return
    context.peaks.has_warned = True
    cures = [f"micro_steps={2 * context.options.micro_steps}"] if context.options.virtual_shards is None else []
    less = _largest_batch(_known(context, units), seen)
    if less:
        cures.insert(0, f"batches of at most {less} samples at once")
    with contextlib.suppress(CallError, PlanError):  # on every rank: this runtime's options may not go with it
        other = predict(context, units, batch=most, plan=Plan.zero(3, state=Tier.NVME))
        if other.likely < seen.likely:
            cures.append(f"zr.Plan.zero(3, state=zr.Tier.NVME), with {format_bytes(other.likely)}")
    if context.rank == 0:
        warnings.warn(
            f"Expected room for steps of {most:g} samples at once, got {format_bytes(seen.room or 0)} for a rank, of "
            f"which a step is predicted to take {format_bytes(seen.likely)} ({format_bytes(seen.low)} to "
            f"{format_bytes(seen.high)}). What would fit, or take less: {'; '.join(cures) or 'a smaller model'}.",
            RuntimeWarning,
            stacklevel=4,
        )


def _largest_batch(peaks: Sequence[Peak], seen: Prediction) -> int:
    """Return how many samples are predicted to fit; 0 if none is, or if batches make no difference."""
    none, one = (besides(peaks, size)[0] for size in (0.0, 1.0))
    left = (seen.room or 0) - seen.layout - none
    return max(int(left / (one - none)), 0) if one > none else 0


def _layout_under(context: Context, units: Units, plan: Plan | Budget | None) -> int:
    """Return what this rank's arrays would take under another plan; None: what they take.

    Raises:
        CallError: It is no plan.
        PlanError: It leaves a GPU's memory, or does not fit into a budget.
    """
    if plan is None:
        return memory_of(context, units).in_memory
    if not isinstance(plan, (Plan, Budget)):
        raise CallError(f"Expected a plan such as zr.Plan.zero(3), got {plan!r}.")
    sizes = context.run.sizes
    spec = replace(
        sizes.model_spec,
        units={unit.name: unit.tensors for unit in units.values()},
        plan=plan if isinstance(plan, Plan) else Plan.zero(plan.stage),
        frozen={name: _is_frozen(unit) for name, unit in units.items()},
        ties={name: ties for name, unit in units.items() if (ties := _ties_of(unit))},
        rows={name: tables for name, unit in units.items() if (tables := _tables_of(unit))},
        lazy={name: any(section.is_lazy for section in unit.sections) for name, unit in units.items()},
    )
    working = sizes.working
    seen = MemoryForecast.of(
        spec,
        plan,
        offload=working.offload,
        prefetch=working.prefetch,
        buckets=working.buckets,
        one_memory=working.one_memory,
        reach=working.reach,
    )
    if not context.device.in_host_memory and any(one.is_offloaded(working.reach) for one in seen.tiers):
        raise PlanError(
            f"Expected a plan that keeps all in a GPU's memory to predict a step's, got {plan}. What rests elsewhere "
            "is counted by zr.forecast and zerort plan."
        )
    return seen.memory(context.mesh.shard.rank).in_memory


def _is_frozen(unit: Unit) -> Callable[[str], bool]:
    """Return which names of a unit take no gradient."""
    return frozenset(unit.names).difference(unit.trainable).__contains__


def _tables_of(unit: Unit) -> list[str]:
    """Return a unit's tables of which rows are gathered."""
    return [unit.local_name(full) for one in unit.sections if one.table is not None for full in one.names]


def _ties_of(unit: Unit) -> dict[str, tuple[str, str]]:
    """Return which units hold a unit's tied parameters, and their names there."""
    places = {local: unit.place_of(local) for local in unit.names}
    return {local: (home.name, home.local_name(full)) for local, (home, full) in places.items() if home is not unit}


def _own_room(context: Context) -> tuple[int, int, int]:
    """Return what this rank takes, what its host or GPU has left, and what its own limits leave it."""
    if not context.device.in_host_memory:
        free, total = context.device.memory()
        return total - free, free * context.world.size, free  # a GPU of its own
    assert context.peaks is not None
    now, _ = context.peaks.footprint.now_and_most()
    available, limit = available_nbytes(), left_of_limits()
    return now, available, available if limit is None else limit
