"""Parameters as int4 codes of differences: what every rank computes with is what codes have made of it, and no more."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.checkpoint import read_manifest
from zerort.codec import INT4
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

PLAIN = zr.Plan.zero(3)
INT4_FEEDBACK = zr.Wire(gather="int4", feedback=True, over="all")
BFLOAT16 = numpy_dtype("bfloat16")
few = pytest.mark.skipif(WORLD.size > 3, reason="up to 3 ranks show it")
SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none


@pytest.fixture(scope="module", params=["node", pytest.param("mpi", id="over-mpi"), "hierarchical"])
def group(request, options):
    sizes = {"node": (1, 2), "mpi": (2,), "hierarchical": (3, 4, 5, 8)}[request.param]
    if WORLD.size not in sizes:
        pytest.skip("one way to share memory, or not to, is enough")
    if request.param == "hierarchical":  # of three ranks, two share memory and one is alone
        machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        made = Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))
    else:
        made = open_group(kind=request.param, options=options)
    with made as group:
        yield group


def values_of(seed=1, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gathered(unit):
    with unit.gathered() as found:
        return {name: np.array(found[name]) for name in unit.names}


def bits(values):
    return {name: value.tobytes() for name, value in values.items()}


class Bases:
    """What ranks should compute with: codes of differences, tensor by tensor, without the runtime."""

    def __init__(self):
        self.of = {}

    def add(self, unit, values):
        """Send what these values have more; return what that makes."""
        base = self.of.setdefault(unit, {name: np.zeros_like(value) for name, value in values.items()})
        for name, value in values.items():
            numel = -(-value.size // 128) * 128  # whole blocks, as tensors lie
            now, before = np.zeros(numel, value.dtype), np.zeros(numel, value.dtype)
            now[: value.size], before[: value.size] = value.reshape(-1), base[name].reshape(-1)
            payload = np.zeros(INT4.nbytes(numel), np.uint8)
            INT4.encode(payload, now, base=before)
            INT4.decode(before, payload, adds=True)
            base[name] = before[: value.size].reshape(value.shape)
        return base


# -- the same bits -----------------------------------------------------------------------------------------------------


def story(group, path, wire, *, plan=PLAIN, replicate=1, dtype=np.float32):
    """Change parameters in all ways that there are; yield which units have changed, and what is gathered of all."""
    ranks = zr.mesh(replicate=replicate, group=group)
    with zr.open(plan, zr.AdamW(lr=1e-2), mesh=ranks, wire=wire, nonfinite="skip", prefetch=1) as rt:
        blocks = [rt.register(f"block{at}", values_of(at, dtype)) for at in range(3)]
        table = rt.register("table", {"base": values_of(7, dtype)["w"], "order": np.arange(9)}, frozen=True)
        trained, everything = {unit.name for unit in blocks}, {unit.name for unit in (*blocks, table)}

        def step(seed, *, bad=False):
            for at, unit in enumerate(blocks):
                gradients = values_of(100 * seed + 10 * at + rt.rank, dtype)
                if bad and rt.rank == rt.size - 1 and at == 1:
                    gradients["long"][5] = np.nan
                unit.reduce(gradients)
            return rt.step()

        def scene(changed):
            found = {unit.name: gathered(unit) for unit in (*blocks, table)}
            again = {unit.name: gathered(unit) for unit in (*blocks, table)}  # up to date: it meets nobody
            assert {name: bits(one) for name, one in again.items()} == {name: bits(one) for name, one in found.items()}
            return changed, found

        yield scene(everything)
        step(1)
        yield scene(trained)
        step(2)
        step(3)  # with no gather between: both updates in one difference
        yield scene(trained)
        odd = values_of(50, dtype)
        odd["w"][0, :3] = np.nan, -0.0, np.inf
        blocks[0].assign(odd)
        yield scene({"block0"})
        blocks[0].assign(values_of(51, dtype))
        table.assign({"base": values_of(52, dtype)["w"]})
        yield scene({"block0", "table"})
        assert not step(4, bad=True).updated
        yield scene(set())
        rt.save(path)
        yield scene(set())
        rt.rebalance(
            shard_weights=[(rank * 2 + 1) % 3 for rank in range(rt.context.mesh.shard.size)]
        )  # 1 0 2: one none
        yield scene(set())
        step(5)
        yield scene(trained)
        rt.rebalance(shard_weights=None)
        step(6)
        yield scene(trained)
        rt.load(path)  # up to date, as it was
        yield scene(None)
        step(7)
        yield scene(trained)


@pytest.mark.parametrize(
    ("plan", "dtype", "replicate"),
    [
        pytest.param(PLAIN, np.float32, 1, marks=pytest.mark.smoke),
        pytest.param(PLAIN, BFLOAT16, 1, marks=few),
        (PLAIN, np.float32, 2),
        pytest.param(zr.Plan.zero(3, secondary="host"), np.float32, 1, marks=few),
    ],
    ids=["float32", "bfloat16", "copies", "secondary"],
)
def test_ranks_compute_with_what_codes_of_differences_make(group, plan, dtype, replicate):
    """One code per update, however often it is gathered; assigned, skipped, saved, cut anew and loaded."""
    if group.size % replicate:
        pytest.skip("copies of one size")
    bases, saved = Bases(), {}
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        exact = story(group, path / "plain", None, replicate=replicate, dtype=dtype)
        exact = list(exact)
        found = list(story(group, path / "coded", INT4_FEEDBACK, plan=plan, replicate=replicate, dtype=dtype))
        WORLD.Barrier()
    for at, ((_, values), (changed, got)) in enumerate(zip(exact, found, strict=True)):
        if changed is None:
            bases.of = {unit: dict(one) for unit, one in saved.items()}
        for unit in changed or ():
            bases.add(unit, {name: value for name, value in values[unit].items() if name != "order"})
        if at == 6:  # after the save
            saved = {unit: dict(one) for unit, one in bases.of.items()}
        for unit, one in got.items():
            expected = {**values[unit], **bases.of[unit]}
            assert bits(one) == bits(expected), f"scene {at}, {unit}"
    coarse, fine = (np.abs(found[at][1]["block1"]["w"] - exact[at][1]["block1"]["w"]).max() for at in (0, 2))
    assert fine < 0.2 * coarse


MODEL = ByteModel(width=16, layers=1, context=8, heads=2)
TEXT = ByteText(rows=48, context=8, limit=20_000)


@pytest.mark.parametrize("reduce", [None, "int4"])
def test_bits_do_not_depend_on_the_number_of_ranks(group, reduce):
    """Blocks by global index, one code per update: with virtual shards one rank alone computes the same."""

    def run(group):
        wire = zr.Wire(gather="int4", reduce=reduce, feedback=True)
        with zr.open(PLAIN, zr.AdamW(lr=1e-2), virtual_shards=8, clip_norm=0.8, wire=wire, group=group) as rt:
            walk = Walk(rt, MODEL, TEXT)
            losses = walk.train(3)
            if reduce is None:
                rt.rebalance(shard_weights=[rank % 2 + 1 for rank in range(rt.size)])
            losses += walk.train(2)
            return losses, [report.digest for report in walk.reports], walk.reports[-1].wire

    losses, digests, said = run(group)
    assert said == ("gather int4, feedback" if reduce is None else "gather int4, reduce int4, feedback of both")
    with open_group(kind="solo") as solo:
        assert run(solo) == (losses, digests, said)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def trained(group, steps, *, wire=INT4_FEEDBACK, load=None, save=None, gathers=False, **options):
    """Train from a checkpoint, or the beginning, to another; return what is gathered at the end."""
    with zr.open(PLAIN, zr.AdamW(lr=1e-2), group=group, wire=wire, virtual_shards=8, **options) as rt:
        unit = rt.register("block", values_of(1 if load is None else 2))
        if load is not None:
            rt.load(load)
        for step in steps:
            if step % 2:  # not all are gathered in every step
                gathered(unit)
            for shard in rt.micro_batches:
                unit.reduce(values_of(10 * step + shard))
            rt.step()
        if save is not None:
            if gathers:
                gathered(unit)
            rt.save(save)
        return bits(gathered(unit))


def test_copies_that_have_gathered_different_units_are_saved(group):
    """What is saved is the first copy's, and so is which of it is up to date."""
    if group.size % 2:
        pytest.skip("two copies of the model")
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine)) / "saved"
        ranks = zr.mesh(replicate=2, group=group)
        with zr.open(PLAIN, zr.AdamW(lr=1e-2), mesh=ranks, wire=INT4_FEEDBACK, prefetch=0) as rt:
            units = [rt.register(name, values_of(seed)) for seed, name in enumerate("ab")]
            for unit in units:
                gathered(unit)
                unit.reduce(values_of(3))
            rt.step()
            gathered(units[rt.context.mesh.copy])
            rt.save(path)
        current = read_manifest(path).meta["gathered"]
        assert current
        assert all(name.startswith("a.") for name in current), current
        WORLD.Barrier()


