"""Tables by rows in copies of the model: rows of all copies are summed, and copies stay equal to the bit."""

import contextlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError, StorageError, ZerortError
from zerort.storage.files.faults import injected

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size not in (2, 3, 4), reason="2 to 4 ranks")]

SMALL = zr.OffloadOptions(chunk_nbytes=16_384, threads=1, depth=2)
SHAPES = {"users": (3_000, 6), "items": (400, 70), "w": (6, 3)}
TABLES = ("users", "items")
ADAMW = zr.AdamW(lr=0.02, weight_decay=0.1)
SHARD = 2 if WORLD.size == 4 else 1  # two copies on two ranks each; on one rank each, two or three


def lot(*numbers):
    return np.random.default_rng(numbers)


@pytest.fixture(params=["node", pytest.param("mpi", id="over-mpi")])
def group(request, options):
    with open_group(kind=request.param, options=options) as made:
        yield made


@pytest.fixture
def shared(tmp_path):
    return WORLD.bcast(str(tmp_path))


def open_run(group, *, rows=TABLES, shard=SHARD, stage=3, on_disk=(), dtype="float64", **settings):
    plan = settings.pop("plan", None) or zr.Plan.zero(stage, **dict.fromkeys(on_disk, "nvme"))
    ranks = zr.mesh(shard=shard, replicate=group.size // shard, group=group)
    rt = zr.open(plan, settings.pop("optimizer", ADAMW), mesh=ranks, offload=SMALL, **settings)
    values = {name: lot(len(name)).standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    rt.register("model", values, rows=rows)
    return rt


def train(rt, steps, *, dtype="float64", looks=False):
    """Train; with ``looks``, the first copy alone gathers rows that it does not reduce, and whole tables."""
    unit = rt.units["model"]
    by_rows = bool(unit.tables)
    for step in steps:
        for at in rt.micro_batches:
            batch = {name: lot(step, at, len(name)).integers(0, SHAPES[name][0], 9) for name in TABLES}
            scale = {name: lot(step, at, 1 + len(name)).standard_normal((9, 1)).astype(dtype) for name in TABLES}
            dense = {"w": lot(step, at).standard_normal(SHAPES["w"]).astype(dtype)}
            if by_rows:
                with unit.gathered(rows=batch) as p:
                    rows = {name: (batch[name], (p[name] * scale[name]).astype(dtype)) for name in TABLES}
                unit.reduce(dense, rows=rows)
            else:
                with unit.gathered() as p:
                    for name in TABLES:
                        dense[name] = np.zeros(SHAPES[name], dtype)
                        np.add.at(dense[name], batch[name], p[name][batch[name]] * scale[name])
                unit.reduce(dense)
        rt.step()
        if looks and rt.mesh.copy == 0:
            with unit.gathered(rows={"users": np.arange(0, 3_000, 2), "items": np.arange(300)}):
                pass
            if step % 2:
                weights(rt)


def weights(rt):
    with rt.units["model"].gathered() as p:
        return {name: np.array(p[name]) for name in SHAPES}


def state_bits(rt):
    """Return all that this rank holds of tables, as it lies, by place in a copy."""
    sections = [section for section in rt.units["model"].sections if section.table is not None]
    columns = [one for section in sections for one in (section.shard, *section.state.columns.values())]
    bits = [one.read(0, np.empty(one.size, one.dtype)).wait().tobytes() for one in columns]
    return rt.mesh.shard.rank, [*bits, *(section.table.touched.tobytes() for section in sections)]


def assert_equal_copies(rt):
    """All copies hold the same bits, up to date or not."""
    everyone = WORLD.allgather(state_bits(rt))
    found = dict(everyone)
    assert all(found[place] == bits for place, bits in everyone)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (3, {}),
        (1, {"micro_steps": 2}),
        (2, {"optimizer": zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1)}),
        (3, {"on_disk": ("parameter", "state")}),
        (3, {"plan": zr.Plan.fit(host="1MiB", nvme="1GiB")}),
    ],
    ids=["zero3", "zero1", "zero2-sgd", "on-disk", "budget"],
)
def test_copies_train_as_a_dense_model_does_and_stay_equal(group, shared, stage, settings):
    plain = {key: value for key, value in settings.items() if key not in ("on_disk", "plan")}
    with open_run(group, rows=(), stage=stage, **plain) as rt:
        train(rt, range(7))
        expected = weights(rt)
    with open_run(group, stage=stage, scratch=shared, **settings) as rt:
        train(rt, range(4), looks=True)
        assert_equal_copies(rt)
        train(rt, range(4, 7), looks=True)
        assert_equal_copies(rt)
        found = weights(rt)
        assert_equal_copies(rt)  # a look at all of it has written nothing
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("dtype", "digest"), [("float32", None), ("bfloat16", False)])
def test_no_bit_depends_on_the_mesh(group, shared, dtype, digest):
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    ends = []
    shards = {1, SHARD, group.size}
    for shard, on_disk in [*((one, ()) for one in sorted(shards)), (SHARD, ("parameter", "state"))]:
        options = {"shard": shard, "on_disk": on_disk, "dtype": dtype, "virtual_shards": 8, "digest": digest}
        if shard == group.size:
            options["plan"] = zr.Plan.fit(host="1GiB")  # one copy, of which a look at rows writes nothing either
        with open_run(group, scratch=shared, **options) as rt:
            train(rt, range(5), dtype=dtype)
            assert_equal_copies(rt)
            ends.append([value.tobytes() for value in weights(rt).values()])
    assert all(one == ends[0] for one in ends)


