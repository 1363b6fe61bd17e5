"""Who rounds gradients that travel as codes: ranks, hosts of several ranks, copies of the model, virtual shards."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.codec import LargestFormat, find_format
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.errors import NonFiniteError
from zerort.native.dtypes import numpy_dtype
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none
MODEL = ByteModel(width=16, layers=1, context=8, heads=2)
TEXT = ByteText(rows=48, context=8, limit=20_000)
BFLOAT16 = numpy_dtype("bfloat16")


@pytest.fixture(scope="module")
def group(options):
    """Ranks on two hosts in turn: 0 2 on one, 1 3 on the other."""
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    transport = best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine)
    with Group(transport) as group:
        yield group


@contextmanager
def directory():
    with tempfile.TemporaryDirectory() as mine:
        yield Path(WORLD.bcast(mine))
        WORLD.Barrier()


def members_of(group):
    """Return the ranks of each host, in order."""
    return [[rank for rank in range(group.size) if rank % 2 == host] for host in range(min(group.size, 2))]


def values_of(dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in SHAPES.items()}


def decoded(value, format):
    """Return what is left of one tensor on the wire, as float32."""
    flat = np.ascontiguousarray(value, np.float32).reshape(-1)
    codec = LargestFormat(format.fraction) if isinstance(format, zr.TopK) else find_format(format)
    payload, out = np.empty(codec.nbytes(flat.size), np.uint8), np.empty_like(flat)
    codec.encode(payload, flat)
    codec.decode(out, payload)
    return out.reshape(value.shape)


def added(values):
    """Return the sum of arrays, one after the other, in float32."""
    total = np.zeros(values[0].shape, np.float32) + values[0].astype(np.float32)
    for one in values[1:]:
        total = total + one.astype(np.float32)
    return total


class Sent:
    """What senders' codes carry of their gradients, with feedback: computed without the runtime."""

    def __init__(self, format):
        self.format = format
        self.lost = {}

    def take(self, sender, name, wanted):
        wanted = wanted + self.lost.get((sender, name), np.zeros(wanted.shape, np.float32))
        carried = decoded(wanted, self.format)
        kept_in = np.float32 if isinstance(self.format, zr.TopK) else BFLOAT16
        self.lost[sender, name] = (wanted - carried).astype(kept_in).astype(np.float32)
        return carried


def gathered(unit):
    with unit.gathered() as found:
        return {name: np.array(found[name]) for name in unit.names}


def opened(group, wire, **options):
    plan = options.pop("plan", zr.Plan.zero(3))
    return zr.open(plan, zr.SGD(lr=1.0), group=group, wire=wire, reduction="sum", **options)


def zeros(dtype="float32"):
    return {name: np.zeros(shape, numpy_dtype(dtype)) for name, shape in SHAPES.items()}


# -- hosts of several ranks --------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("format", "dtype", "more"),
    [
        ("int8", "float32", {}),
        ("int4", "bfloat16", {"shard_weights": "uneven"}),
        ("int4", "float32", {"micro_steps": 2, "plan": zr.Plan.zero(2)}),
        ("bfloat16", "float32", {"micro_steps": 2, "accumulate": "local"}),
        ("int8", "float32", {"micro_steps": 2, "plan": zr.Plan.zero(3, gradient=zr.Tier.NVME)}),
    ],
)
def test_a_host_rounds_the_sum_of_its_ranks_once(group, format, dtype, more):
    options = dict(more)
    if "shard_weights" in options:
        options["shard_weights"] = [(rank * 2 + 1) % 3 for rank in range(group.size)]
    local = options.get("accumulate") == "local"
    micro_steps = options.get("micro_steps", 1)
    every = [[values_of(dtype, seed=10 * micro + rank) for rank in range(group.size)] for micro in range(micro_steps)]
    with directory() as scratch, opened(group, zr.Wire(reduce=format), scratch=scratch, **options) as rt:
        unit = rt.register("block", zeros(dtype))
        for gradients in every:
            unit.reduce(gradients[group.rank])
        report, layout = rt.step(), unit.sections[0].layout
        found = gathered(unit)
    for name in SHAPES:
        ranks = [[one[name] for one in micro] for micro in every]
        if local:
            ranks = [[added(list(each)) for each in zip(*ranks, strict=True)]]
        sums = [
            added([decoded(added([one[rank] for rank in of]), format) for of in members_of(group)]) for one in ranks
        ]
        np.testing.assert_array_equal(found[name], -added(sums).astype(numpy_dtype(dtype)), err_msg=name)
    assert report.wire == f"reduce {format}; results depend on the number of ranks"
    if group.size > 1:
        share = {"int8": 0.254, "int4": 0.129, "bfloat16": 0.5}[format] * 4 / numpy_dtype(dtype).itemsize
        moved, uncoded = report.bytes_moved["reduce_scatter"], report.bytes_uncoded["reduce_scatter"]
        assert moved == pytest.approx(share * uncoded, rel=0.01)
        whole = layout.end * numpy_dtype(dtype).itemsize * (1 if local else micro_steps)
        assert WORLD.allreduce(uncoded) == 2 * whole  # once for each host, whatever its ranks


