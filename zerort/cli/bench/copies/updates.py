"""Streamed AdamW, for ``zerort bench copies``: parameters and gradients on the GPU, moments in host memory.

    streamed on the device      moments come in, are updated there, and go out again
    streamed on the host        gradients and parameters come out, the host updates, parameters go in again
    copies alone                the same without computing
    compute alone               all of it on one side already

All are timed in turn, and both ways must give the same bits. The faster of the two ways is what
``OffloadOptions(update_on=…)`` should name on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort.cli.bench.timing import time_interleaved
from zerort.cli.screen import Screen, new_table
from zerort.optim.kernels import kernels_for
from zerort.streaming import ArrayTransfer, Staging, cut_evenly, slot_nbytes_of
from zerort.streaming.transfers import Place

if TYPE_CHECKING:
    from zerort.device.cuda.device import CudaDevice
    from zerort.device.cuda.pinned import PinnedMemory

__all__ = ["UpdateRow", "host_nbytes", "run_updates"]

_DEPTH = 3
_CHUNK = 2 * 1024**2
"""Elements of a chunk."""
_SLACK = 64 * 1024
_PLACES: tuple[Place, ...] = ("device", "host")


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One way of making one step of AdamW."""

    way: str
    numel: int
    time_ms: float
    """Milliseconds, median."""
    wrong: int
    """Elements that differ from those of the host's own step."""


def host_nbytes(numel: int) -> int:
    """Return the host memory that a measurement over ``numel`` parameters takes: moments, and slots."""
    return 2 * 4 * numel + _DEPTH * 2 * 4 * min(numel, _CHUNK) + _SLACK


def run_updates(
    device: CudaDevice, pinned: PinnedMemory, numel: int, *, seconds: float, screen: Screen
) -> list[UpdateRow]:
    """Measure a step over ``numel`` parameters every way, print a table, and return the rows."""
    step = _Step(device, pinned, numel)
    works: dict[str, Callable[[], object]] = {}
    for on in _PLACES:
        works[f"streamed on the {on}"] = partial(step.stream, _adamw, on)
        works[f"copies alone, on the {on}"] = partial(step.stream, _nothing, on)
        works[f"compute alone, on the {on}"] = partial(step.compute, on)
    wrong = {f"streamed on the {on}": step.check(on) for on in _PLACES}
    timings = time_interleaved(works, seconds=seconds)
    rows = [UpdateRow(way, numel, timing.median * 1e3, wrong.get(way, 0)) for way, timing in timings.items()]
    table = new_table("updates")
    for name in ("way\n", "parameters\n", "time\nms", "#wrong\n"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.way, str(row.numel), f"{row.time_ms:.3f}", str(row.wrong))
    screen.print(table)
    faster = min(_PLACES, key=lambda on: timings[f"streamed on the {on}"].median)
    screen.print(f"# faster here: zr.OffloadOptions(update_on={faster!r}); the default is 'device'")
    step.close()
    return rows


class _Step:
    """The arrays of a step, and the ways to make it."""

    def __init__(self, device: CudaDevice, pinned: PinnedMemory, numel: int) -> None:
        self._device = device
        lot = np.random.default_rng(1)
        self._param, self._grad = (lot.standard_normal(numel, np.float32) for _ in range(2))
        self._there = [device.empty(numel, "float32") for _ in range(4)]
        self.moments = [pinned.empty(numel, "float32") for _ in range(2)]
        transfers = [
            ArrayTransfer(self._there[0]),
            ArrayTransfer(self._there[1], write=False),
            *map(ArrayTransfer, self.moments),
        ]
        self.chunks = [
            [ArrayTransfer(one.array[first:end], read=one.read, write=one.write) for one in transfers]
            for first, end in cut_evenly(numel, most=_CHUNK)
        ]
        slot = max(slot_nbytes_of(self.chunks, on=on) for on in _PLACES)
        self._staging = Staging(
            device, slot_nbytes=slot, depth=_DEPTH, pinned=pinned.empty(_DEPTH * (slot + 256), "uint8", alignment=4096)
        )
        self._here = [self._param.copy(), self._grad, np.zeros_like(self._param), np.zeros_like(self._param)]
        self._begin()

    def _begin(self) -> None:
        for array, values in zip(self._there, (self._param, self._grad), strict=False):
            array.set(values)
        for array in (*self.moments, *self._there[2:]):
            array.fill(0)

    def stream(self, compute: Callable[..., object], on: Place) -> None:
        """Make a step through the staging, and wait until all is where it rests."""
        self._staging.run(self.chunks, compute, on=on).wait()

    def compute(self, on: Place) -> None:
        """Make a step where all arrays are on one side already."""
        if on == "device":
            self._device.named_stream("compute").submit(lambda: _adamw(0, *self._there)).wait()
        else:
            _adamw(0, *self._here)

    def check(self, on: Place) -> int:
        """Make a first step and count what differs from the host's."""
        self._begin()
        expected = [self._param.copy(), np.zeros_like(self._param), np.zeros_like(self._param)]
        _adamw(0, expected[0], self._grad, *expected[1:])
        self.stream(_adamw, on)
        found = [self._there[0].get(), *self.moments]
        return sum(int(np.count_nonzero(one != other)) for one, other in zip(found, expected, strict=True))

    def close(self) -> None:
        self._staging.close()


def _adamw(number: int, param: Any, grad: Any, first: Any, second: Any) -> None:
    kernels_for(param).adamw_(
        param, grad, first, second, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01, step=1
    )


def _nothing(number: int, *arrays: Any) -> None:
    return None
