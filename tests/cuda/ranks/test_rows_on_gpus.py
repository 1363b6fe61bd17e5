"""Tables by rows on GPUs: the results of hosts and of dense tables, whatever the order of streams."""

import gpu_runs
import hardware
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import cupy

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError, NonFiniteError, PlanError, ZerortError
from zerort.native.dtypes import numpy_dtype

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

SHAPES = {"users": (53, 6), "items": (7, 70), "w": (6, 3)}
TABLES = ("users", "items")
ADAMW = zr.AdamW(lr=zr.warmup_cosine(0.02, warmup=2, total=12), weight_decay=0.1)
COUNTED = ("parameter", "gradient", "state", "buckets", "gathered", "host_copy", "streaming", "nvme")


def lot(*numbers):
    return np.random.default_rng(numbers)


def values_of(dtype="float64"):
    kind = numpy_dtype(dtype)
    return {name: lot(at).standard_normal(shape).astype(kind) for at, (name, shape) in enumerate(SHAPES.items())}


def open_run(group, plan, optimizer=ADAMW, *, rows=TABLES, lazy=False, dtype="float64", **options):
    rt = zr.open(plan, optimizer, group=group, clip_norm=2.0, **options)
    rt.register("model", values_of(dtype), rows=rows, lazy=lazy)
    return rt


def there(rt, value):
    """Return an array where the runtime computes."""
    if rt.device.owns(value):
        return value
    out = rt.device.zeros(value.size, value.dtype)
    rt.device.put(np.ascontiguousarray(value).reshape(-1), out=out)
    return out.reshape(value.shape)


def own_stream():
    """Return a stream for the caller, which waits for no other by itself: threads that save and load are on others."""
    return cupy.cuda.Stream(non_blocking=True)


def batch_of(step, at, name):
    """Return the rows of a micro-batch, some of them twice, and numbers from which its gradients are made."""
    count = 0 if (step + at) % 5 == 0 else 4
    rows = lot(step, at, len(name)).integers(0, SHAPES[name][0], count)
    return np.concatenate([rows, rows[:1]]), lot(step, at, 1 + len(name)).standard_normal((count + (count > 0), 1))


def train(rt, steps):
    """Train with gradients that depend on the rows as they are gathered; return reports."""
    unit, reports = rt.units["model"], []
    for step in steps:
        for at in rt.micro_batches:
            batch = {name: batch_of(step, at, name) for name in TABLES}
            dense = {"w": there(rt, lot(step, at).standard_normal(SHAPES["w"]))}
            if unit.tables:
                with unit.gathered(rows={name: rows for name, (rows, _) in batch.items()}) as p:
                    grads = {name: (rows, p[name] * there(rt, x)) for name, (rows, x) in batch.items()}
                unit.reduce(dense, rows=grads)
            else:
                with unit.gathered() as p:
                    for name, (rows, x) in batch.items():
                        whole = np.zeros(SHAPES[name])
                        np.add.at(whole, rows, rt.device.fetch(p[name])[rows] * x)
                        dense[name] = there(rt, whole)
                unit.reduce(dense)
        reports.append(rt.step())
    return reports


def weights(rt):
    with rt.units["model"].gathered() as p:
        return {name: np.array(rt.device.fetch(p[name])) for name in SHAPES}


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


