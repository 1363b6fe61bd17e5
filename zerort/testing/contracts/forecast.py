"""`ForecastContract`: `zr.forecast` tells the bytes that a runtime then counts: plan × tier × accumulate × ties.

    class TestHere(ForecastContract):
        device = "host"

Subclasses provide the fixtures ``group`` and ``scratch``, a directory that all ranks see. Every rank runs it at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from zerort.comm import Group
from zerort.config import ZERO, Plan, Tier, Wire
from zerort.config.offload import OffloadOptions
from zerort.engine.mesh import mesh
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.opening import open
from zerort.engine.options import Accumulate
from zerort.engine.report import MemoryReport
from zerort.engine.runtime import Runtime
from zerort.engine.sizing.forecast import forecast
from zerort.engine.sizing.requirements import Ties
from zerort.errors import PlanError
from zerort.layout import Placement
from zerort.optim import AdamW, ParameterGroup

__all__ = ["ForecastContract"]

_MODEL = {
    "embed": {"table": TensorSpec((90, 70), "bfloat16")},
    "block": {"w": TensorSpec((130, 40)), "b": TensorSpec((41,)), "base": TensorSpec((61, 41))},
    "head": {"w": TensorSpec((33, 65), "bfloat16"), "scale": TensorSpec((), "float32"), "base": TensorSpec((9, 9))},
}
_GROUPS = (ParameterGroup("embed.*", master="remainder", moments="int8"), ParameterGroup("block.*", moments="int8"))
_FROZEN = {"block": "base", "head": "base"}
_TIES = {"head": {"out": ("embed", "table")}, "tail": {"a": ("head", "out"), "b": ("block", "w")}}
_COUNTED = ("parameter", "gradient", "state", "buckets", "gathered", "host_copy", "streaming", "nvme")


def _plans(stage: int) -> Iterator[Plan]:
    """Yield every legal plan of a ZeRO stage."""
    for parameter, gradient, state in itertools.product(Tier, Tier, Tier):
        with contextlib.suppress(PlanError):
            yield Plan.zero(stage, parameter=parameter, gradient=gradient, state=state)


@dataclass(frozen=True)
class _Way:
    """A way to accumulate, with ties or without."""

    is_tied: bool
    micro_steps: int = 1
    accumulate: Accumulate | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ties(self) -> Ties:
        return _TIES if self.is_tied else {}


_WAYS = (
    _Way(is_tied=False),
    _Way(is_tied=True),
    _Way(is_tied=True, micro_steps=2, accumulate="sharded"),
    _Way(is_tied=True, micro_steps=2, accumulate="local"),
    _Way(is_tied=True, options={"buckets": 1, "prefetch": 0}),
)


def _ways(stage: int) -> Iterator[tuple[Plan, _Way]]:
    """Yield every plan with one of the ways in turn; those of ZeRO-3 that differ in the gradient alone with each."""
    turns = itertools.cycle(_WAYS)  # 5 of them, and tiers change every 3 or 9 plans
    for plan in _plans(stage):
        is_plain = plan.parameter.tier is plan.state.tier is Tier.DEVICE
        for way in _WAYS if is_plain and stage == 3 else (next(turns),):
            if way.accumulate == "sharded" and plan.gradient.placement is not Placement.SHARDED:
                yield plan, replace(way, accumulate=None)
            elif way.accumulate == "local" and plan.gradient.tier is not Tier.DEVICE:
                yield plan, replace(way, accumulate=None)  # whole gradients are summed where computing happens
            else:
                yield plan, way


def _train(rt: Runtime, way: _Way) -> None:
    """Register the model and take a step, so that all that a step needs was made."""
    for name, tensors in {**_MODEL, **{name: {} for name in way.ties if name not in _MODEL}}.items():
        ties = {local: (rt.units[unit], other) for local, (unit, other) in way.ties.get(name, {}).items()}
        rt.register(name, tensors, frozen=_FROZEN.get(name, False), ties=ties)
    for unit in [*reversed(rt.units.values())] * rt.micro_steps:
        with unit.gathered() as values:
            shapes = {name: (values[name].shape, values[name].dtype) for name in unit.trainable}
        unit.reduce({name: rt.device.zeros(math.prod(s), d).reshape(s) for name, (s, d) in shapes.items()})
    rt.step()


class ForecastContract:
    """What a forecast holds. Subclasses provide the fixtures ``group`` and ``scratch``, and say the device."""

    device: Literal["host", "cuda"] = "host"
    ways = _WAYS
    offload = OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements

    @pytest.mark.parametrize("stage", ZERO)
    def test_a_runtime_counts_what_was_told(self, group: Group, scratch: Path, stage: int) -> None:
        """At rest, in buckets, gathered, on its way and on a disk: to the byte, on this rank."""
        at_rest: dict[str, int] = {}
        for plan, way in _ways(stage):
            is_whole = plan.gradient.placement is not Placement.SHARDED
            if self.device == "cuda" and is_whole and plan.gradient.tier is Tier.HOST:
                continue  # refused: whole gradients are summed on the GPU
            counted = self.expect_as_told(group, scratch, plan, way=way)
            if way.accumulate != "local" and not is_whole:
                expected = at_rest.setdefault(str(plan), counted.gradient + counted.nvme)
                assert counted.gradient + counted.nvme == expected, (str(plan), way)

    @pytest.mark.parametrize("accumulate", ["local", "sharded"])
    def test_a_fixed_tree_is_counted(self, group: Group, scratch: Path, accumulate: Accumulate) -> None:
        """Its whole gradients, or its shards, wherever they rest, and the slices that arrive; with ties and without."""
        ways = [replace(way, accumulate=accumulate, options={"virtual_shards": 5}) for way in _WAYS[:2]]
        plans = [Plan.zero(3)]
        if accumulate == "sharded":
            plans += [Plan.zero(2, gradient=Tier.HOST), Plan.zero(3, gradient=Tier.NVME, state=Tier.NVME)]
        for plan, way in itertools.product(plans, ways):
            self.expect_as_told(group, scratch, plan, way=way)
        if group.size % 2 == 0:
            for plan in (Plan.zero(2), *plans[1:]):
                self.expect_as_told(group, scratch, plan, way=ways[1], copies=2)

    def test_copies_are_counted(self, group: Group, scratch: Path) -> None:
        """Sums over copies of the model take no memory of their own, wherever gradients rest."""
        if group.size % 2:
            pytest.skip("two copies need an even number of ranks")
        for tier, way in itertools.product(Tier, _WAYS[1:3]):
            self.expect_as_told(group, scratch, Plan.zero(3, gradient=tier), way=way, copies=2)

    def expect_as_told(
        self,
        group: Group,
        scratch: Path,
        plan: Plan,
        *,
        way: _Way = _WAYS[0],
        wire: Wire | None = None,
        copies: int = 1,
        frozen_format: Literal["int8", "int4"] | None = None,
        param_groups: tuple[ParameterGroup, ...] = _GROUPS,
    ) -> MemoryReport:
        """Compare what a runtime counts with what is told before it is opened, and return that."""
        optimizer, ranks = AdamW(lr=0.1), mesh(replicate=copies, group=group)
        settings: dict[str, Any] = {
            "param_groups": param_groups,
            "wire": wire,
            "frozen_format": frozen_format,
            "offload": self.offload,
            "micro_steps": way.micro_steps,
            "accumulate": way.accumulate,
            **way.options,
        }
        with open(plan, optimizer, mesh=ranks, scratch=scratch, **settings) as rt:
            _train(rt, way)
            counted, shard = rt.memory(), rt.context.mesh.shard
            told = forecast(
                _MODEL,
                plan=plan,
                optimizer=optimizer,
                size=shard.size,
                rank=shard.rank,
                replicate=copies,
                frozen=_FROZEN,
                ties=way.ties,
                one_memory=shard.one_host,
                hosts=shard.hosts,
                device=self.device,
                **settings,
            )
        for part in _COUNTED:
            assert getattr(counted, part) == getattr(told, part), (str(plan), way, part)
        return counted