def test_a_checkpoint_of_copies_loads_into_one_and_back(group, shared):
    with open_run(group) as rt:
        train(rt, range(3), looks=True)
        rt.save(f"{shared}/saved")
        saved = weights(rt)
        train(rt, range(3, 6))
        expected = weights(rt)
    for shard in (SHARD, group.size):
        with open_run(group, shard=shard) as rt:
            train(rt, range(2))
            assert rt.load(f"{shared}/saved").updates == 3
            for name, value in saved.items():
                np.testing.assert_allclose(weights(rt)[name], value, rtol=1e-12, atol=1e-12)
            train(rt, range(3, 6))
            assert_equal_copies(rt)
            for name, value in expected.items():
                np.testing.assert_allclose(weights(rt)[name], value, rtol=1e-12, atol=1e-12)


def test_bytes_between_copies_are_those_of_rows(group):
    """Of each rank's nine rows of 70 float32: to their owner, and from each owner to those of the other copies."""
    ranks = zr.mesh(shard=SHARD, replicate=group.size // SHARD, group=group)
    with zr.open(zr.Plan.zero(3), ADAMW, mesh=ranks) as rt:
        unit = rt.register("embed", {"items": lot(1).standard_normal((400, 70), np.float32)}, rows=("items",))
        rows = 40 * rt.rank + np.arange(9)  # all of the first rank of a copy
        unit.reduce(rows={"items": (rows, np.ones((9, 70), np.float32))})
        moved = dict(rt.step().bytes_moved)
        each = 9 * (4 + 70 * 4)
        expected = {"all_gather": group.size * each * (rt.mesh.shard.rank == 0)}
        assert moved == {**expected, **({"all_to_all": each} if SHARD > 1 else {})}
        assert (
            rt.memory().at_rest
            == zr.forecast(
                {"embed": {"items": zr.TensorSpec((400, 70))}},
                plan=zr.Plan.zero(3),
                optimizer=ADAMW,
                size=SHARD,
                rank=rt.mesh.shard.rank,
                replicate=group.size // SHARD,
                rows={"embed": ("items",)},
            ).at_rest
        )


def test_what_one_copy_cannot_gather_the_others_hear_of(group, shared):
    """The ranks of that copy raise at once, the others in their step; then all go on."""
    with open_run(group, on_disk=("state",), scratch=shared) as rt:  # which only rows read that have missed updates
        train(rt, range(2))
        unit = rt.units["model"]
        last = WORLD.size // SHARD - 1

        def gather_and_step(rows):
            with unit.gathered(rows=rows):
                pass
            rt.step()

        with pytest.raises(ZerortError, match="from 0 to 399"):
            gather_and_step({"users": [0], "items": [400 if rt.mesh.copy == last else 0]})
        train(rt, range(2, 3))
        broken = injected("eio@1:times=all:op=read") if rt.rank == 0 else contextlib.nullcontext()
        with broken, pytest.raises((StorageError, CallError), match=r"Expected .*read"):
            gather_and_step({"users": np.arange(3_000) if rt.mesh.copy == 0 else [], "items": []})
        train(rt, range(3, 4))
        assert_equal_copies(rt)


FAILURES = {  # what is on a disk, and whether a unit is reduced before the gather that fails
    "indices": ((), False),
    "indices-later": ((), True),
    "rows-on-disk": (("state",), True),
    "dense-on-disk": (("parameter",), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["node", "mpi"])
@pytest.mark.parametrize("failure", FAILURES)
def test_nobody_waits_for_sums_over_copies_that_a_failed_gather_keeps_a_copy_from(options, shared, kind, failure):
    """Other copies have reduced units by then, and called for the sums; all go on as if they had not."""
    on_disk, reduces_before = FAILURES[failure]

    def walk(rt, step, *, fails=False):
        first, unit, last = (rt.units[name] for name in ("first", "model", "last"))
        gradient = {"w": lot(step, rt.rank).standard_normal((6, 3))}
        if reduces_before:
            first.reduce(gradient)
        here = fails and rt.mesh.copy == 0
        items = [400] if here and not on_disk else np.arange(400)
        faulty = injected("eio@1:times=all:op=read") if here and on_disk else contextlib.nullcontext()
        with faulty, unit.gathered(rows={"users": np.arange(3_000), "items": items}) as p:  # most have missed updates
            rows = {"users": ([step], p["users"][[step]]), "items": (items, 0.1 * p["items"])}
        unit.reduce({"w": gradient["w"]}, rows=rows)
        if not reduces_before:
            first.reduce(gradient)
        last.reduce(gradient)
        return rt.step()

    ends = []
    for fails in (False, True):
        with (
            open_group(kind=kind, options=replace(options, timeout=30.0)) as group,
            open_run(group, on_disk=on_disk, scratch=shared) as rt,
        ):
            for name in ("first", "last"):
                rt.register(name, {"w": np.ones((6, 3))})
            norms = [walk(rt, step).grad_norm for step in range(2)]
            if fails:
                with pytest.raises((StorageError, CallError), match=r"from 0 to 399|Expected .*read"):
                    walk(rt, 2, fails=True)
                rt.discard_gradients()
            norms += [walk(rt, step).grad_norm for step in range(2, 5)]
            assert_equal_copies(rt)
            ends.append([norms, [value.tobytes() for value in weights(rt).values()]])
    assert ends[0] == ends[1]
