"""Tables by rows that rest on a disk: the results of tables in memory, for the pages that rows touch."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort.comm import open_group
from zerort.config.offload import OffloadOptions
from zerort.errors import StorageError
from zerort.storage.files.faults import injected

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not 2 <= WORLD.size <= 3, reason="two and three ranks")]

SMALL = OffloadOptions(chunk_nbytes=16_384, depth=2)  # chunks of 4,096 elements: windows of a few pages, many of them
SHAPES = {"narrow": (5_000, 3), "odd": (300, 70), "wide": (9, 5_000)}  # many rows in a page, some, many pages in a row
BOTH, PAGE = ("parameter", "state"), 4096


def lot(*numbers):
    return np.random.default_rng(numbers)


@pytest.fixture
def shared(tmp_path):
    return WORLD.bcast(str(tmp_path))


@contextlib.contextmanager
def opened(kind, options, shared, *, on_disk=BOTH, dtype="float64", shapes=SHAPES, optimizer=None, **settings):
    optimizer = zr.AdamW(lr=0.02, weight_decay=0.1) if optimizer is None else optimizer
    plan = zr.Plan.zero(3, **dict.fromkeys(on_disk, "nvme"))
    made = open_hosts(options) if kind == "hierarchical" else open_group(kind=kind, options=options)
    settings = {"scratch": shared, "offload": SMALL, **settings}
    with made as group, zr.open(plan, optimizer, group=group, **settings) as rt:
        values = {name: lot(len(name)).standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        rt.register("model", values, rows=tuple(shapes))
        yield rt


def train(rt, steps, *, shapes=SHAPES, dtype="float64"):
    """Train with gradients of rows as they are gathered; return the last report."""
    unit = rt.units["model"]
    for step in steps:
        for at in rt.micro_batches:
            rows = {name: lot(step, at, len(name)).integers(0, shape[0], 7) for name, shape in shapes.items()}
            with unit.gathered(rows=rows) as p:
                slopes = {name: p[name].astype(np.float32) * 0.5 for name in shapes}
            unit.reduce(rows={name: (rows[name], slopes[name].astype(dtype)) for name in shapes})
        report = rt.step()
    return report


def weights(rt, shapes=SHAPES):
    with rt.units["model"].gathered() as p:
        return {name: np.array(p[name]) for name in shapes}


def look(rt):
    """Gather rows that are not updated: at any time, in any order."""
    with rt.units["model"].gathered(rows={"narrow": [5, 4_000, 5], "odd": np.arange(0, 300, 3), "wide": [8, 0]}):
        pass


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "on_disk", "optimizer"),
    [
        ("node", BOTH, None),
        ("mpi", ("state",), zr.Lion(lr=0.01, weight_decay=0.1)),
        ("hierarchical", ("parameter",), zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1)),
    ],
)
def test_rows_on_a_disk_train_as_rows_in_memory_do(options, shared, kind, on_disk, optimizer):
    ends = []
    for places in ((), on_disk):
        with opened(kind, options, shared, on_disk=places, optimizer=optimizer) as rt:
            train(rt, range(3))
            if places:
                look(rt)
            train(rt, range(3, 6))
            ends.append(weights(rt))
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("settings", [{}, {"virtual_shards": 4}])
def test_sixteen_bits_and_their_masters_have_the_bits_of_memory(options, shared, settings):
    """Where each gathered row is updated, too, nothing depends on where it lies; digests read all of it."""
    half, ends = np.dtype(ml_dtypes.bfloat16), []
    for places in ((), BOTH):
        with opened("mpi", options, shared, on_disk=places, dtype=half, **settings) as rt:
            digest = train(rt, range(4), dtype=half).digest
            ends.append([digest, *(value.tobytes() for value in weights(rt).values())])
    assert ends[1] == ends[0]


def pages_nbytes(section, rows):
    """Return the bytes of the pages that some rows of this rank are in, 64 float32 each; the last page may be short."""
    table, size = section.table, 4 * section.shard.size
    mine = rows[(rows >= table.first) & (rows < table.first + table.count)] - table.first
    pages = {page for first in 256 * mine for page in (first // PAGE, (first + 255) // PAGE)}
    return sum(min(PAGE, size - PAGE * int(page)) for page in pages)


def test_bytes_are_those_of_the_pages_that_rows_touch(options, shared):
    """Gathers read parameters, of rows that have missed an update all arrays; updates read and write all, once."""
    shapes = {"table": (65_536, 64)}
    with opened("mpi", options, shared, shapes=shapes, dtype="float32", offload=OffloadOptions()) as rt:
        unit, (section,) = rt.units["model"], rt.units["model"].sections
        sets = [np.arange(first, 65_536, 1_552) for first in (115, 803)]
        for step, (rows, ages) in enumerate([(sets[0], 0), (sets[1], 1), (sets[1], 0), (sets[0], 2)], start=1):
            rows = rows[np.isin(rows // 16 % 1024, range(6), invert=True)]  # those are brought up to date in turn
            touched = pages_nbytes(section, rows)
            turns = pages_nbytes(section, (16 * np.arange(step, 4_096, 1_024)[:, None] + np.arange(16)).reshape(-1))
            with unit.gathered(rows={"table": rows}) as p:
                unit.reduce(rows={"table": (rows, p["table"] + np.float32(1.0))})
            found = rt.step().bytes_tiered
            if step > 1:  # the first tells of registering, too
                assert found["nvme read"] == (3 if ages else 1) * touched + 3 * touched + 3 * turns, step
                assert found["nvme write"] == 3 * touched + 3 * turns, step


@pytest.mark.parametrize("on_disk", [BOTH, ("state",)])
def test_a_forecast_counts_tables_on_a_disk(options, shared, on_disk):
    units = {"model": {name: zr.TensorSpec(shape, "float32") for name, shape in SHAPES.items()}}
    with opened("mpi", options, shared, on_disk=on_disk, dtype="float32") as rt:
        train(rt, range(2), dtype="float32")
        counted, group = rt.memory(), rt.group
        told = zr.forecast(
            units,
            plan=zr.Plan.zero(3, **dict.fromkeys(on_disk, "nvme")),
            optimizer=zr.AdamW(lr=0.1),
            size=group.size,
            rank=group.rank,
            one_memory=group.one_memory,
            rows={"model": tuple(SHAPES)},
            offload=SMALL,
        )
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming", "nvme"):
        assert getattr(counted, part) == getattr(told, part), part


def test_a_rank_without_rows_meets_those_that_have_some(options, shared):
    """Only the state is on disks, and one rank's state is nothing: all ranks still fail, or go on, together."""
    ends, shapes = [], {"short": (1, 64)}
    for places in ((), ("state",)):
        with opened("mpi", options, shared, on_disk=places, shapes=shapes) as rt:
            train(rt, range(3), shapes=shapes)
            ends.append(weights(rt, shapes))
            assert min(WORLD.allgather(rt.units["model"].sections[0].table.count)) == 0
    assert_close(ends[1], ends[0])


