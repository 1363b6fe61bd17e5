"""Tables by rows: the results of dense runs, for the bytes of the rows that a batch touches."""

from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort.comm import open_group
from zerort.config import GroupOptions
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, ZerortError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SHAPES = {"users": (53, 6), "items": (7, 70), "w": (6, 3)}
TABLES = ("users", "items")
GROUPS = (zr.ParameterGroup("model.items", lr=0.05, weight_decay=0.2),)


@pytest.fixture
def kind():
    return "mpi"


@pytest.fixture
def group(kind):
    if WORLD.size > 4:
        pytest.skip("1 to 4 ranks")
    options = GroupOptions(timeout=60.0)
    with open_hosts(options) if kind == "hierarchical" else open_group(kind=kind, options=options) as made:
        yield made


everywhere = pytest.mark.parametrize("kind", ["node", pytest.param("mpi", id="over-mpi"), "hierarchical"])


@pytest.fixture
def shared(tmp_path):
    return WORLD.bcast(str(tmp_path))


def lot(*numbers):
    return np.random.default_rng(numbers)


def values_of(dtype="float64"):
    return {name: lot(at).standard_normal(shape).astype(dtype) for at, (name, shape) in enumerate(SHAPES.items())}


def open_run(group, stage, *, rows, optimizer=None, on_disk=(), **options):
    optimizer = zr.AdamW(lr=0.02, weight_decay=0.1) if optimizer is None else optimizer
    rt = zr.open(
        zr.Plan.zero(stage, **dict.fromkeys(on_disk, "nvme")), optimizer, group=group, clip_norm=2.0, **options
    )
    rt.register("model", values_of(), rows=TABLES if rows else ())
    return rt


def batch_of(step, at, name):
    """Return the rows of a micro-batch, some of them twice, and numbers from which its gradients are made."""
    count = 0 if (step + at) % 5 == 0 else 4
    rows = lot(step, at, len(name)).integers(0, SHAPES[name][0], count)
    return np.concatenate([rows, rows[:1]]), lot(step, at, 1 + len(name)).standard_normal((count + (count > 0), 1))


def train(rt, steps):
    """Train with gradients that depend on the rows as they are gathered; return reports."""
    unit, reports = rt.units["model"], []
    by_rows = any(section.table is not None for section in unit.sections)
    for step in steps:
        for at in rt.micro_batches:
            batch = {name: batch_of(step, at, name) for name in TABLES}
            dense = {"w": lot(step, at).standard_normal(SHAPES["w"])}
            if by_rows:
                with unit.gathered(rows={name: rows for name, (rows, _) in batch.items()}) as p:
                    grads = {name: (rows, p[name] * x) for name, (rows, x) in batch.items()}
                unit.reduce(dense, rows=grads)
            else:
                with unit.gathered() as p:
                    for name, (rows, x) in batch.items():
                        dense[name] = np.zeros(SHAPES[name])
                        np.add.at(dense[name], rows, p[name][rows] * x)
                unit.reduce(dense)
        reports.append(rt.step())
    return reports


def weights(rt):
    with rt.units["model"].gathered() as p:
        return {name: np.array(p[name]) for name in SHAPES}


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int
    optimizer: object = None
    micro_steps: int = 1
    shard_weights: bool = False
    on_disk: tuple[str, ...] = ()


CASES = {
    "node-zero1": Case("node", 1, micro_steps=2),
    "node-zero3": Case("node", 3),
    "over-mpi-zero2-sgd": Case("mpi", 2, zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1), shard_weights=True),
    "over-mpi-zero3": Case("mpi", 3, micro_steps=2),
    "hierarchical-zero3": Case("hierarchical", 3),
    "node-zero1-state-on-disk": Case("node", 1, micro_steps=2, on_disk=("state",)),
    "over-mpi-zero3-on-disk": Case("mpi", 3, on_disk=("parameter", "gradient", "state")),
    "hierarchical-zero3-parameters-on-disk": Case(
        "hierarchical", 3, zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1), on_disk=("parameter",), shard_weights=True
    ),
}


@pytest.mark.parametrize(("kind", "case"), [(case.kind, case) for case in CASES.values()], ids=CASES)
def test_rows_train_as_dense_tables_do(group, case, shared):
    options = {"optimizer": case.optimizer, "micro_steps": case.micro_steps}
    if case.optimizer is None:
        options["param_groups"] = GROUPS
    if case.shard_weights:
        options["shard_weights"] = [1 + 2 * (rank % 2) for rank in range(group.size)]
    with open_run(group, case.stage, rows=False, **options) as rt:
        expected_reports = train(rt, range(9))
        expected = weights(rt)
    with open_run(group, case.stage, rows=True, on_disk=case.on_disk, scratch=shared, **options) as rt:
        reports = train(rt, range(5))
        assert_current_rows(rt)
        reports += train(rt, range(5, 9))
        assert_close(weights(rt), expected)
        for section in rt.units["model"].sections:
            if section.table is not None:  # cuts are between rows: each has one owner
                width = section.layout.extents[0].shape[1]
                assert all(first % width == 0 or first == section.layout.numel for first in section.partition.offsets)
    norms = [[one.grad_norm for one in each] for each in (reports, expected_reports)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-12)


