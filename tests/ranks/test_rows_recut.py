"""Tables by rows whose bits do not depend on the ranks: `virtual_shards`, and cuts that change (`rt.rebalance`)."""

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort.comm import open_group
from zerort.engine.model.tensors import TensorSpec

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SHAPES = {"users": (5_000, 6), "items": (300, 70), "w": (6, 3)}
TABLES, SHARDS, STEPS = ("users", "items"), 8, 5


def lot(*numbers):
    return np.random.default_rng(numbers)


def values_of(dtype="float32"):
    return {name: lot(at).standard_normal(shape).astype(dtype) for at, (name, shape) in enumerate(SHAPES.items())}


def open_kind(kind, options):
    return open_hosts(options) if kind == "hierarchical" else open_group(kind=kind, options=options)


def train(rt, steps, *, before=lambda rt, step: None):
    """Train with gradients of rows as they are gathered; some micro-batches have none. Return the digests."""
    unit, found = rt.units["model"], []
    for step in steps:
        before(rt, step)
        for at in rt.micro_batches:
            rows = {name: lot(step, at, len(name)).integers(0, SHAPES[name][0], 9 * (at != step)) for name in TABLES}
            with unit.gathered(rows=rows) as p:
                slopes = {name: (lot(step, at, 7).standard_normal((len(p[name]), 1)) * p[name]) for name in TABLES}
            unit.reduce(
                {"w": lot(step, at).standard_normal(SHAPES["w"]).astype(np.float32)},
                rows={name: (rows[name], slopes[name].astype(np.float32)) for name in TABLES},
            )
        found.append(rt.step().digest)
    return found


def run(group, stage=3, *, optimizer=None, lazy=False, before=lambda rt, step: None):
    """Return the digest of every step, and of the whole tables, up to date, at the end."""
    optimizer = zr.AdamW(lr=0.02, weight_decay=0.1) if optimizer is None else optimizer
    with zr.open(zr.Plan.zero(stage), optimizer, group=group, virtual_shards=SHARDS, clip_norm=0.5) as rt:
        unit = rt.register("model", values_of(), rows=TABLES, lazy=lazy)
        found = train(rt, range(STEPS), before=before)
        with unit.gathered() as p:
            return [*found, *(p[name].tobytes() for name in SHAPES)]


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "stage"), [("node", 1), ("mpi", 3), ("hierarchical", 3)])
def test_any_number_of_ranks_has_the_bits_of_one(options, kind, stage):
    with open_group(kind="solo") as solo:
        expected = run(solo)
    assert len(set(expected[:STEPS])) == STEPS
    with open_kind(kind, options) as group:
        assert run(group, stage) == expected


def cut_anew(rt, step):
    """Cut all shards anew before most of the steps, some ranks without any."""
    weights = lot(rt.size, step).integers(0, 4, rt.size)
    rt.rebalance(shard_weights=weights if weights.any() else None)


@pytest.mark.parametrize(("kind", "stage", "lazy"), [("node", 3, False), ("mpi", 2, False), ("mpi", 3, True)])
def test_cuts_that_change_give_the_bits_of_one_that_never_did(options, kind, stage, lazy):
    with open_group(kind="solo") as solo:
        expected = run(solo, lazy=lazy)
    with open_kind(kind, options) as group:
        assert run(group, stage, lazy=lazy, before=cut_anew) == expected


@pytest.mark.parametrize("kind", ["node", "mpi"])
def test_a_forecast_counts_rows_that_are_cut_by_blocks_and_anew(options, kind):
    units = {"model": {name: TensorSpec(shape) for name, shape in SHAPES.items()}}
    plan, optimizer = zr.Plan.zero(3), zr.AdamW(lr=0.1)
    with open_kind(kind, options) as group, zr.open(plan, optimizer, group=group, virtual_shards=SHARDS) as rt:
        rt.register("model", units["model"], rows=TABLES)
        for weights in (None, [1.0 + rank for rank in range(group.size)]):
            if weights is not None:
                rt.rebalance(shard_weights=weights)
            train(rt, range(2))
            counted = rt.memory()
            told = zr.forecast(
                units,
                plan=plan,
                optimizer=optimizer,
                size=group.size,
                rank=group.rank,
                shard_weights=weights,
                one_memory=group.one_memory,
                virtual_shards=SHARDS,
                rows={"model": TABLES},
            )
            for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming", "nvme"):
                assert getattr(counted, part) == getattr(told, part), (weights, part)


@pytest.mark.parametrize("optimizer", [zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1), zr.Lion(lr=0.01)])
def test_rows_that_move_train_on_as_dense_tables_do(options, optimizer):
    """In float64: what a row has missed goes with it to its new rank."""
    ends = []
    for rows in ((), TABLES):
        with open_group(kind="mpi", options=options) as group, zr.open(zr.Plan.zero(2), optimizer, group=group) as rt:
            unit = rt.register("model", values_of("float64"), rows=rows)
            for step in range(STEPS):
                if step:
                    cut_anew(rt, step)
                touched = lot(step, rt.rank).integers(0, 300, 9)
                gradients = {
                    name: (touched, lot(step, rt.rank, 1).standard_normal((9, SHAPES[name][1]))) for name in TABLES
                }
                dense = {"w": np.ones(SHAPES["w"])}
                if rows:
                    unit.reduce(dense, rows=gradients)
                else:
                    for name, (indices, values) in gradients.items():
                        dense[name] = np.zeros(SHAPES[name])
                        np.add.at(dense[name], indices, values)
                    unit.reduce(dense)
                rt.step()
            with unit.gathered() as p:
                ends.append({name: np.array(p[name]) for name in SHAPES})
    for name, expected in ends[0].items():
        np.testing.assert_allclose(ends[1][name], expected, rtol=1e-12, atol=1e-12, err_msg=name)
