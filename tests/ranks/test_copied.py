"""Whole parameters that stay on each host: what deltas are applied to, and what backward finds. The same bits."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort import trace
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, PlanError
from zerort.native.dtypes import numpy_dtype
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

PLAIN, SECONDARY = zr.Plan.zero(3), zr.Plan.zero(3, secondary="host")
DELTA, INT8 = (zr.Wire(gather=form, over="all") for form in ("delta", "int8"))
MODEL = ByteModel(width=16, layers=1, context=8, heads=2)
TEXT = ByteText(rows=48, context=8, limit=20_000)
SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none
BFLOAT16 = numpy_dtype("bfloat16")


@pytest.fixture(scope="module", params=["node", pytest.param("mpi", id="over-mpi"), "hierarchical"])
def group(request, options):
    if WORLD.size > 3 and request.param != "hierarchical":
        pytest.skip("1 to 3 ranks; more of them on two hosts")
    if request.param == "hierarchical":
        machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        made = Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))
    else:
        made = open_group(kind=request.param, options=options)
    with made as group:
        yield group


def values_of(seed=1, dtype=BFLOAT16):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def bits(unit):
    """Return the gathered tensors' bits, to compare NaN and -0.0, too."""
    with unit.gathered() as found:
        return {name: np.array(found[name]).tobytes() for name in unit.names}


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_step_has_the_digest_of_the_plain_run(group, dtype):
    def run(wire):
        options = {"virtual_shards": 8, "clip_norm": 0.8, "wire": wire, "group": group}
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=1e-2), **options) as rt:
            walk = Walk(rt, MODEL, TEXT, dtype=dtype)
            losses = walk.train(4)
            return losses, [report.digest for report in walk.reports], walk.reports[-1].wire

    losses, digests, said = run(None)
    assert said == ""
    assert run(DELTA) == (losses, digests, "gather delta (lossless)")
    assert len(set(digests)) == 4


def story(group, path, wire, *, plan=PLAIN, replicate=1, dtype=BFLOAT16):
    """Change parameters in all ways that there are; yield the gathered bits after each."""
    ranks = zr.mesh(replicate=replicate, group=group)
    with zr.open(plan, zr.AdamW(lr=1e-2), mesh=ranks, wire=wire, nonfinite="skip", prefetch=1) as rt:
        units = [rt.register(f"block{at}", values_of(at, dtype)) for at in range(3)]
        frozen = rt.register("table", {"base": values_of(7, dtype)["w"], "order": np.arange(9)}, frozen=True)

        def step(seed, *, bad=False):
            for at, unit in enumerate(units):
                gradients = values_of(100 * seed + 10 * at + rt.rank, dtype)
                if bad and rt.rank == rt.size - 1 and at == 1:
                    gradients["long"][5] = np.nan
                unit.reduce(gradients)
            return rt.step()

        def everything():
            return [bits(unit) for unit in (*units, frozen)]

        yield everything()
        step(1)
        step(2)  # with no gather between: what was told of the first is out of date
        yield everything()
        odd = values_of(50, dtype)
        odd["w"][0, :3] = np.nan, -0.0, np.inf
        units[0].assign(odd)
        yield everything()
        step(3)
        units[1].assign({"b": values_of(51, dtype)["b"]})  # what was told of the step is out of date
        frozen.assign({"base": values_of(52, dtype)["w"]})
        yield everything()
        assert not step(4, bad=True).updated
        yield everything()
        rt.save(path)
        step(5)
        yield everything()
        rt.load(path)
        yield everything()
        rt.rebalance(
            shard_weights=[(rank * 2 + 1) % 3 for rank in range(rt.context.mesh.shard.size)]
        )  # 1 0 2 1 …: some none
        yield everything()
        step(6)
        yield everything()
        rt.rebalance(shard_weights=None)
        step(7)
        yield everything()


@pytest.mark.parametrize(
    ("plan", "wire", "without", "dtype", "replicate"),
    [
        (PLAIN, DELTA, None, BFLOAT16, 1),
        (PLAIN, DELTA, None, BFLOAT16, 2),
        (SECONDARY, None, None, np.float32, 1),
        (SECONDARY, None, None, np.float32, 2),
        (SECONDARY, INT8, INT8, np.float32, 1),
        (SECONDARY, DELTA, None, BFLOAT16, 1),
    ],
    ids=["delta", "delta-copies", "secondary", "secondary-copies", "secondary-int8", "secondary-delta"],
)
def test_assigned_loaded_skipped_and_cut_anew_it_is_what_ranges_are(group, plan, wire, without, dtype, replicate):
    if group.size % replicate:
        pytest.skip("copies of one size")
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        plain = list(story(group, path / "plain", without, replicate=replicate, dtype=dtype))
        found = list(story(group, path / "kept", wire, plan=plan, replicate=replicate, dtype=dtype))
        WORLD.Barrier()
    for at, (expected, got) in enumerate(zip(plain, found, strict=True)):
        assert got == expected, f"scene {at}"


