"""A runtime under a budget: bytes are those of the forecast, the hottest of all units rests highest, bits agree."""

from __future__ import annotations

import os

import numpy as np
import pytest

import zerort as zr
from zerort.checkpoint import read_manifest
from zerort.comm import open_group
from zerort.config import parse_bytes
from zerort.engine import MemoryReport
from zerort.engine.sizing.forecast import MemoryForecast
from zerort.engine.sizing.requirements import ModelSpec
from zerort.errors import CallError, PlanError, RankFailedError, StorageError
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files.faults import injected
from zerort.testing import run_threads

KIB = 1024
OFFLOAD = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
MODEL = {
    **{f"block{n}": {"w": zr.TensorSpec((96, 90), "bfloat16"), "b": zr.TensorSpec((90,))} for n in range(10)},
    "ids": {"t": zr.TensorSpec((40,), "int64")},
}
OPTIMIZERS = (zr.AdamW(lr=0.1), zr.Lion(lr=0.1), zr.Adafactor(lr=0.1))
PARTS = ("parameter", "gradient", "state", "buckets", "gathered", "nvme")


def budget_of(whole: MemoryReport, share: float) -> zr.Budget:
    """Return a budget of a part of what a model takes in memory."""
    return zr.Plan.fit(host=int(share * (whole.at_rest + whole.buckets)), nvme="1GiB")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.kind)
@pytest.mark.parametrize(("size", "weighted"), [(1, False), (3, True)])
def test_bytes_are_those_of_the_forecast(optimizer, size, weighted, tmp_path):
    weights = [float(rank + 1) for rank in range(size)] if weighted else None
    settings = {"optimizer": optimizer, "shard_weights": weights}
    told = {**settings, "frozen": "t", "size": size, "offload": OFFLOAD}
    whole = zr.forecast(MODEL, plan=zr.Plan.zero(3), rank=size - 1, **told)
    for share in (2.0, 0.9, 0.6, 0.45):
        budget = budget_of(whole, share)
        if share < 1 and isinstance(optimizer, zr.Adafactor):  # which updates whole tensors
            with pytest.raises(PlanError, match=r"^Expected at least .* what stays in memory"):
                zr.forecast(MODEL, plan=budget, **told)
            continue

        def body(group, budget=budget):
            with zr.open(plan=budget, group=group, scratch=tmp_path, offload=OFFLOAD, **settings) as rt:
                rt.expect(MODEL, frozen={"ids": "t"})
                for name, tensors in MODEL.items():
                    unit = rt.register(name, tensors, frozen="t")
                    for local in unit.trainable:
                        unit.add(local, np.ones(tensors[local].shape, tensors[local].dtype))
                    unit.reduce()
                before, _, after = rt.memory(), rt.step(), rt.memory()
                return before, after

        for rank, (before, after) in enumerate(run_threads(size, body)):
            expected = zr.forecast(MODEL, plan=budget, rank=rank, **told)
            for part in PARTS:
                assert getattr(before, part) == getattr(after, part) == getattr(expected, part), (part, rank, share)
            assert after.streaming <= expected.streaming
            held = after.at_rest + after.buckets + after.gathered + after.streaming
            assert held <= budget.memory
            assert (after.nvme > 0) == (share < 1)
    assert os.listdir(tmp_path) == []


def test_the_hottest_of_all_announced_units_rests_highest(tmp_path):
    specs = {name: {"w": zr.TensorSpec((50_000,))} for name in "abcdefgh"}
    with open_group(kind="solo") as group:
        budget = zr.Plan.fit(host=5_000_000, nvme="1GiB")
        for announced in (True, False):
            with zr.open(plan=budget, group=group, scratch=tmp_path, offload=OFFLOAD) as rt:
                if announced:
                    rt.expect(specs)
                tiers = [rt.register(name, one).sections[0].tiers for name, one in specs.items()]
                at_rest = [(one.parameter, one.gradient, one.state) for one in tiers]
                if announced:
                    assert {one[:2] for one in at_rest} == {(zr.Tier.DEVICE, zr.Tier.DEVICE)}
                    assert at_rest[-1][2] is zr.Tier.NVME
                else:  # each takes what is left
                    assert at_rest[0] == (zr.Tier.DEVICE,) * 3
                    assert zr.Tier.NVME in at_rest[-1][:2]


