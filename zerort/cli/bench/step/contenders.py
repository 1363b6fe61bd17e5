"""What ``bench step`` runs: a byte model's training step under a plan, and the same computing without the runtime.

    contender      computes    gathers, packs, reduces, updates
    zero0 … zero3  yes         as the plan says
    floor          yes         no: plain arrays, gradients are dropped

Both use the same `TimedModel`, whose clock runs while it computes: what is left of a step is *exposed*.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from zerort import trace
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array
from zerort.workload.byte_model import ByteModel, Grads, Params, Saved
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

__all__ = ["PARTS", "Contender", "FloorSteps", "PlanSteps", "Sample", "TimedModel", "time_block"]

# The spans of the main thread that are no computing: what a part is called, and how the names of its spans begin.
PARTS: Final[Mapping[str, str]] = {
    "pack": "pack ",
    "fire": "reduce ",
    "wait gather": "wait for gather",
    "wait reduce": "wait for reduce",
    "wait step": "wait for step",
    "norm": "measure",
    "update": "update",
}
"""Parts of the exposed time, and how the names of their spans begin; what is left of it is the rest."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank's time in a row of steps: seconds per step."""

    step: float
    """From a meeting of all ranks to the next."""
    compute: float
    """In the model, on the main thread."""
    cpu: float
    """CPU time of all threads of the rank."""
    runtime_cpu: float
    """The same without computing."""
    parts: Mapping[str, float]
    """What `PARTS` names, on the main thread."""

    @property
    def exposed(self) -> float:
        """The main thread was not computing."""
        return self.step - self.compute


class TimedModel(ByteModel):
    """A byte model that counts the time it computes."""

    computed_ns = 0
    """So far."""
    computed_cpu_ns = 0
    """So far, of CPU time."""

    def forward(self, unit: str, p: Params, x: Array) -> tuple[Array, Saved]:
        """Run one unit."""
        with self._computing():
            return super().forward(unit, p, x)

    def loss(self, logits: Array, targets: Array, *, weight: float = 1.0) -> tuple[float, Array]:
        """Return the loss and its slope."""
        with self._computing():
            return super().loss(logits, targets, weight=weight)

    def backward(self, unit: str, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]:
        """Run one unit backwards."""
        with self._computing():
            return super().backward(unit, p, saved, dy)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        cpu_ns, began_ns = time.thread_time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            self.computed_ns += time.perf_counter_ns() - began_ns
            self.computed_cpu_ns += time.thread_time_ns() - cpu_ns


class Contender(Protocol):
    """Something whose steps are timed."""

    def run(self, steps: int) -> None:
        """Do so many steps."""


class PlanSteps:
    """The walk under one plan.

    Args:
        walk: The model, registered with a runtime.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.loss = 0.0
        """Of the last step, over all ranks."""

    def run(self, steps: int) -> None:
        """Train."""
        self.loss = self._walk.train(steps)[-1]

    @property
    def at_rest_nbytes(self) -> int:
        """Bytes that this rank holds at rest."""
        return self._walk.rt.memory().at_rest

    @property
    def moved_nbytes(self) -> int:
        """Bytes of the arrays that went through collectives in the last step."""
        return sum(self._walk.reports[-1].bytes_moved.values())


class FloorSteps:
    """The same rows through the same model, every rank for itself.

    Args:
        model: What computes.
        text: Its batches.
        dtype: Of the parameters.
        shards: This rank's micro-batches.
        of: How many micro-batches all ranks have.
    """

    def __init__(self, model: ByteModel, text: ByteText, *, dtype: str, shards: range, of: int) -> None:
        kind = numpy_dtype(dtype)
        self._model, self._text, self._shards, self._of = model, text, shards, of
        self._params = {
            name: {local: value.astype(kind) for local, value in model.init(name).items()} for name in model.units
        }
        self._position = 0

    def run(self, steps: int) -> None:
        """Compute losses and gradients."""
        for _ in range(steps):
            for shard in self._shards:
                self._compute(shard)
            self._position += 1

    def _compute(self, shard: int) -> None:
        x, y = self._text.batch(self._position, shard, of=self._of)
        saved = {}
        for name, params in self._params.items():
            x, saved[name] = self._model.forward(name, params, x)
        _, slope = self._model.loss(x, y)
        for name, params in reversed(self._params.items()):
            slope, _ = self._model.backward(name, params, saved[name], slope)


def time_block(contender: Contender, model: TimedModel, *, steps: int, meet: Callable[[], object], name: str) -> Sample:
    """Time a row of steps on this rank. Every rank calls this.

    Args:
        contender: What runs.
        model: What it computes with.
        steps: In a row.
        meet: Waits until every rank is here, and whatever they sent each other has arrived.
        name: What to call it in a trace.
    """
    meet()
    computed_ns, computed_cpu_ns = model.computed_ns, model.computed_cpu_ns
    cpu_ns, began_ns = time.process_time_ns(), time.perf_counter_ns()
    with trace.span(name, steps=steps):
        contender.run(steps)
        meet()
    ended_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns() - cpu_ns
    per_step = 1e-9 / steps
    return Sample(
        step=(ended_ns - began_ns) * per_step,
        compute=(model.computed_ns - computed_ns) * per_step,
        cpu=cpu_ns * per_step,
        runtime_cpu=(cpu_ns - (model.computed_cpu_ns - computed_cpu_ns)) * per_step,
        parts={part: ns * per_step for part, ns in _parts_since(began_ns).items()},
    )


def _parts_since(began_ns: int) -> dict[str, int]:
    """Return the nanoseconds of each part since then, from the spans of the main thread."""
    found: Counter[str] = Counter()
    for span in reversed(trace.spans()):  # in the order in which they ended
        if span.end_ns < began_ns:
            break
        if span.track == "main":
            for part, beginning in PARTS.items():
                if span.name.startswith(beginning):
                    found[part] += span.end_ns - span.begin_ns
    return {part: found[part] for part in PARTS}