def test_a_checkpoint_of_either_loads_into_the_other(group):
    def trained(wire, *, path=None, save=None):
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=1e-2), group=group, wire=wire) as rt:
            unit = rt.register("block", values_of(1 if path is None else 2))
            if path is not None:
                rt.load(path)
            for step in (1, 2):
                unit.reduce(values_of(10 * step + rt.rank))
                rt.step()
                if step == 1 and save is not None:
                    rt.save(save)
            return bits(unit)

    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        assert trained(DELTA, save=path / "delta") == trained(None, save=path / "plain")
        assert trained(None, path=path / "delta") == trained(DELTA, path=path / "plain")
        WORLD.Barrier()


# -- bytes -------------------------------------------------------------------------------------------------------------

NUMEL = 64_000


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 1.0])
def test_wire_bytes_follow_the_changed_share(group, share):
    chosen = np.random.default_rng(3).random(NUMEL) < share
    with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=DELTA) as rt:
        unit = rt.register("block", {"w": np.ones(NUMEL, BFLOAT16)})
        reports = []
        for _ in range(3):
            for _ in range(2):  # forward and backward: the second one moves nothing
                bits(unit)
            unit.reduce({"w": np.where(chosen, 1.0, 0.0).astype(BFLOAT16)})
            reports.append(rt.step())
        with unit.gathered() as found:
            np.testing.assert_array_equal(found["w"], np.where(chosen, -2.0, 1.0).astype(BFLOAT16))
    if group.size == 1:
        assert "all_gather" not in reports[-1].bytes_moved
        return
    plain = 2 * NUMEL
    assert reports[0].bytes_moved["all_gather"] <= 1.01 * plain  # all of it, once
    for report in reports[1:]:
        assert report.bytes_uncoded == {"all_gather": plain}
        moved = report.bytes_moved["all_gather"]
        assert moved <= (1.6 * chosen.mean() + 0.01) * plain
        assert moved <= 1.01 * plain
    if share == 0.0:  # sizes alone: of what is gathered, and of the step that is to come
        assert reports[-1].bytes_moved["all_gather"] == 8 * group.size


@pytest.mark.parametrize("virtual_shards", [None, 8])
def test_backward_crosses_no_wire_with_a_second_copy(group, virtual_shards):
    """With as many bytes for gradients as for a gather: two of three are left, and micro-steps gather nothing more."""

    def run(plan):
        with zr.open(plan, zr.AdamW(lr=1e-2), group=group, virtual_shards=virtual_shards) as rt:
            walk = Walk(rt, MODEL, TEXT)
            losses = walk.train(2)
            before = trace.counters().get("wire.bytes", 0)
            losses += walk.train(2)
            sent = sum(WORLD.allgather(trace.counters().get("wire.bytes", 0) - before))
            first, *_, last = (one.bytes_moved for one in walk.reports)
            return losses, [one.digest for one in walk.reports], first, last, sent

    trace.enable()
    try:
        losses, digests, first, plain, sent = run(PLAIN)
        found, got, _, moved, kept = run(SECONDARY)
    finally:
        trace.disable()
    assert (found, got) == (losses, digests)
    if group.one_memory or group.size == 1:
        assert moved == plain
        return
    steps = 1 if virtual_shards is None else -(-virtual_shards // group.size)  # micro-steps
    assert moved["all_gather"] * 2 * steps == first["all_gather"] > plain["all_gather"]  # later, some units stay
    assert moved["reduce_scatter" if virtual_shards is None else "all_to_all"] > 0
    if virtual_shards is None:
        assert sum(moved.values()) <= 0.67 * sum(first.values())
        assert kept * sum(plain.values()) <= 1.01 * sent * sum(moved.values())


def test_shared_memory_moves_nothing_by_default(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="delta")) as rt:
        unit = rt.register("block", values_of())
        bits(unit)
        unit.reduce(values_of(2))
        report = rt.step()
        whole = sum(section.layout.nbytes for section in unit.sections)
        if group.one_memory:
            assert (report.wire, report.bytes_uncoded, rt.memory().host_copy) == ("", {}, 0)
        else:
            assert report.wire == "gather delta (lossless)"
            assert rt.memory().host_copy == whole