@pytest.mark.parametrize("gathers", [False, True], ids=["behind", "up-to-date"])
def test_a_run_that_was_saved_goes_on_with_the_same_bits(group, gathers):
    """Whether the last update was gathered before the save or not; on as many ranks, and on one."""
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        through = trained(group, [1, 2, 3, 4, 5])
        trained(group, [1, 2], save=path / "saved", gathers=gathers)
        assert trained(group, [3, 4, 5], load=path / "saved") == through
        with open_group(kind="solo") as solo:
            assert trained(solo, [3, 4, 5], load=path / "saved") == through
        now = trained(group, [], load=path / "saved")
        assert trained(group, [], load=path / "saved", wire=None) != now
        WORLD.Barrier()


@few
def test_checkpoints_of_other_wires_are_loaded_and_begin_with_zeros(group):
    exact = values_of(1)
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        for wire, name in ((None, "plain"), (zr.Wire(gather="int4", over="all"), "int4")):
            trained(group, [], wire=wire, save=path / name)
            assert trained(group, [], load=path / name) == bits(Bases().add("block", exact))
        trained(group, [], save=path / "coded", gathers=True)
        assert trained(group, [], load=path / "coded", wire=None) == bits(exact)
        with zr.open(PLAIN, zr.AdamW(lr=1e-2), group=group, wire=INT4_FEEDBACK) as rt:
            unit = rt.register("block", values_of(3))
            gathered(unit)
            rt.load(path / "plain")  # what was there before is forgotten
            assert bits(gathered(unit)) == bits(Bases().add("block", exact))
            rt.load(path / "coded", optimizer=False)
            assert bits(gathered(unit)) == bits(Bases().add("block", exact))
        WORLD.Barrier()