def test_training_under_a_budget_has_the_bits_of_training_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    start = {name: {"w": rng.standard_normal((70, 90)).astype(np.float32)} for name in "abcdefgh"}
    steps = [{name: rng.standard_normal((70, 90)).astype(np.float32) for name in start} for _ in range(5)]

    def body(group, plan):
        with zr.open(plan=plan, group=group, scratch=tmp_path, offload=OFFLOAD, optimizer=zr.AdamW(lr=0.1)) as rt:
            rt.expect(start)
            units = {name: rt.register(name, params) for name, params in start.items()}
            for gradients in steps:
                for name, unit in units.items():
                    unit.reduce({"w": gradients[name]})
                rt.step()
            found = []
            for unit in units.values():
                with unit.gathered() as p:
                    found.append(p["w"].tobytes())
            return found, rt.memory().nvme

    specs = {name: {"w": zr.TensorSpec((70, 90))} for name in start}
    whole = zr.forecast(specs, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), size=2)
    expected = run_threads(2, lambda group: body(group, zr.Plan.zero(3)))
    for share in (0.9, 0.5):
        ranks = run_threads(2, lambda group, share=share: body(group, budget_of(whole, share)))
        for (found, nvme), (bits, _) in zip(ranks, expected, strict=True):
            assert found == bits
            assert nvme > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_what_the_outlook_says(dtype, tmp_path):
    specs = {f"block{n}": {"w": zr.TensorSpec((9_000,), dtype)} for n in range(8)}
    specs["cold"] = {"c": zr.TensorSpec((9_000,), dtype)}
    optimizer = zr.AdamW(lr=0.1)
    plan = zr.Plan.zero(3, parameter=zr.Tier.NVME, gradient=zr.Tier.NVME, state=zr.Tier.NVME)
    model_spec = ModelSpec(units=specs, plan=plan, optimizer=optimizer, size=2, frozen="c")
    memory_forecast = MemoryForecast.of(model_spec, plan, offload=OFFLOAD)

    def body(group):
        with zr.open(plan=plan, group=group, scratch=tmp_path, offload=OFFLOAD, optimizer=optimizer) as rt:
            units = [rt.register(name, tensors, frozen="c") for name, tensors in specs.items()]
            for _ in range(4):
                for unit in (*units, *units[::-1]):  # forward, backward
                    with unit.gathered():
                        pass
                for unit in units[:-1]:
                    unit.reduce({"w": np.ones(9_000, numpy_dtype(dtype))})
                report = rt.step()
            return report.bytes_tiered

    for rank, moved in enumerate(run_threads(2, body)):
        told = memory_forecast.traffic(rank)
        assert moved["nvme write"] == told.written
        assert told.read <= moved["nvme read"] <= told.read + 2 * 9_000 * 4  # what was read ahead, and not used


@pytest.mark.parametrize("offload", [zr.OffloadOptions(), OFFLOAD], ids=["large chunks", "small chunks"])
@pytest.mark.parametrize("nvme", ["1TiB", 0])
@pytest.mark.parametrize("host", ["1MiB", "64MiB", "100MiB"])
def test_what_a_refusal_names_is_enough_and_no_more_than_needed(host, nvme, offload):
    blocks = {f"block{n}": {"w": zr.TensorSpec((4096, 4096), "bfloat16")} for n in range(4)}
    settings = {"optimizer": zr.AdamW(lr=0.1), "size": 2, "offload": offload}
    with pytest.raises(PlanError, match=r"^Expected at least \S+ of memory per rank") as caught:
        zr.forecast(blocks, plan=zr.Plan.fit(host=host, nvme=nvme), **settings)
    named = str(caught.value).split()[3]
    zr.forecast(blocks, plan=zr.Plan.fit(host=named, nvme=nvme), **settings)
    with pytest.raises(PlanError):
        zr.forecast(blocks, plan=zr.Plan.fit(host=int(0.999 * parse_bytes(named)), nvme=nvme), **settings)