CASES = {
    "zero1-micro-steps": (zr.Plan.zero(1), ADAMW, {"micro_steps": 2}),
    "zero2-momentum-uneven": (zr.Plan.zero(2), zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1), {"uneven": True}),
    "zero3": (zr.Plan.zero(3), ADAMW, {"param_groups": (zr.ParameterGroup("model.items", lr=0.05),)}),
    "zero3-lion-other-gradients-on-the-host": (zr.Plan.zero(3, gradient="host"), zr.Lion(lr=0.01), {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_train_as_dense_tables_on_hosts_do(gpus, case, shared_tmp_path):
    plan, optimizer, given = case
    options = {key: value for key, value in given.items() if key != "uneven"}
    if "uneven" in given:
        options["shard_weights"] = [1 + 2 * (rank % 2) for rank in range(gpus.size)]
    with open_group() as hosts, open_run(hosts, zr.Plan.zero(3), optimizer, rows=(), **options) as rt:
        expected_reports, expected = train(rt, range(9)), weights(rt)
    hardware.reseed(5 + gpus.size)  # streams come in another order
    with own_stream(), open_run(gpus, plan, optimizer, scratch=shared_tmp_path, **options) as rt:
        reports = train(rt, range(5))
        assert_current_rows(rt)
        reports += train(rt, range(5, 9))
        found = weights(rt)
        tables = [one for one in rt.units["model"].sections if one.table is not None]
        assert all(rt.device.owns(one.shard.memory) for one in tables)
        assert all(rt.device.owns(column.memory) for one in tables for column in one.state.columns.values())
    hardware.reseed(0)
    assert_close(found, expected)
    norms = [[one.grad_norm for one in each] for each in (reports, expected_reports)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-12)


def assert_current_rows(rt):
    """Rows in any order and twice are what the whole table has there, whichever of the two comes first."""
    wanted = {"users": [40, 3, 52, 3, 0], "items": []}
    with rt.units["model"].gathered(rows=wanted) as p:
        rows = {name: np.array(rt.device.fetch(p[name])) for name in SHAPES}
        assert all(map(rt.device.owns, p.values()))
    assert rows["items"].shape == (0, 70)
    whole = weights(rt)
    np.testing.assert_array_equal(rows["users"], whole["users"][wanted["users"]])
    np.testing.assert_array_equal(rows["w"], whole["w"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_tables_follow_their_master_weights(gpus, dtype):
    """With the bits of hosts: what is computed is the same, element by element, and sums are of two summands."""
    found, wide = [], {"gradient_dtype": "float32"} if dtype == "float16" else {}  # as GPUs sum them by themselves
    with open_group() as hosts:
        for group in (hosts, gpus):
            with zr.open(zr.Plan.zero(3), ADAMW, group=group, **wide) as rt:
                unit = rt.register("model", values_of(dtype), rows=TABLES)
                for step in range(6):
                    for name in TABLES:
                        rows = np.array([step, step + 1, step]) % SHAPES[name][0]
                        values = lot(step, rt.rank).standard_normal((3, SHAPES[name][1])).astype(numpy_dtype(dtype))
                        unit.add_rows({name: (rows, there(rt, values))})
                    unit.reduce()
                    rt.step()
                found.append({name: value.tobytes() for name, value in weights(rt).items()})
    assert found[0] == found[1]


def test_lazy_rows_stay_as_they_are(gpus):
    ends, reports = [], []
    with open_group() as hosts:
        for group in (hosts, gpus):
            with open_run(group, zr.Plan.zero(3), lazy=True) as rt:
                reports.append(train(rt, range(4))[-1])
                ends.append(weights(rt))
    assert_close(ends[1], ends[0])
    assert [one.rows for one in reports] == ["lazy model.users, lazy model.items"] * 2
    used = np.concatenate([batch_of(step, at, "users")[0] for step in range(4) for at in range(gpus.size)])
    untouched = np.setdiff1d(np.arange(SHAPES["users"][0]), used)
    np.testing.assert_array_equal(ends[1]["users"][untouched], values_of()["users"][untouched])


def test_a_checkpoint_of_rows_is_that_of_all_updates_on_gpus_and_hosts(gpus, shared_tmp_path):
    """Saved, loaded and published behind what rows have missed; on to hosts and back, by rows or not."""
    plan = zr.Plan.zero(3)
    hardware.reseed(7 + gpus.size)
    with own_stream(), open_run(gpus, plan) as rt:
        feed = rt.publish(shared_tmp_path / "feed", dtype=None)
        train(rt, range(3))
        feed.push().wait()
        pushed = weights(rt)
        train(rt, range(3, 4))
        rt.save(shared_tmp_path / "saved")
        saved = weights(rt)
        train(rt, range(4, 6))
        rt.load(shared_tmp_path / "saved")
        assert_close(weights(rt), saved)
        train(rt, range(4, 7))
        expected = weights(rt)
        train(rt, range(7, 9))
        rt.load(shared_tmp_path / "saved", optimizer=False)  # moments go on behind what rows have missed
        assert_close(weights(rt), saved)
    hardware.reseed(0)
    if WORLD.rank == 0:
        published = zr.Reader(shared_tmp_path / "feed").update()
        assert_close({name: published[f"model.{name}"] for name in SHAPES}, pushed)
    with open_group() as hosts:
        for group, rows in ((hosts, TABLES), (hosts, ()), (gpus, ())):
            with open_run(group, plan, rows=rows) as rt:
                rt.load(shared_tmp_path / "saved")
                assert_close(weights(rt), saved)
                train(rt, range(4, 7))
                assert_close(weights(rt), expected)
                rt.save(shared_tmp_path / "of others")
            with open_run(gpus, plan) as rt:
                rt.load(shared_tmp_path / "of others")
                assert_close(weights(rt), expected)


def test_the_last_step_is_kept_with_all_rows_up_to_date(gpus, shared_tmp_path):
    ends = []
    with open_group() as hosts, open_run(hosts, zr.Plan.zero(3), rows=()) as rt:
        train(rt, range(4))
        ends.append(weights(rt))
    for steps in (range(2), range(2, 4)):
        with own_stream(), open_run(gpus, zr.Plan.zero(3), last_step=shared_tmp_path / "kept") as rt:
            if steps.start:
                assert rt.resume().updates == steps.start
            train(rt, steps)
            ends.append(weights(rt))
    assert_close(ends[2], ends[0])


def test_rows_come_before_what_is_computed_with_them(gpus):
    """Between GPUs they travel on the group's stream; what is launched next waits there, whatever the order."""
    hardware.reseed(11 + gpus.size)
    with open_run(gpus, zr.Plan.zero(3)) as rt:
        unit = rt.units["model"]
        rows = {"users": [52, 0, 26, 52], "items": [6, 1, 0]}
        with unit.gathered(rows=rows) as p:
            found = {name: p[name] * 2.0 for name in TABLES}
        for name, value in found.items():
            np.testing.assert_array_equal(rt.device.fetch(value), 2.0 * values_of()[name][rows[name]])
        unit.reduce(rows={name: (rows[name], found[name]) for name in TABLES})
        seen = unit.reduced_gradients()
        for name in TABLES:
            whole = np.zeros(SHAPES[name])
            np.add.at(whole, rows[name], 2.0 * values_of()[name][rows[name]])
            np.testing.assert_allclose(seen[name], whole, rtol=1e-12)  # the mean over ranks that have the same
        rt.discard_gradients()
    hardware.reseed(0)


def test_a_whole_table_comes_before_it_is_used(gpus):
    hardware.reseed(13 + gpus.size)
    with open_run(gpus, zr.Plan.zero(3)) as rt:
        for _ in range(3):
            with rt.units["model"].gathered() as p:
                found = {name: p[name] + 1.0 for name in TABLES}
            for name, value in found.items():
                np.testing.assert_array_equal(rt.device.fetch(value), values_of()[name] + 1.0)
    hardware.reseed(0)


def test_new_values_come_behind_missed_updates(gpus):
    ends = []
    with open_group() as hosts:
        for group in (hosts, gpus):
            with open_run(group, zr.Plan.zero(3)) as rt:
                train(rt, range(3))
                rt.units["model"].assign({"users": np.full(SHAPES["users"], 2.0)})
                train(rt, range(3, 5))
                ends.append(weights(rt))
    assert_close(ends[1], ends[0])


def test_nan_in_a_row_is_reported_and_changes_nothing(gpus):
    last = gpus.size - 1
    with open_run(gpus, zr.Plan.zero(3)) as rt:
        train(rt, range(2))
        before, unit = weights(rt), rt.units["model"]
        values = np.full((1, 6), np.nan if gpus.rank == last else 1.0)
        unit.reduce(rows={"users": ([7], there(rt, values))})
        with pytest.raises(NonFiniteError, match=rf"'model\.users' on rank {last}"):
            rt.step()
        unit.reduce(rows={"users": ([7, 7], there(rt, np.full((2, 6), 1e308 / gpus.size)))})
        with pytest.raises(NonFiniteError, match=r"'model\.users'"):
            rt.step()
        assert_close(weights(rt), before)


def test_rows_travel_uncoded_beside_values_that_are_coded(gpus):
    """With the results of tables without `wire=`, whose gradients do not depend on what is coded."""
    ends = []
    for wire in (None, zr.Wire(gather="int8", reduce="int4", over="all")):
        with zr.open(zr.Plan.zero(3), ADAMW, group=gpus, wire=wire) as rt:
            unit = rt.register("model", values_of("float32"), rows=TABLES)
            for step in range(3):
                rows = {name: lot(step, gpus.rank).integers(0, SHAPES[name][0], 5) for name in TABLES}
                slopes = {name: lot(step).standard_normal((5, SHAPES[name][1])).astype(np.float32) for name in TABLES}
                grads = {name: (rows[name], there(rt, slopes[name])) for name in TABLES}
                unit.reduce({"w": there(rt, np.ones(SHAPES["w"], np.float32))}, rows=grads)
                report = rt.step()
            ends.append({name: value.tobytes() for name, value in weights(rt).items() if name in TABLES})
    assert ends[0] == ends[1]
    assert report.wire.endswith("rows of model.users, model.items travel uncoded")


def test_only_rows_travel_between_gpus(gpus):
    if gpus.size == 1:
        pytest.skip("nothing travels")
    with zr.open(zr.Plan.zero(3), ADAMW, group=gpus) as rt:
        unit = rt.register("embed", {"table": zr.TensorSpec((10_000, 64))}, rows=("table",))
        touched = lot(gpus.rank).choice(10_000, 100, replace=False)
        with unit.gathered(rows={"table": touched}) as p:
            unit.reduce(rows={"table": (touched, p["table"] + np.float32(1.0))})
        assert dict(rt.step().bytes_moved) == {"all_to_all": 2 * 100 * (64 * 4 + 4)}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_forecast_counts_rows_on_gpus(gpus, lazy):
    units = {"model": {name: zr.TensorSpec(shape, "float64") for name, shape in SHAPES.items()}}
    even, uneven = None, [1.0 + rank for rank in range(gpus.size)]
    for stage, shard_weights, options in ((1, even, {}), (2, uneven, {}), (3, even, {"virtual_shards": 4})):
        plan = zr.Plan.zero(stage)
        with zr.open(plan, ADAMW, group=gpus, shard_weights=shard_weights, **options) as rt:
            rt.register("model", units["model"], rows=TABLES, lazy=lazy)
            train(rt, range(2))
            counted = rt.memory()
        told = zr.forecast(
            units,
            plan=plan,
            optimizer=ADAMW,
            size=gpus.size,
            rank=gpus.rank,
            device="cuda",
            shard_weights=shard_weights,
            rows={"model": TABLES},
            lazy=lazy,
            **options,
        )
        for part in COUNTED:
            assert getattr(counted, part) == getattr(told, part), (stage, part)


ELSEWHERE = "in the memory of the GPU, got a plan with other tiers"
UNFIT = {
    "state-on-the-host": ({"plan": zr.Plan.zero(3, state="host")}, ELSEWHERE),
    "budget": ({"plan": zr.Plan.fit(host="1GiB")}, ELSEWHERE),
    "parameters-on-nvme": ({"plan": zr.Plan.zero(3, parameter="nvme")}, ELSEWHERE),
    "zero0": ({"plan": zr.Plan.zero(0)}, "with sharded state"),
    "int8": ({"optimizer": zr.AdamW(lr=0.1, moments="int8")}, "with state of full width"),
}


@pytest.mark.parametrize(("unfit", "text"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_have_rows_on_gpus_is_refused_by_name(gpus, unfit, text, shared_tmp_path):
    settings = {"plan": zr.Plan.zero(3), "optimizer": ADAMW, **unfit}
    with zr.open(group=gpus, scratch=shared_tmp_path, **settings) as rt:
        with pytest.raises((CallError, PlanError), match=text) as registered:
            rt.register("embed", {"table": np.ones((900, 5), np.float32)}, rows=("table",))
        assert not rt.units
    units = {"embed": {"table": zr.TensorSpec((900, 5))}}
    with pytest.raises((CallError, PlanError)) as forecast:
        zr.forecast(units, size=gpus.size, device="cuda", rows={"embed": ("table",)}, **settings)
    assert repr(forecast.value) == repr(registered.value)


@pytest.mark.skipif(WORLD.size == 1, reason="two copies")
def test_copies_of_the_model_are_refused_on_gpus_by_name(gpus):
    with zr.open(zr.Plan.zero(3), ADAMW, mesh=zr.mesh(shard=1, replicate=gpus.size, group=gpus)) as rt:
        with pytest.raises(PlanError, match="in one copy of the model on GPUs") as registered:
            rt.register("embed", {"table": np.ones((900, 5), np.float32)}, rows=("table",))
        assert not rt.units
    told = {"plan": zr.Plan.zero(3), "optimizer": ADAMW, "size": 1, "replicate": gpus.size, "device": "cuda"}
    with pytest.raises(PlanError) as forecast:
        zr.forecast({"embed": {"table": zr.TensorSpec((900, 5))}}, rows={"embed": ("table",)}, **told)
    assert str(forecast.value) == str(registered.value)


def test_wrong_rows_are_refused_on_every_rank(gpus):
    last = gpus.size - 1
    with open_run(gpus, zr.Plan.zero(3)) as rt:
        unit = rt.units["model"]
        for bad, text in (([53], "from 0 to 52, got 53"), (cupy.zeros(1, np.int64), "on the host, got cupy.ndarray")):
            given = {"users": bad if gpus.rank == last else [0], "items": []}
            with pytest.raises(CallError, match=text), unit.gathered(rows=given):
                pass
        train(rt, range(1))  # all ranks are where they were
        with pytest.raises(ZerortError, match="as a CuPy array on GPU"):
            reduce_and_step(rt, np.ones((1, 6)) if gpus.rank == last else there(rt, np.ones((1, 6))))


def reduce_and_step(rt, values):
    rt.units["model"].reduce(rows={"users": ([0], values)})
    rt.step()
