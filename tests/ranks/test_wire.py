"""Values that travel as codes: every rank computes with the same decoded ones, and updates the exact shard."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.codec import find_format
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.errors import CallError, PlanError
from zerort.native.dtypes import numpy_dtype
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none
MODEL = ByteModel(width=16, layers=1, context=8, heads=2)
TEXT = ByteText(rows=48, context=8, limit=20_000)
DETERMINISTIC = {"virtual_shards": 8, "clip_norm": 0.8, "wire": zr.Wire(gather="int4")}


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


def values_of(dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in SHAPES.items()}


def decoded(value, format):
    """Return what is left of one tensor on the wire: it starts a block, wherever it lies."""
    flat = np.ascontiguousarray(value, np.float32).reshape(-1)
    payload, out = np.empty(find_format(format).nbytes(flat.size), np.uint8), np.empty_like(flat)
    find_format(format).encode(payload, flat)
    find_format(format).decode(out, payload)
    return out.reshape(value.shape).astype(value.dtype)


def gathered(unit):
    with unit.gathered() as found:
        return {name: np.array(found[name]) for name in unit.names}


def expect(found, values, format):
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], decoded(value, format), err_msg=name)


@pytest.mark.smoke
@pytest.mark.parametrize(("format", "weights"), [("int8", None), ("int4", "uneven"), ("bfloat16", "uneven")])
def test_every_rank_computes_with_decoded_values_and_updates_exact_ones(group, format, weights):
    shares = None if weights is None else [(rank * 2 + 1) % 3 for rank in range(group.size)]  # 1 0 2 1 0 …: some none
    wire = zr.Wire(gather=format, over="all")
    with zr.open(zr.Plan.zero(3), zr.SGD(lr=0.25), group=group, wire=wire, shard_weights=shares) as rt:
        values = values_of()
        unit = rt.register("block", values)
        for step in range(3):
            expect(gathered(unit), values, format)
            gradients = {name: np.full(shape, float(step + 1), np.float32) for name, shape in SHAPES.items()}
            unit.reduce(gradients)
            report = rt.step()
            values = {name: (value - np.float32(0.25 * (step + 1))) for name, value in values.items()}
        expect(gathered(unit), values, format)
        assert report.wire == f"gather {format}"


def test_bytes_are_reported_before_and_after_coding(group):
    for format, share in (("int8", 0.254), ("int4", 0.129), ("bfloat16", 0.5)):
        with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather=format, over="all")) as rt:
            unit = rt.register("block", {"w": np.ones(64_000, np.float32)})
            gathered(unit)
            unit.reduce({"w": np.ones(64_000, np.float32)})
            report = rt.step()
            if group.size == 1:
                assert "all_gather" not in report.bytes_moved
                continue
            assert report.bytes_uncoded == {"all_gather": 256_000}
            assert report.bytes_moved["all_gather"] == pytest.approx(share * 256_000, rel=0.01)
            assert "uncoded: all_gather 250KiB" in str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_are_coded_too(group, dtype):
    with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="int8", over="all")) as rt:
        values = values_of(dtype)
        expect(gathered(rt.register("block", values)), values, "int8")


def test_only_what_leaves_shared_memory_is_coded_by_default(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="int4")) as rt:
        values = values_of()
        unit = rt.register("block", values)
        if not group.one_memory:
            expect(gathered(unit), values, "int4")
            return
        for name, value in gathered(unit).items():
            np.testing.assert_array_equal(value, values[name])
        unit.reduce({})
        report = rt.step()
        assert (report.wire, report.bytes_uncoded) == ("", {})


@pytest.mark.parametrize("tier", [zr.Tier.HOST, zr.Tier.NVME])
def test_offloaded_parameters_travel_as_codes(group, tier):
    with tempfile.TemporaryDirectory() as mine:
        scratch = WORLD.bcast(mine)
        plan = zr.Plan.zero(3, parameter=tier)
        with zr.open(plan, group=group, wire=zr.Wire(gather="int8", over="all"), scratch=scratch) as rt:
            units = [rt.register(f"block{at}", values_of(seed=at)) for at in range(3)]
            for _ in range(2):
                for at, unit in enumerate(units):
                    expect(gathered(unit), values_of(seed=at), "int8")
        WORLD.Barrier()


def test_checkpoints_hold_exact_values_and_load_without_codes(group):
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine)) / "ckpt"
        values = values_of()
        with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="int4", over="all")) as rt:
            rt.register("block", values)
            rt.save(path)
        with zr.open(zr.Plan.zero(3), group=group) as rt:
            unit = rt.register("block", values_of(seed=2))
            rt.load(path)
            for name, value in gathered(unit).items():
                np.testing.assert_array_equal(value, values[name])
        with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="int8", over="all")) as rt:
            unit = rt.register("block", values_of(seed=2))
            rt.load(path)
            expect(gathered(unit), values, "int8")
        WORLD.Barrier()


def test_with_virtual_shards_any_number_of_ranks_gives_the_same_bits(group):
    def digests(group):
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=1e-2), group=group, **DETERMINISTIC) as rt:
            walk = Walk(rt, MODEL, TEXT)
            losses = walk.train(3)
            return losses, [report.digest for report in walk.reports]

    with open_group(kind="solo") as solo:
        expected = digests(solo)
    assert digests(group) == expected
    assert len(set(expected[1])) == 3


def test_a_nan_in_a_parameter_stays_one_in_its_place(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(gather="int8", over="all")) as rt:
        values = values_of()
        values["w"][3, 4], values["long"][7], values["b"][:] = np.nan, -np.inf, 0.0
        found = gathered(rt.register("block", values))
        for name, value in values.items():
            np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(value))
            np.testing.assert_array_equal(np.isneginf(found[name]), np.isneginf(value))


@pytest.mark.parametrize(
    ("wire", "dtype", "cure"),
    [
        (zr.Wire(gather="int8", over="all"), "float64", "Convert it to float32, or leave wire= out"),
        (zr.Wire(gather="int4", over="all"), "float16", r"Use Wire\(gather='int8'\)"),
    ],
)
def test_a_dtype_without_the_format_is_refused_before_anything_is_registered(group, wire, dtype, cure):
    with zr.open(zr.Plan.zero(3), group=group, wire=wire) as rt:
        with pytest.raises(CallError, match=rf"Expected 'w' of unit 'block' .* got {dtype}. {cure}"):
            rt.register("block", {"w": np.ones(5, dtype)})
        assert not rt.units
        unit = rt.register("block", {"w": np.ones(5, np.float32), "table": np.arange(9)}, frozen="table")
        np.testing.assert_array_equal(gathered(unit)["table"], np.arange(9))  # whole numbers travel as they are


def test_a_plan_without_gathers_is_refused(group):
    with pytest.raises(PlanError, match=r"Expected a plan that shards parameters with Wire\(gather='int8'\)"):
        zr.open(zr.Plan.zero(2), group=group, wire=zr.Wire(gather="int8"))


# -- gradients ---------------------------------------------------------------------------------------------------------


def sums_of(summands, format):
    """Return the sum of what is left of each rank's tensor on the wire, in rank order and in float32."""
    total = decoded(summands[0].astype(np.float32), format)
    for one in summands[1:]:
        total = total + decoded(one.astype(np.float32), format)
    return total


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("format", "plan", "more"),
    [
        ("int8", zr.Plan.zero(3), {}),
        ("int4", zr.Plan.zero(2), {"shard_weights": "uneven"}),
        ("int4", zr.Plan.zero(3), {"micro_steps": 2}),
        ("bfloat16", zr.Plan.zero(3), {"micro_steps": 2, "accumulate": "local"}),
        ("int8", zr.Plan.zero(3, gradient=zr.Tier.NVME), {"micro_steps": 2}),
    ],
)
def test_each_rank_sums_what_all_ranks_have_rounded_once(group, format, plan, more):
    options = dict(more)
    if "shard_weights" in options:
        options["shard_weights"] = [(rank * 2 + 1) % 3 for rank in range(group.size)]
    local = options.get("accumulate") == "local"
    every = [[values_of(seed=10 * micro + rank) for rank in range(group.size)] for micro in range(2)]
    every = every[: options.get("micro_steps", 1)]
    with tempfile.TemporaryDirectory() as mine:
        options["scratch"] = WORLD.bcast(mine)
        wire = zr.Wire(reduce=format, over="all")
        with zr.open(plan, zr.SGD(lr=1.0), group=group, wire=wire, reduction="sum", **options) as rt:
            unit = rt.register("block", {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
            for gradients in every:
                unit.reduce(gradients[group.rank])
            report = rt.step()
            found = gathered(unit)
        WORLD.Barrier()
    for name in SHAPES:
        if local:
            ranks = [every[0][rank][name] + every[1][rank][name] for rank in range(group.size)]
            expected = sums_of(ranks, format)
        else:
            expected = sums_of([one[name] for one in every[0]], format)
            for micro in every[1:]:
                expected = expected + sums_of([one[name] for one in micro], format)
        np.testing.assert_array_equal(found[name], -expected, err_msg=name)
    assert report.wire == f"reduce {format}; results depend on the number of ranks"
    if group.size > 1:
        share = {"int8": 0.254, "int4": 0.129, "bfloat16": 0.5}[format]
        moved, uncoded = report.bytes_moved["reduce_scatter"], report.bytes_uncoded["reduce_scatter"]
        assert moved == pytest.approx(share * uncoded, rel=0.01)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_reported_as_without_codes(group, value):
    def why(**options):
        with zr.open(zr.Plan.zero(3), group=group, nonfinite="skip", **options) as rt:
            unit = rt.register("block", values_of())
            gradients = values_of(seed=group.rank)
            if group.rank == group.size - 1:
                gradients["long"][2999] = value
            unit.reduce(gradients)
            report = rt.step()
            return report.updated, report.why

    plain = why()
    assert plain[0] is False
    assert "'block.long'" in plain[1]
    assert why(wire=zr.Wire(reduce="int4", over="all")) == plain


def test_gradients_of_16_bits_are_summed_in_32(group):
    with zr.open(
        zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=zr.Wire(reduce="int8", over="all"), reduction="sum"
    ) as rt:
        unit = rt.register("block", {"w": np.zeros(777, numpy_dtype("bfloat16"))})
        every = [values_of("bfloat16", seed=rank)["long"][:777] for rank in range(group.size)]
        unit.reduce({"w": every[group.rank]})
        rt.step()
        expected = sums_of(every, "int8").astype(numpy_dtype("bfloat16"))
        np.testing.assert_array_equal(gathered(unit)["w"], -expected)


@pytest.mark.parametrize(
    ("plan", "more", "got"),
    [
        (zr.Plan.zero(1), {}, "PARTIAL ones, which every rank keeps whole"),
        (
            zr.Plan.zero(3),
            {"virtual_shards": 8, "accumulate": "local"},
            "virtual shards that each rank sums whole",
        ),
    ],
)
def test_gradients_that_are_summed_otherwise_are_refused(group, plan, more, got):
    with pytest.raises(PlanError, match=rf"with Wire\(reduce='int8'\), got {got}"):
        zr.open(plan, group=group, wire=zr.Wire(reduce="int8", over="all"), **more)


def test_float64_gradients_are_refused_before_anything_is_registered(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=zr.Wire(reduce="int8", over="all")) as rt:
        with pytest.raises(CallError, match=r"Expected the gradient of 'w' of unit 'block' .* got float64. Convert"):
            rt.register("block", {"w": np.ones(5)})
        assert not rt.units


# -- error feedback ----------------------------------------------------------------------------------------------------

FEEDBACK = zr.Wire(reduce="int4", feedback=True, over="all")


def steps_of(group, path=None, *, save=None, steps=4, first=0):
    """Take steps with one gradient per rank and step; return the parameters after each."""
    with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=FEEDBACK, reduction="sum") as rt:
        unit = rt.register("block", {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        if path is not None:
            rt.load(path)
        found = []
        for step in range(first, first + steps):
            unit.reduce(values_of(seed=100 * step + group.rank))
            report = rt.step()
            found.append(gathered(unit))
        if save is not None:
            rt.save(save)
        assert report.wire == "reduce int4, feedback; results depend on the number of ranks"
        return found


def test_what_coding_loses_is_made_up_for_by_the_next_gradients(group):
    """Each sender's residual is what its codes have lost so far, in 16 bits: computed here without the runtime."""
    found = steps_of(group)
    bfloat16 = numpy_dtype("bfloat16")
    for name, shape in SHAPES.items():
        residuals = [np.zeros(shape, np.float32) for _ in range(group.size)]
        values = np.zeros(shape, np.float32)
        for step in range(4):
            total = None
            for rank in range(group.size):
                wanted = values_of(seed=100 * step + rank)[name] + residuals[rank]
                coded = decoded(wanted, "int4")
                residuals[rank] = (wanted - coded).astype(bfloat16).astype(np.float32)
                total = coded if total is None else total + coded
            values = values - total
            np.testing.assert_array_equal(found[step][name], values, err_msg=name)


def test_checkpoints_hold_what_every_rank_has_lost(group):
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine)) / "ckpt"
        straight = steps_of(group, steps=4)
        steps_of(group, steps=2, save=path)
        resumed = steps_of(group, path, steps=2, first=2)
        for before, after in zip(straight[2:], resumed, strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(after[name], before[name])
        WORLD.Barrier()


def test_other_numbers_of_ranks_share_the_sum_of_what_was_lost(group):
    def residuals(rt):
        section = rt.units["block"].sections[0]
        (mine,) = section.residual.arrays
        return {e.name: mine[e.slice].astype(np.float32) for e in section.layout.extents}

    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine)) / "ckpt"
        with zr.open(zr.Plan.zero(3), group=group, wire=FEEDBACK) as rt:
            unit = rt.register("block", zeros)
            unit.reduce(values_of(seed=group.rank))
            rt.step()
            rt.save(path)
            own = residuals(rt)
        every = WORLD.allgather(own)
        with open_group(kind="solo") as solo, zr.open(zr.Plan.zero(3), group=solo, wire=FEEDBACK) as rt:
            rt.register("block", zeros)
            rt.load(path)
            for name, found in residuals(rt).items():
                total = sum(one[name].astype(np.float64) for one in every)
                expected = (total * (1 / group.size)).astype(np.float32)  # a step of one rank divides by 1
                np.testing.assert_array_equal(found, expected.astype(numpy_dtype("bfloat16")).astype(np.float32))
            alone = Path(WORLD.bcast(mine)) / f"alone{WORLD.rank}"
            rt.save(alone)
        WORLD.Barrier()
        with zr.open(zr.Plan.zero(3), group=group, wire=FEEDBACK) as rt:
            rt.register("block", zeros)
            rt.load(Path(WORLD.bcast(mine)) / "alone0")
            shared = WORLD.allgather(residuals(rt))
            for name in own:
                sums, whole = (sum(one[name] for one in many) for many in (shared, every))
                np.testing.assert_allclose(sums, whole, rtol=2**-6, atol=1e-6)  # two roundings to bfloat16
            rt.load(path, optimizer=False)  # a run that begins: nothing was lost yet
            assert not any(found.any() for found in residuals(rt).values())
        WORLD.Barrier()


def test_a_gradient_that_is_not_finite_leaves_no_residual(group):
    with zr.open(zr.Plan.zero(3), group=group, wire=FEEDBACK, nonfinite="skip") as rt:
        unit = rt.register("block", values_of())
        gradients = values_of(seed=3)
        gradients["w"][0, :2] = np.nan, np.inf
        unit.reduce(gradients)
        assert not rt.step().updated
        (mine,) = unit.sections[0].residual.arrays
        assert np.isfinite(mine.astype(np.float32)).all()
        unit.reduce(values_of(seed=4))
        assert rt.step().updated