def test_the_environment_says_how_values_stream_in_forecasts_too(monkeypatch, tmp_path):
    specs = {name: {"w": zr.TensorSpec((50_000,))} for name in "abcd"}
    settings = {"plan": zr.Plan.fit(host=1_800_000, nvme="1GiB"), "optimizer": zr.AdamW(lr=0.1)}
    monkeypatch.setenv("ZERORT_OFFLOAD_CHUNK_BYTES", "8192")
    monkeypatch.setenv("ZERORT_OFFLOAD_DEPTH", "2")
    with open_group(kind="solo") as group, zr.open(group=group, scratch=tmp_path, **settings) as rt:
        rt.expect(specs)
        for name, tensors in specs.items():
            rt.register(name, tensors).reduce({"w": np.ones(50_000, np.float32)})
        rt.step()
        memory = rt.memory()
    expected = zr.forecast(specs, size=1, **settings)
    assert memory.streaming <= expected.streaming == 2 * 3 * 8192  # gradient and two moments
    assert memory.nvme == expected.nvme > 0


def test_what_does_not_fit_is_refused_on_every_rank_and_leaves_nothing(tmp_path):
    def body(group):
        with zr.open(plan=zr.Plan.fit(host="64KiB", nvme="1GiB"), group=group, scratch=tmp_path) as rt:
            with pytest.raises(PlanError, match=r"^Expected at least .* of memory per rank, whatever is on the disk"):
                rt.expect({"large": {"w": zr.TensorSpec((100_000,))}})
            with pytest.raises(PlanError, match=r"^Expected at least .* of memory per rank, whatever is on the disk"):
                rt.register("large", {"w": zr.TensorSpec((100_000,))})
            assert rt.memory().at_rest == 0
            small = rt.register("small", {"w": np.ones(100, np.float32)})
            small.reduce({"w": np.ones(100, np.float32)})
            return rt.step().updated

    assert run_threads(2, body) == [True, True]
    assert os.listdir(tmp_path) == []


def test_units_may_be_tied_to_what_a_budget_has_decided_about(tmp_path):
    """Nobody announces ties: gradients of tied units rest where others do, and take no more of any memory."""
    blocks = {f"block{n}": {"w": zr.TensorSpec((50_000,))} for n in range(6)}
    specs = {**blocks, "embed": {"table": zr.TensorSpec((50_000,))}}
    model = {**specs, "head": {"b": zr.TensorSpec((10,))}}
    gradient = np.ones(50_000, np.float32)
    settings = {"plan": zr.Plan.fit(host=1_800_000, nvme="1GiB"), "optimizer": zr.AdamW(lr=0.1), "offload": OFFLOAD}

    def body(group):
        with zr.open(group=group, scratch=tmp_path, **settings) as rt:
            rt.expect(model)
            units = {name: rt.register(name, tensors) for name, tensors in specs.items()}
            assert units["embed"].sections[0].tiers.gradient is zr.Tier.NVME
            head = rt.register("head", model["head"], ties={"w": (units["embed"], "table")})
            for _ in range(2):
                head.reduce({"b": np.ones(10, np.float32), "w": gradient})
                for unit in units.values():
                    unit.reduce(dict.fromkeys(unit.trainable, gradient))
                assert rt.step().updated
            return rt.memory()

    for rank, memory in enumerate(run_threads(2, body)):
        for ties in ({}, {"head": {"w": ("embed", "table")}}):
            expected = zr.forecast(model, ties=ties, size=2, rank=rank, **settings)
            for part in (*PARTS, "buckets", "nvme"):
                assert getattr(memory, part) == getattr(expected, part), part