@few
def test_the_last_step_is_resumed_with_the_same_bits(group):
    with tempfile.TemporaryDirectory() as mine:
        path = Path(WORLD.bcast(mine))
        through = trained(group, [1, 2, 3, 4])
        trained(group, [1, 2], last_step=path / "last")
        with zr.open(
            PLAIN, zr.AdamW(lr=1e-2), group=group, wire=INT4_FEEDBACK, virtual_shards=8, last_step=path / "last"
        ) as rt:
            unit = rt.register("block", values_of(2))
            assert rt.resume().updates == 2
            for step in (3, 4):
                if step % 2:
                    gathered(unit)
                for shard in rt.micro_batches:
                    unit.reduce(values_of(10 * step + shard))
                rt.step()
            assert bits(gathered(unit)) == through
        WORLD.Barrier()


# -- bytes -------------------------------------------------------------------------------------------------------------


@few
def test_each_update_crosses_the_wire_once(group):
    numel = 64_000
    with zr.open(PLAIN, zr.SGD(lr=1.0), group=group, wire=INT4_FEEDBACK) as rt:
        unit = rt.register("block", {"w": np.ones(numel, np.float32)})
        for _ in range(3):
            for _ in range(4):  # forward and backward of two micro-batches
                gathered(unit)
            unit.reduce({"w": np.ones(numel, np.float32)})
            report = rt.step()
            assert report.wire == "gather int4, feedback"
            if group.size > 1:
                assert report.bytes_moved["all_gather"] == INT4.nbytes(numel)
                assert report.bytes_uncoded == {"all_gather": 4 * numel}