def assert_current_rows(rt):
    """Rows in any order and twice are what the whole table has there, whichever of the two comes first."""
    unit = rt.units["model"]
    wanted = {"users": [40, 3, 52, 3, 0], "items": []}
    with unit.gathered(rows=wanted) as p:
        rows = {name: np.array(p[name]) for name in SHAPES}
        assert not p["users"].flags.writeable
    assert rows["items"].shape == (0, 70)
    whole = weights(rt)
    np.testing.assert_array_equal(rows["users"], whole["users"][wanted["users"]])
    np.testing.assert_array_equal(rows["w"], whole["w"])


def test_a_checkpoint_goes_on_with_other_ranks_with_rows_or_without(group, shared):
    with open_run(group, 3, rows=True) as rt:
        train(rt, range(4))
        rt.save(f"{shared}/saved")
        saved = weights(rt)
    fewer = group.split(0 if group.rank < max(group.size - 1, 1) else None)
    if fewer is not None:  # the last rank is not needed any more
        ends = []
        for rows in (False, True):
            with fewer.split(0) as ranks, open_run(ranks, 2, rows=rows) as rt:
                train(rt, range(2))
                assert rt.load(f"{shared}/saved").updates == 4
                assert_close(weights(rt), saved)
                train(rt, range(4, 8))
                ends.append(weights(rt))
                rt.load(f"{shared}/saved", optimizer=False)
                train(rt, range(8, 10))
                ends.append(weights(rt))
        assert_close(ends[2], ends[0])
        assert_close(ends[3], ends[1])
        fewer.close()


def test_one_percent_of_the_rows_moves_two_percent_of_the_bytes(group):
    if group.size == 1:
        pytest.skip("nothing travels")
    moved = {}
    for rows in ((), ("table",)):
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), group=group) as rt:
            unit = rt.register("embed", {"table": TensorSpec((10_000, 64))}, rows=rows)
            touched = lot(group.rank).choice(10_000, 100, replace=False)
            if rows:
                with unit.gathered(rows={"table": touched}) as p:
                    unit.reduce(rows={"table": (touched, p["table"] + np.float32(1.0))})
            else:
                with unit.gathered() as p:
                    unit.reduce({"table": np.ones_like(p["table"])})
            moved[rows] = dict(rt.step().bytes_moved)
    assert set(moved["table",]) == {"all_to_all"}
    assert moved["table",]["all_to_all"] == 2 * 100 * (64 * 4 + 4)
    dense = 10_000 * 64 * 4
    assert moved[()]["reduce_scatter"] == dense
    assert moved["table",]["all_to_all"] <= 0.02 * 2 * dense


@pytest.mark.parametrize(("kind", "lazy"), [("node", False), ("mpi", False), ("mpi", True)])
def test_a_forecast_counts_rows(group, lazy):
    units = {"model": {name: TensorSpec(shape, "float64") for name, shape in SHAPES.items()}}
    for stage in (1, 2, 3):
        plan, optimizer = zr.Plan.zero(stage), zr.AdamW(lr=0.1)
        uneven = [1.0 + rank for rank in range(group.size)]
        with zr.open(plan, optimizer, group=group, shard_weights=uneven) as rt:
            rt.register("model", units["model"], rows=TABLES, lazy=lazy)
            train(rt, range(2))
            counted = rt.memory()
        told = zr.forecast(
            units,
            plan=plan,
            optimizer=optimizer,
            size=group.size,
            rank=group.rank,
            shard_weights=uneven,
            one_memory=group.one_memory,
            rows={"model": TABLES},
            lazy=lazy,
        )
        for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming", "nvme"):
            assert getattr(counted, part) == getattr(told, part), (stage, part)


def test_sums_do_not_depend_on_the_order_of_the_ranks(group):
    """Of float32 gradients that lose bits in one order and not in another, to the bit."""
    found = []
    for turn in range(2):
        with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, reduction="sum") as rt:
            unit = rt.register("embed", {"table": TensorSpec((11, 33))}, rows=("table",))
            sender = (group.rank + turn) % group.size
            values = lot(sender).standard_normal((11, 33)).astype(np.float32) * np.float32(10.0) ** (3 * sender)
            unit.reduce(rows={"table": (np.arange(11), values)})
            rt.step()
            with unit.gathered() as p:
                found.append(np.array(p["table"]))
    np.testing.assert_array_equal(found[0].view(np.int32), found[1].view(np.int32))


@everywhere
def test_wrong_rows_are_refused_on_every_rank(group):
    last = group.size - 1
    with open_run(group, 3, rows=True) as rt:
        unit, bad = rt.units["model"], [53] if group.rank == last else [0]
        with pytest.raises(CallError, match="from 0 to 52, got 53"), unit.gathered(rows={"users": bad, "items": []}):
            pass
        train(rt, range(1))  # all ranks are where they were
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), group=group) as rt:
        if group.size > 1:
            with pytest.raises(ZerortError, match="to be the same on every rank, got rows"):
                rt.register("model", values_of(), rows=TABLES[: 1 + (group.rank == last)])
        unit = rt.register("model", {"users": values_of()["users"]}, rows=("users",))
        indices = [-1 if group.rank == last else 0]
        with pytest.raises(CallError, match="from 0 to 52, got -1"):
            reduce_and_step(rt, unit, rows={"users": (indices, np.ones((1, 6)))})


def reduce_and_step(rt, unit, **gradients):
    unit.reduce(**gradients)
    rt.step()