def test_checkpoints_feeds_and_new_cuts_hold_all_rows_up_to_date(options, shared):
    with opened("mpi", options, shared, on_disk=()) as rt:
        train(rt, range(3))
        middle = weights(rt)
        train(rt, range(3, 6))
        expected = weights(rt)
    with opened("mpi", options, shared) as rt:
        train(rt, range(3))
        rt.publish(f"{shared}/feed", dtype=None).push().wait()
        rt.rebalance(shard_weights=[1.0 + rank for rank in range(rt.size)])
        rt.save(f"{shared}/saved")
        train(rt, range(3, 6))
        assert_close(weights(rt), expected)
        rt.load(f"{shared}/saved")
        assert_close(weights(rt), middle)
        train(rt, range(3, 6))
        assert_close(weights(rt), expected)
    if WORLD.rank == 0:
        assert_close({name: zr.Reader(f"{shared}/feed").update()[f"model.{name}"] for name in SHAPES}, middle)
    WORLD.barrier()


def test_a_disk_that_refuses_is_heard_of_on_every_rank(options, shared):
    """A gather that cannot be read changes nothing; an update that cannot be written is left by a load."""
    with opened("mpi", options, shared, on_disk=()) as rt:
        train(rt, range(5))
        expected = weights(rt)
    last = WORLD.size - 1
    with opened("mpi", options, shared) as rt:
        train(rt, range(2))
        rt.save(f"{shared}/saved")
        train(rt, range(2, 4))
        with breaking(last, "eio@1:times=all:op=read"), pytest.raises(StorageError, match=f"rank {last}"):
            look(rt)
        train(rt, range(4, 5))
        assert_close(weights(rt), expected)
        with breaking(last, "enospc@2:times=all:op=write"), pytest.raises(StorageError, match=f"rank {last}"):
            train(rt, range(5, 6))
        with pytest.raises(StorageError, match="Expected parameters and state of one update"):
            look(rt)
        rt.load(f"{shared}/saved")
        train(rt, range(2, 5))
        assert_close(weights(rt), expected)


def test_a_whole_gather_that_fails_at_a_second_table_leaves_none_of_the_first(options, shared):
    shapes = {"first": (60, 3), "second": (50, 4)}
    slopes = {name: ([0, 41], np.ones((2, width))) for name, (_, width) in shapes.items()}

    def trained(*, on_disk, reads):
        with opened("mpi", options, shared, on_disk=on_disk, shapes=shapes) as rt:
            for number in reads:
                weights(rt, shapes)  # rows are up to date now: what follows reads each table once
                if on_disk:
                    with breaking(0, f"eio@{number}:times=all:op=read"), pytest.raises(StorageError, match="rank 0"):
                        weights(rt, shapes)
                rt.units["model"].reduce(rows=slopes)  # and gathers nothing
                rt.step()
            return weights(rt, shapes)

    assert_close(trained(on_disk=BOTH, reads=(1, 2)), trained(on_disk=(), reads=(1, 2)))


@contextlib.contextmanager
def breaking(rank, fault):
    """Break the disk of one rank."""
    with injected(fault) if WORLD.rank == rank else contextlib.nullcontext():
        yield