UNITS = {
    "embed": {"table": TensorSpec((400, 70), "bfloat16"), "order": TensorSpec((9,), "int64")},
    "block": {"w": TensorSpec((130, 40), "float32"), "b": TensorSpec((41,), "float32")},
}
FROZEN = {"embed": "order", "block": "b"}


@few
@pytest.mark.parametrize("over", ["all", "hosts"])
@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (PLAIN, {"shard_weights": "uneven"}),
        (zr.Plan.zero(3, state=zr.Tier.NVME), {"prefetch": 0}),
        (zr.Plan.fit(host="1MiB", nvme="64MiB"), {}),
        (zr.Plan.zero(3, secondary="host"), {"frozen_format": "int8"}),  # what rests as codes travels as these
    ],
)
def test_the_forecast_counts_what_stays(group, plan, more, over):
    settings = {"wire": zr.Wire(gather="int4", reduce="int8", feedback=True, over=over), **more}
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
            counted = rt.memory()
        how = {"size": group.size, "rank": group.rank, "one_memory": group.one_memory, "hosts": group.hosts}
        told = zr.forecast(UNITS, plan=plan, optimizer=zr.AdamW(lr=0.1), frozen=FROZEN, **how, **settings)
        WORLD.Barrier()
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "host_copy", "streaming", "nvme"):
        assert getattr(counted, part) == getattr(told, part), part
    assert (counted.host_copy > 0) == (over == "all" or not group.one_memory)


# -- refused, and beside others ----------------------------------------------------------------------------------------


@few
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes_without_int4_are_refused_before_anything_is_registered(group, dtype):
    with zr.open(PLAIN, group=group, wire=INT4_FEEDBACK) as rt:
        with pytest.raises(CallError, match=rf"Expected 'w' of unit 'block' .* travel as int4, .* got {dtype}\."):
            rt.register("block", {"w": np.ones(5, dtype)})
        assert not rt.units


@few
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (zr.Plan.zero(2), r"Expected a plan that shards parameters with Wire\(gather='int4'\)"),
        (
            zr.Plan.zero(3, parameter=zr.Tier.NVME),
            r"Expected parameters in memory with Wire\(gather='int4', feedback=True\), .* got parameters on NVME. Use "
            r"parameter=Tier.DEVICE, or gather='int8', or feedback=False",
        ),
    ],
)
def test_plans_without_shards_in_memory_are_refused(group, plan, message):
    with pytest.raises(PlanError, match=message):
        zr.open(plan, group=group, wire=INT4_FEEDBACK)


@few
def test_pruned_parameters_are_refused(group):
    with zr.open(PLAIN, zr.AdamW(lr=0.1, sparsity=zr.Sparsity(0.5)), group=group, wire=INT4_FEEDBACK) as rt:
        with pytest.raises(
            CallError, match=r"Expected 'w' of unit 'block' without a Sparsity with Wire\(gather='int4'"
        ):
            rt.register("block", {"w": np.ones((8, 8), np.float32)})
        assert not rt.units


@few
def test_ties_and_tables_by_rows_go_beside_it(group):
    """A tied tensor is gathered with its owner; rows travel uncoded, and are exact."""
    with zr.open(PLAIN, zr.SGD(lr=0.5), group=group, wire=INT4_FEEDBACK) as rt:
        values = np.linspace(-1, 1, 600, dtype=np.float32).reshape(30, 20)
        owner = rt.register("owner", {"w": values})
        head = rt.register("head", {"b": values[0]}, ties={"w": (owner, "w")})
        rows = rt.register("rows", {"table": values}, rows=("table",))
        bases = Bases()
        expected = {"w": bases.add("owner", {"w": values})["w"], "b": bases.add("head", {"b": values[0]})["b"]}
        with head.gathered() as found:
            assert {name: np.array(found[name]).tobytes() for name in ("w", "b")} == bits(expected)
        with rows.gathered(rows={"table": [3, 5]}) as found:
            np.testing.assert_array_equal(found["table"], values[[3, 5]])
