"""Tables by rows beside values that travel as codes: rows travel as they are, and the report says so."""

import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not 2 <= WORLD.size <= 3, reason="two and three ranks")]

SHAPE, STEPS = (900, 6), 4
CODED = zr.Wire(gather="int8", reduce="int8", feedback=True, over="all")


def lot(*numbers):
    return np.random.default_rng(numbers)


def train(rt, steps):
    unit = rt.units["model"]
    for step in steps:
        for at in rt.micro_batches:
            rows = lot(step, at).integers(0, SHAPE[0], 9)
            with unit.gathered(rows={"table": rows}) as p:
                slopes = 0.5 * p["table"] + np.float32(at)
            unit.reduce({"w": lot(step, at, 1).standard_normal(2_000, np.float32)}, rows={"table": (rows, slopes)})
        report = rt.step()
    return report


def tensors(rt):
    with rt.units["model"].gathered() as p:
        return {name: np.array(p[name]) for name in ("table", "w")}


def opened(group, wire, **options):
    rt = zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.02, weight_decay=0.1), group=group, wire=wire, **options)
    values = {"table": lot(1).standard_normal(SHAPE, np.float32), "w": lot(2).standard_normal(2_000, np.float32)}
    rt.register("model", values, rows=("table",))
    return rt


@pytest.mark.parametrize("settings", [{}, {"virtual_shards": 4}])
@pytest.mark.parametrize("wire", [CODED, zr.Wire(reduce=zr.TopK(0.1), over="all")], ids=["int8", "top-k"])
def test_rows_have_the_bits_of_a_run_without_codes(options, tmp_path, wire, settings):
    where = WORLD.bcast(str(tmp_path))
    with open_group(kind="mpi", options=options) as group:
        with opened(group, None, **settings) as rt:
            train(rt, range(2))
            rt.save(f"{where}/plain")  # which brings rows up to date, and so rounds them, in both runs
            assert "rows" not in train(rt, range(2, STEPS)).wire
            plain = tensors(rt)
        with opened(group, wire, **settings) as rt:
            train(rt, range(2))
            rt.save(f"{where}/saved")
            report = train(rt, range(2, STEPS))
            coded = tensors(rt)
            rt.load(f"{where}/saved")
            train(rt, range(2, STEPS))
            again = tensors(rt)
    assert report.wire.endswith("; rows of model.table travel uncoded")
    np.testing.assert_array_equal(coded["table"], plain["table"])
    assert (coded["w"] != plain["w"]).any()  # others are coded
    for name, value in coded.items():
        np.testing.assert_array_equal(again[name], value)


def test_a_forecast_counts_no_codes_of_tables(options):
    units = {"model": {"table": zr.TensorSpec(SHAPE), "w": zr.TensorSpec((2_000,))}}
    with open_group(kind="mpi", options=options) as group, opened(group, CODED) as rt:
        train(rt, range(2))
        counted = rt.memory()
        told = zr.forecast(
            units,
            plan=zr.Plan.zero(3),
            optimizer=zr.AdamW(lr=0.1),
            size=group.size,
            rank=group.rank,
            one_memory=group.one_memory,
            hosts=group.hosts,
            wire=CODED,
            rows={"model": ("table",)},
        )
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming", "nvme"):
        assert getattr(counted, part) == getattr(told, part), part
