"""Tables by rows under `Plan.fit`: results of dense runs, bytes of forecasts, and the same bits wherever rows rest."""

import os

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.config import Tier
from zerort.engine.sizing.forecast import MemoryForecast
from zerort.engine.sizing.requirements import ModelSpec
from zerort.errors import CallError, PlanError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

SMALL = zr.OffloadOptions(chunk_nbytes=16_384, threads=1, depth=2)
SHAPES = {"users": (3_000, 6), "items": (400, 70)}
ADAMW = zr.AdamW(lr=0.02, weight_decay=0.1)
KIB = 1024


def lot(*numbers):
    return np.random.default_rng(numbers)


@pytest.fixture
def group(options):
    if WORLD.size > 4:
        pytest.skip("1 to 4 ranks")
    with open_group(kind="mpi", options=options) as made:
        yield made


@pytest.fixture
def shared(tmp_path):
    return WORLD.bcast(str(tmp_path))


def values_of(dtype):
    tables = {name: lot(len(name)).standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    return {"line": {"w": lot(3).standard_normal(9_000).astype(dtype)}, "tables": tables}


def specs_of(dtype):
    return {
        unit: {name: zr.TensorSpec(value.shape, dtype) for name, value in one.items()}
        for unit, one in values_of(dtype).items()
    }


def open_run(group, plan, *, rows=tuple(SHAPES), dtype="float64", announced=True, first="line", **settings):
    rt = zr.open(plan, ADAMW, group=group, offload=SMALL, **settings)
    order = {first: None, "line": None, "tables": None}
    if announced:
        rt.expect({unit: specs_of(dtype)[unit] for unit in order}, rows={"tables": rows})
    for unit in order:
        values = values_of(dtype)[unit]
        rt.register(unit, values, rows=rows if unit == "tables" else ())
    return rt


def train(rt, steps, *, rows=True, dtype="float64"):
    tables, line = rt.units["tables"], rt.units["line"]
    for step in steps:
        for at in rt.micro_batches:
            batch = {name: lot(step, at, len(name)).integers(0, shape[0], 9) for name, shape in SHAPES.items()}
            scale = {name: lot(step, at, 1 + len(name)).standard_normal((9, 1)).astype(dtype) for name in SHAPES}
            if rows:
                with tables.gathered(rows=batch) as p:
                    tables.reduce(rows={name: (batch[name], p[name] * scale[name]) for name in SHAPES})
            else:
                whole = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
                with tables.gathered() as p:
                    for name in SHAPES:
                        np.add.at(whole[name], batch[name], p[name][batch[name]] * scale[name])
                tables.reduce(whole)
            line.reduce({"w": np.full(9_000, 0.01 * at, dtype)})
        rt.step()


def weights(rt):
    with rt.units["tables"].gathered() as p, rt.units["line"].gathered() as q:
        return {**{name: np.array(p[name]) for name in SHAPES}, "w": np.array(q["w"])}


def least_of(size, **settings):
    """Return the least memory that a run fits into, in bytes, as a refusal names it."""
    with pytest.raises(PlanError, match=r"^Expected at least \S+ of memory per rank") as caught:
        zr.forecast(specs_of("float64"), plan=zr.Plan.fit(host="1KiB", nvme="1GiB"), size=size, **settings)
    return zr.Plan.fit(host=str(caught.value).split()[3]).memory


def tiers_of(rt):
    return {section.name.split()[-1]: section.tiers for section in rt.units["tables"].sections}


def extra_that_cuts_state(least, size, *, one_memory, **told):
    """Return how much more memory leaves a table's state partly in memory, partly on the disk, in KiB."""
    spec = ModelSpec(units=specs_of("float64"), plan=zr.Plan.zero(3), size=size, optimizer=ADAMW, rows=told["rows"])
    for extra in range(0, 2_000, 8):
        budget = zr.Plan.fit(host=least + extra * KIB, nvme="1GiB")
        try:
            seen = MemoryForecast.of(spec, budget, offload=SMALL, one_memory=one_memory)
        except PlanError:  # where more memory has just made chunks longer
            continue
        pairs = zip(seen.working.sizes, seen.tiers, strict=True)
        if any(one.row_width and tiers.state_resident_nbytes > 16 * KIB for one, tiers in pairs):
            return extra
    pytest.fail("no budget cuts a table's state")


@pytest.mark.parametrize("extra", [0, 40, None, 2_000])
def test_a_run_within_a_budget_is_a_dense_one_and_takes_what_the_forecast_says(group, shared, extra):
    told = {"optimizer": ADAMW, "offload": SMALL, "one_memory": group.one_memory, "rows": {"tables": tuple(SHAPES)}}
    least = least_of(group.size, **told)
    if extra is None:
        extra = extra_that_cuts_state(least, group.size, **told)
    budget = zr.Plan.fit(host=least + extra * KIB, nvme="1GiB")
    with open_run(group, zr.Plan.zero(3), rows=()) as rt:
        train(rt, range(6), rows=False)
        expected = weights(rt)
    with open_run(group, budget, scratch=shared) as rt:
        train(rt, range(6))
        counted = rt.memory()
        found = weights(rt)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    seen = zr.forecast(specs_of("float64"), plan=budget, size=group.size, rank=group.rank, **told)
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "nvme"):
        assert getattr(counted, part) == getattr(seen, part), part
    assert counted.streaming <= seen.streaming
    held = counted.at_rest + counted.buckets + counted.gathered + counted.streaming
    assert held <= budget.memory
    assert (counted.nvme > 0) == (extra < 2_000)