FEEDBACK = zr.Wire(reduce="int4", feedback=True)


def steps_of(group, path=None, *, save=None, steps=4, first=0, wire=FEEDBACK, **options):
    """Take steps with one gradient per rank and step; return the parameters after each."""
    with opened(group, wire, **options) as rt:
        unit = rt.register("block", zeros())
        if path is not None:
            rt.load(path)
        found = []
        for step in range(first, first + steps):
            unit.reduce(values_of(seed=100 * step + WORLD.rank))
            rt.step()
            found.append(gathered(unit))
        if save is not None:
            rt.save(save)
        return found


def expect_same(found, expected):
    for after, before in zip(found, expected, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize("format", ["int4", zr.TopK(0.02)], ids=str)
def test_a_host_makes_up_for_what_its_sum_has_lost(group, format):
    found, sent, values = steps_of(group, wire=zr.Wire(reduce=format, feedback=True)), Sent(format), zeros()
    for step, after in enumerate(found):
        for name in SHAPES:
            ranks = [values_of(seed=100 * step + rank)[name] for rank in range(group.size)]
            hosts = [
                sent.take(host, name, added([ranks[rank] for rank in of])) for host, of in enumerate(members_of(group))
            ]
            values[name] = values[name] - added(hosts)
            np.testing.assert_array_equal(after[name], values[name], err_msg=name)


@pytest.mark.slow
def test_each_host_keeps_and_saves_one_residual_between_its_ranks(group):
    with directory() as path:
        straight = steps_of(group)
        steps_of(group, steps=2, save=path / "two hosts")
        expect_same(steps_of(group, path / "two hosts", steps=2, first=2), straight[2:])
        with opened(group, FEEDBACK) as rt:
            (section,) = rt.register("block", zeros()).sections
            held = WORLD.allgather((group.rank % 2, section.residual.nbytes))
            for host in range(min(group.size, 2)):
                assert sum(nbytes for one, nbytes in held if one == host) == 2 * section.layout.numel
            rt.load(path / "two hosts")
            (mine,) = section.residual.arrays
            every = WORLD.allgather((section.residual.stretch, mine.astype(np.float64)))
            lost = np.zeros(section.layout.numel)
            for stretch, values in every:
                lost[stretch] += values
        with open_group(kind="solo") as solo, opened(solo, zr.Wire(reduce="int4", feedback=True, over="all")) as rt:
            (section,) = rt.register("block", zeros()).sections
            rt.load(path / "two hosts")
            (mine,) = section.residual.arrays
            np.testing.assert_array_equal(mine, lost.astype(np.float32).astype(BFLOAT16))
            assert lost.any()


def test_a_tensor_that_no_rank_of_a_host_has_a_gradient_of_keeps_what_was_lost(group):
    with opened(group, FEEDBACK) as rt:
        unit = rt.register("block", zeros())
        (section,) = unit.sections
        unit.reduce(values_of(seed=group.rank))
        rt.step()

        def lost(name):
            stretch, extent = section.residual.stretch, section.layout.of(f"block.{name}").slice
            first, last = max(stretch.start, extent.start), min(stretch.stop, extent.stop)
            (mine,) = section.residual.arrays
            return mine[first - stretch.start : max(first, last) - stretch.start].astype(np.float32).copy()

        before = {name: lost(name) for name in SHAPES}
        given = values_of(seed=50 + group.rank)
        del given["long"]
        if group.rank != members_of(group)[0][-1]:  # not the rank that codes it, where its host has another
            del given["w"]
        unit.reduce(given)
        rt.step()
        np.testing.assert_array_equal(lost("long"), before["long"])
        if before["w"].any():
            assert (lost("w") == before["w"]).all() == (group.rank % 2 == 1)


# -- copies of the model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_copies_of_the_model_code_within_and_add_their_sums_as_they_are(group):
    if group.size % 2:
        pytest.skip("2 or 4 ranks")
    wire, half = zr.Wire(reduce="int4", feedback=True, over="all"), group.size // 2
    with directory() as path:
        found, sent, values = steps_of(None, wire=wire, mesh=zr.mesh(replicate=2, group=group)), Sent("int4"), zeros()
        for step, after in enumerate(found):
            for name in SHAPES:
                carried = [sent.take(r, name, values_of(seed=100 * step + r)[name]) for r in range(group.size)]
                values[name] = values[name] - (added(carried[:half]) + added(carried[half:]))
                np.testing.assert_array_equal(after[name], values[name], err_msg=name)
        steps_of(None, wire=wire, mesh=zr.mesh(replicate=2, group=group), steps=2, save=path / "copies")
        offloaded = {"plan": zr.Plan.zero(3, gradient=zr.Tier.NVME), "scratch": path}
        mesh = zr.mesh(replicate=2, group=group)
        expect_same(steps_of(None, path / "copies", wire=wire, mesh=mesh, steps=2, first=2, **offloaded), found[2:])


@pytest.mark.slow
def test_reports_say_what_travels_uncoded_over_copies(group):
    if group.size % 2:
        pytest.skip("2 or 4 ranks")
    mesh = zr.mesh(replicate=2, group=group)
    with opened(None, zr.Wire(reduce="int8", over="all"), mesh=mesh) as rt:
        unit = rt.register("block", zeros())
        unit.reduce(values_of(seed=group.rank))
        report = rt.step()
        assert report.wire == (
            "reduce int8; results depend on the number of ranks; gradients travel uncoded over copies of the model"
        )
        assert report.bytes_moved["all_reduce"] > 0


# -- virtual shards ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_top_k_sends_a_few_gradients_and_all_in_the_end(group):
    numel, steps = 63 * 1024, 3
    with opened(group, zr.Wire(reduce=zr.TopK(0.01), over="all")) as rt:
        unit = rt.register("block", {"w": np.zeros(numel, np.float32)})
        for step in range(steps):
            unit.reduce({"w": np.random.default_rng(step).standard_normal(numel).astype(np.float32)})
            report = rt.step()
            changed = np.count_nonzero(gathered(unit)["w"])
            assert changed <= (step + 1) * 11 * 63
        assert changed > 1.9 * 11 * 63  # what waits is sent before what comes again
        assert report.wire == "reduce TopK(0.01), feedback; results depend on the number of ranks"
        if group.size > 1:
            moved, uncoded = report.bytes_moved["reduce_scatter"], report.bytes_uncoded["reduce_scatter"]
            assert uncoded == 4 * numel
            assert moved == pytest.approx(0.01074 * uncoded, rel=0.01)
        broken = np.zeros(numel, np.float32)
        broken[7] = np.nan if group.rank == group.size - 1 else 0
        unit.reduce({"w": broken})
        with pytest.raises(NonFiniteError, match=r"'block\.w'"):
            rt.step()


DETERMINISTIC = {"virtual_shards": 8, "clip_norm": 0.8, "wire": zr.Wire(gather="int8", reduce="int8", feedback=True)}


def digests(group, steps=3, *, load=None, save=None, **options):
    plan, options = options.pop("plan", zr.Plan.zero(3)), {**DETERMINISTIC, **options}
    with zr.open(plan, zr.AdamW(lr=1e-2), group=group, **options) as rt:
        walk = Walk(rt, MODEL, TEXT)
        if load is not None:
            walk.position = rt.load(load).updates
        losses = walk.train(steps)
        if save is not None:
            rt.save(save)
        assert walk.reports[-1].wire == f"gather int8, reduce {options['wire'].reduce}, feedback"
        return losses, [report.digest for report in walk.reports]


@pytest.mark.slow
def test_virtual_shards_send_the_same_codes_on_any_number_of_ranks(group):
    with directory() as path, open_group(kind="solo") as solo:
        losses, expected = digests(solo, 3)
        assert len(set(expected)) == 3
        assert digests(group, 3) == (losses, expected)
        digests(group, 2, save=path / "saved", scratch=path, plan=zr.Plan.zero(3, gradient=zr.Tier.NVME))
        assert digests(group, 1, load=path / "saved")[1] == expected[2:]
        assert digests(solo, 1, load=path / "saved")[1] == expected[2:]
        wire = zr.Wire(gather="int8", reduce=zr.TopK(0.05))
        assert digests(group, 2, wire=wire) == digests(solo, 2, wire=wire)


@pytest.mark.slow
def test_virtual_shards_over_copies_send_the_same_codes(group):
    if group.size not in (2, 4):
        pytest.skip("2 or 4 ranks")
    wire, mesh = zr.Wire(reduce="int4", feedback=True), zr.mesh(replicate=2, group=group)

    def digests(**ranks):
        with opened(ranks.pop("group", None), wire, virtual_shards=4, **ranks) as rt:
            unit = rt.register("block", zeros())
            found = []
            for step in range(2):
                for shard in rt.micro_batches:
                    unit.reduce(values_of(seed=10 * step + shard))
                found.append(rt.step().digest)
            return found

    with open_group(kind="solo") as solo:
        assert digests(mesh=mesh) == digests(group=solo)