def test_ranks_and_units_keep_to_what_was_said(tmp_path):
    def body(group):
        with pytest.raises(PlanError, match="Expected the runtime's plan, optimizer and options"):
            zr.open(plan=zr.Plan.fit(host=10_000_000 + group.rank), group=group)
        with zr.open(plan=zr.Plan.fit(host="10MiB"), group=group, scratch=tmp_path) as rt:
            with pytest.raises(CallError, match="Expected what is announced"):
                rt.expect({"a": {"w": zr.TensorSpec((10 + group.rank,))}})
            with pytest.raises(CallError, match="as a mapping from names to arrays"):
                rt.expect({"a": 3 if group.rank else {"w": zr.TensorSpec((10,))}})
            with pytest.raises(CallError, match="Expected what is announced"):
                rt.expect({"a": {"w": zr.TensorSpec((10,))}}, frozen=lambda name: group.rank == 0)
            with pytest.raises(RankFailedError if group.rank == 0 else ZeroDivisionError, match="by zero"):
                rt.expect({"a": {"w": zr.TensorSpec((10,))}}, frozen=lambda name: bool(1 // (1 - group.rank)))
            with pytest.raises(CallError, match=r"^Expected units as a mapping from names to their tensors, got list"):
                rt.expect([("a", {"w": zr.TensorSpec((10,))})])
            rt.expect({"a": {"w": zr.TensorSpec((10,))}})
            for params, frozen in (({"w": zr.TensorSpec((11,))}, False), ({"w": zr.TensorSpec((10,))}, True)):
                with pytest.raises(CallError, match=r"^Expected unit 'a' as it was announced, got other tensors"):
                    rt.register("a", params, frozen=frozen)
            rt.register("a", {"w": zr.TensorSpec((10,))})
        with pytest.raises(CallError, match=r"^Expected plan to be a Plan such as zr\.Plan\.zero\(3\), or a budget"):
            zr.open(plan="zero3", group=group)

    run_threads(2, body)


def test_a_unit_that_could_not_be_made_takes_nothing_of_the_budget(tmp_path):
    spec = {"w": zr.TensorSpec((50_000,))}
    settings = {"plan": zr.Plan.fit(host=1_000_000, nvme=450_000), "offload": OFFLOAD, "scratch": tmp_path}
    with open_group(kind="solo") as group, zr.open(group=group, **settings) as rt:
        with injected("enospc@1:op=reserve"), pytest.raises(StorageError, match="No space left"):
            rt.register("a", spec)
        assert rt.register("b", spec).sections[0].tiers.state is zr.Tier.NVME


def test_one_array_under_two_names_is_announced_as_it_is_registered():
    shared, own = np.ones(100, np.float32), np.ones(10, np.float32)
    with open_group(kind="solo") as group, zr.open(plan=zr.Plan.fit(host="1MiB"), group=group) as rt:
        rt.expect({"u": {"a": shared, "b": shared, "c": own}})
        assert rt.register("u", {"a": shared, "b": shared, "c": own}).names == ("a", "b", "c")
        rt.expect({"v": {"a": zr.TensorSpec((100,))}})
        rt.register("v", {"a": shared, "b": shared})


def test_a_runtime_and_its_checkpoints_say_what_the_budget_is(tmp_path):
    with open_group(kind="solo") as group, zr.open(plan=zr.Plan.fit(host="1MiB"), group=group) as rt:
        rt.register("a", {"w": np.ones(10, np.float32)})
        rt.save(tmp_path / "checkpoint")
        assert "ZeRO-3 within device 0B, host 1MiB, nvme 0B per rank" in repr(rt)
    assert read_manifest(tmp_path / "checkpoint").meta["plan"] == str(zr.Plan.fit(host="1MiB"))


def test_without_a_budget_an_announcement_changes_nothing():
    with open_group(kind="solo") as group, zr.open(group=group) as rt:
        rt.expect({"a": {"w": zr.TensorSpec((10,))}})
        assert rt.register("a", {"w": zr.TensorSpec((11,))}).sections[0].tiers.state is zr.Tier.DEVICE
        with pytest.raises(CallError, match="as a mapping from names to arrays"):
            rt.expect({"b": 3})
