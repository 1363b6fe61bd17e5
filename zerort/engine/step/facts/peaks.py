"""`Peaks`: how much memory steps take, kept in a `MemoryHistory`; only in a runtime that was opened with ``history=``.

    agreement k−1          update            forward and backward           agreement k
                           └──────── the most memory of this process, or of this GPU ───┘

The agreement carries four numbers more, whose maximum over the ranks is kept: no message of its own. What is told of a
step at its agreement includes the update of the step before; the first one of a run has none, and is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from zerort.device.host.footprint import Footprint
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.sizing.history import MemoryHistory, Peak, model_key
from zerort.engine.step.facts.record import Record
from zerort.errors import StorageError
from zerort.typing import Device

__all__ = ["Peaks"]


class _HasTensors(Protocol):
    """A unit, as far as it matters here."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...


class Peaks:
    """The memory of this rank's steps.

    Args:
        path: The file of the history.
        device: Whose memory counts.
        rank: This rank: the first one writes.

    Raises:
        CallError: The file is there, and no history.
    """

    def __init__(self, path: str, *, device: Device, rank: int) -> None:
        self.history = MemoryHistory(path)
        self.footprint = Footprint()
        self.has_warned = False
        """Whether it was said that a step will not fit."""
        self._device, self._writes = device, rank == 0
        self._has_updated = False
        self._key: tuple[int, str] = (0, "")  # of so many units
        self._at_first, _ = self._now_and_most()  # without a model, and without activations

    @property
    def memory(self) -> str:
        """Which memory counts."""
        return "host" if self._device.in_host_memory else "gpu"

    def known(self, units: Mapping[str, _HasTensors]) -> list[Peak]:
        """Return what is known of steps of a model."""
        if self._key[0] != len(units):
            self._key = len(units), model_key({name: unit.tensors for name, unit in units.items()})
        return self.history.of(self._key[1], memory=self.memory)

    def add(self, record: Record, *, layout: int, batch: float) -> None:
        """Add what this rank took since the last agreement to what all ranks exchange.

        Args:
            record: What they exchange.
            layout: Bytes of this rank's arrays.
            batch: Its samples of a micro-step; 0: not known.
        """
        now, most = self._now_and_most()
        idle = min(now - layout, self._at_first)  # allocators keep what was freed: now may be the most
        self.footprint.restart()
        record.add("peak", np.array([most - layout, idle], np.int64), "max")
        record.add("peak of", np.array([batch, layout], np.float64), "max")

    def _now_and_most(self) -> tuple[int, int]:
        """Return the bytes that this rank takes, and took at most since the last agreement."""
        if self._device.in_host_memory:
            return self.footprint.now_and_most()
        free, total = self._device.memory()
        return total - free, total - free  # with what pools keep: the most there was

    def hear(self, heard: dict[str, Any], units: Mapping[str, _HasTensors], *, plan: str, ranks: int) -> None:
        """Keep what a step took."""
        if not self._has_updated:
            self._has_updated = True
            return
        self.known(units)
        batch, layout = heard["peak of"]
        peak = Peak(
            model=self._key[1],
            memory=self.memory,
            plan=plan,
            ranks=ranks,
            batch=float(batch),
            layout=int(layout),
            besides=int(heard["peak"][0]),
            idle=int(heard["peak"][1]),
        )
        try:
            self.history.add(peak, write=self._writes)
        except StorageError as error:  # no reason to stop a run for
            self._writes = False
            text = f"{error} The run goes on, and remembers its memory to its end."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