def test_ranks_of_a_host_share_the_copy(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=DELTA) as rt:
        unit = rt.register("block", values_of())
        bits(unit)
        (section,) = unit.sections
        whole = section.parameters.whole.view(np.uint8)
        group.barrier().wait()
        here = [rank for rank in range(group.size) if group.kind == "node" or rank % 2 == group.rank % 2]
        if group.kind == "mpi":
            here = [group.rank]
        if group.rank == here[0]:
            whole[:8] = np.arange(8) + 10 * group.rank
        group.barrier().wait()
        np.testing.assert_array_equal(whole[:8], np.arange(8) + 10 * here[0])
        group.barrier().wait()


# -- memory ------------------------------------------------------------------------------------------------------------

UNITS = {
    "embed": {"table": TensorSpec((400, 70), "bfloat16"), "order": TensorSpec((9,), "int64")},
    "block": {"w": TensorSpec((130, 40), "float16"), "b": TensorSpec((41,), "bfloat16")},
}
FROZEN = {"embed": "order", "block": "b"}


@pytest.mark.parametrize("over", ["all", "hosts"])
@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (zr.Plan.zero(3), {}),
        (zr.Plan.zero(3, state=zr.Tier.NVME), {"prefetch": 0}),
        (zr.Plan.fit(host="1MiB", nvme="64MiB"), {}),
        (zr.Plan.zero(3), {"shard_weights": "uneven"}),
        (SECONDARY, {"wire": None, "shard_weights": "uneven"}),
        (SECONDARY, {"frozen_format": "int8"}),  # what rests as codes is decoded at each gather
        (zr.Plan.zero(3, state=zr.Tier.NVME, secondary="host"), {"wire": INT8}),
    ],
)
def test_the_forecast_counts_the_copy(group, plan, more, over):
    settings = {"wire": zr.Wire(gather="delta", over=over), **more}
    settings["offload"] = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
    if "shard_weights" in settings:
        settings["shard_weights"] = [(rank * 2 + 1) % 3 for rank in range(group.size)]
    with tempfile.TemporaryDirectory() as mine:
        with zr.open(plan, zr.AdamW(lr=0.1), group=group, scratch=WORLD.bcast(mine), **settings) as rt:
            for name, tensors in UNITS.items():
                rt.register(name, tensors, frozen=FROZEN[name])
            for unit in rt.units.values():
                with unit.gathered() as values:
                    gradients = {name: np.zeros_like(values[name]) for name in unit.trainable}
                unit.reduce(gradients)
            rt.step()
            told = zr.forecast(
                UNITS,
                plan=plan,
                optimizer=zr.AdamW(lr=0.1),
                size=group.size,
                rank=group.rank,
                frozen=FROZEN,
                one_memory=group.one_memory,
                **settings,
            )
            counted = rt.memory()
        WORLD.Barrier()
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "host_copy", "streaming", "nvme"):
        assert getattr(counted, part) == getattr(told, part), part
    codes = settings["wire"] is not None and settings["wire"].over == "all"
    assert (counted.host_copy > 0) == (codes or not group.one_memory)
    assert ("host copy" in str(counted)) == (counted.host_copy > 0)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_of_more_bits_are_refused_before_anything_is_registered(group, dtype):
    with zr.open(zr.Plan.zero(3), group=group, wire=DELTA) as rt:
        cure = "Convert it to bfloat16 or float16, or leave gather= out"
        with pytest.raises(CallError, match=rf"Expected 'w' of unit 'block' .*'delta'\) says, got {dtype}. {cure}"):
            rt.register("block", {"w": np.ones(5, dtype)})
        assert not rt.units


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (zr.Plan.zero(2), r"Expected a plan that shards parameters with Wire\(gather='delta'\)"),
        (zr.Plan.zero(3, parameter=zr.Tier.NVME), r"Expected parameters in memory with Wire\(gather='delta'\)"),
    ],
)
def test_plans_without_shards_in_memory_are_refused(group, plan, message):
    with pytest.raises(PlanError, match=message):
        zr.open(plan, group=group, wire=DELTA)
