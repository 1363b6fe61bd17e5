"""`TiesContract`: gradients of tied parameters are summed where the plan keeps its shards, in whatever order they come.

    class TestHere(TiesContract):
        pass

Subclasses provide the fixtures ``group`` and ``scratch``, a directory that all ranks see. Every rank runs it at once.
The table is tied to two units, through a chain; it lies between tensors of its unit, so that ranks and chunks cut it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from zerort.comm import Group
from zerort.config import Plan, Tier
from zerort.config.offload import OffloadOptions
from zerort.engine.model.unit import Unit
from zerort.engine.opening import open
from zerort.engine.runtime import Runtime
from zerort.layout.flat import ALIGNMENT
from zerort.optim import SGD
from zerort.typing import Array

__all__ = ["TIED_UNITS", "TiesContract", "register_tied", "tied_gradients", "tied_totals"]

_OWN: Final = {"before": (700,), "table": (130, 70), "after": (41, 33)}
_SHAPES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "embed": _OWN,
    "block": {"w": (50,), "again": _OWN["table"]},
    "head": {"b": (5,), "out": _OWN["table"], "after": _OWN["after"]},
}
_TIED: Final = {"again": "table", "out": "table", "after": "after"}  # names of block and head, and what they are
TIED_UNITS: Final = tuple(_SHAPES)
"""The names of the units."""


def register_tied(rt: Runtime) -> dict[str, Unit]:
    """Register the units: zeros."""
    embed = rt.register("embed", {name: np.zeros(shape, np.float32) for name, shape in _OWN.items()})
    block = rt.register("block", {"w": np.zeros(50, np.float32)}, ties={"again": (embed, "table")})
    ties = {"out": (block, "again"), "after": (embed, "after")}
    return {"embed": embed, "block": block, "head": rt.register("head", {"b": np.zeros(5, np.float32)}, ties=ties)}


def tied_gradients(unit: str, rank: int, micro_step: int) -> dict[str, Array]:
    """Return a unit's gradients: whole numbers, whose sums are the same in any order."""
    rng = np.random.default_rng([TIED_UNITS.index(unit), rank, micro_step])
    return {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in _SHAPES[unit].items()}


def tied_totals(size: int, micro_steps: int) -> dict[tuple[str, str], Array]:
    """Return the sums of all gradients, by unit and name of the tensor."""
    found: dict[tuple[str, str], Array] = {}
    for unit, rank, at in itertools.product(TIED_UNITS, range(size), range(micro_steps)):
        for name, value in tied_gradients(unit, rank, at).items():
            key = ("embed", _TIED[name]) if unit != "embed" and name in _TIED else (unit, name)
            found[key] = found.get(key, 0) + value
    return found


class TiesContract:
    """What holds for tied parameters. Subclasses provide the fixtures ``group`` and ``scratch``."""

    orders = tuple(itertools.permutations(TIED_UNITS))
    """In which units are reduced, one in each step."""

    @pytest.mark.parametrize("micro_steps", [1, 2])
    @pytest.mark.parametrize(
        ("stage", "gradient"), [(2, Tier.DEVICE), (3, Tier.DEVICE), (3, Tier.HOST), (3, Tier.NVME)]
    )
    def test_gradients_of_tied_units_are_added_where_they_rest(
        self, group: Group, scratch: Path, stage: int, gradient: Tier, micro_steps: int
    ) -> None:
        """To the bit, in any order of units and micro-steps; only the ranges of tied tensors travel again."""
        with open(
            Plan.zero(stage, gradient=gradient),
            SGD(lr=1.0),
            group=group,
            scratch=scratch,
            micro_steps=micro_steps,
            reduction="sum",
            offload=OffloadOptions(chunk_nbytes=8192, threads=1),  # chunks of 2048 elements
        ) as rt:
            units, totals = register_tied(rt), tied_totals(group.size, micro_steps)
            for step, order in enumerate(self.orders, 1):
                turns = [(name, at) for at in range(micro_steps) for name in order]
                if step % 2:  # one unit is through with all micro-steps before the others begin
                    turns.sort(key=lambda turn: turn[0])
                for name, at in turns:
                    units[name].reduce(_on_device(rt, tied_gradients(name, group.rank, at)))
                report = rt.step()
                assert report.without_gradient == ()
                squares = sum(float((total.astype(float) ** 2).sum()) for total in totals.values())
                np.testing.assert_allclose(report.grad_norm, math.sqrt(squares), rtol=1e-6)  # squares of float32
                assert report.bytes_moved.get("reduce_scatter", 0) == (group.size > 1) * micro_steps * _moved(units)
                for (unit, name), total in totals.items():
                    with units[unit].gathered() as values:
                        np.testing.assert_array_equal(rt.device.fetch(values[name]), -step * total)


def _on_device(rt: Runtime, gradients: Mapping[str, Array]) -> dict[str, Any]:
    found = {}
    for name, gradient in gradients.items():
        found[name] = rt.device.empty(gradient.size, gradient.dtype).reshape(gradient.shape)
        rt.device.put(gradient.reshape(-1), out=found[name].reshape(-1))
    return found


def _moved(units: Mapping[str, Unit]) -> int:
    """Return the bytes of one micro-step's reductions: each unit's own tensors, and the tied ones' ranges."""
    tied = [math.prod(_SHAPES[unit][name]) for unit in ("block", "head") for name in _TIED if name in _SHAPES[unit]]
    own = [section.layout.end for unit in units.values() for section in unit.sections]
    return 4 * (sum(own) + sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in tied))