def test_tables_leave_memory_before_what_every_step_uses_whole(group, shared):
    line = 4 * 8 * 9_000  # parameter, gradient, two moments
    told = {"optimizer": ADAMW, "offload": SMALL, "one_memory": group.one_memory, "rows": {"tables": tuple(SHAPES)}}
    budget = zr.Plan.fit(host=least_of(group.size, **told) + line // group.size, nvme="1GiB")
    with open_run(group, budget, first="tables", scratch=shared) as rt:
        (dense,) = rt.units["line"].sections
        assert (dense.tiers.parameter, dense.tiers.gradient, dense.tiers.state) == (Tier.DEVICE,) * 3
        assert all(one.state is Tier.NVME for one in tiers_of(rt).values())


def test_neither_where_rows_rest_nor_the_number_of_ranks_shows_in_a_bit(group, shared):
    """In float32, of which every look at a row that were written would round another time."""
    bits = []
    with group.split(group.rank) as alone:
        for ranks, room in ((group, 8_000), (group, 700), (alone, 700)):
            budget = zr.Plan.fit(host=room * KIB, nvme="1GiB")
            settings = {"dtype": "float32", "scratch": f"{shared}/{ranks.size}-{group.rank // ranks.size}"}
            os.makedirs(settings["scratch"], exist_ok=True)
            with open_run(ranks, budget, virtual_shards=4, digest=False, **settings) as rt:
                train(rt, range(4), dtype="float32")
                with rt.units["tables"].gathered(rows={"users": np.arange(0, 3_000, 2), "items": np.arange(300)}):
                    pass
                train(rt, range(4, 8), dtype="float32")
                bits.append([value.tobytes() for value in weights(rt).values()])
                assert (rt.memory().nvme > 0) == (room == 700)
    assert bits[0] == bits[1] == bits[2]


def test_a_unit_is_registered_with_the_rows_that_it_was_announced_with(group, shared):
    budget = zr.Plan.fit(host="64MiB", nvme="1GiB")
    with zr.open(budget, ADAMW, group=group, scratch=shared) as rt:
        rt.expect(specs_of("float32"), rows={"tables": ("users",)}, lazy={"tables": True})
        params = specs_of("float32")["tables"]
        for given in ({}, {"rows": ("users",)}, {"rows": ("users", "items"), "lazy": True}):
            with pytest.raises(CallError, match="rows= and lazy= that it was announced with"):
                rt.register("tables", params, **given)
        rt.register("tables", params, rows=("users",), lazy=True)
        for odd in (
            {"rows": {"more": ("w",)}},
            {"rows": ("w",)},
            {"rows": {"more": 3}},
            {"rows": {"more": ("t",)}, "lazy": 3},
            {"rows": {"more": ("t",)}, "lazy": {"more": np.bool_(True)}},
        ):
            with pytest.raises(CallError, match=r"^Expected (rows|lazy=True)"):
                rt.expect({"more": {"t": zr.TensorSpec((4, 4))}}, **odd)
        if group.size > 1:
            with pytest.raises(CallError, match="what is announced"):
                rt.expect({"more": {"t": zr.TensorSpec((4, 4))}}, rows={"more": ("t",) * (group.rank == 0)})


def test_units_that_nobody_has_announced_have_tables_too(group, shared):
    ends = []
    for announced in (True, False):
        with open_run(group, zr.Plan.fit(host=1_280 * KIB, nvme="1GiB"), announced=announced, scratch=shared) as rt:
            train(rt, range(3))
            ends.append({name: value.tobytes() for name, value in weights(rt).items()})
            assert rt.memory().in_memory <= 1_280 * KIB
    assert ends[0] == ends[1]
