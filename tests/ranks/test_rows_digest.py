"""The digest of tables by rows: that of a dense run, to the bit, whenever rows were last gathered."""

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort.comm import open_group

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not 2 <= WORLD.size <= 3, reason="two and three ranks")]

SHAPE, SHARDS, STEPS = (3_000, 6), 8, 4


def lot(*numbers):
    return np.random.default_rng(numbers)


def open_kind(kind, options):
    return open_hosts(options) if kind == "hierarchical" else open_group(kind=kind, options=options)


def digests(group, *, rows, optimizer, looks=False, **options):
    """Return the digest of every step. Gradients are whole numbers, so that sums are exact in any order."""
    found = []
    with zr.open(zr.Plan.zero(3), optimizer, group=group, **options) as rt:
        line = rt.register("line", {"w": np.ones(70, np.float32)})
        embed = rt.register("embed", {"table": lot(1).standard_normal(SHAPE, np.float32)}, rows=("table",) * rows)
        for step in range(STEPS):
            for at in rt.micro_batches:
                touched = lot(step, at).choice(SHAPE[0], 9, replace=False)
                values = lot(step, at, 1).integers(-9, 9, (9, SHAPE[1])).astype(np.float32)
                if rows:
                    embed.reduce(rows={"table": (touched, values)})
                else:
                    whole = np.zeros(SHAPE, np.float32)
                    whole[touched] = values
                    embed.reduce({"table": whole})
                line.reduce({"w": np.full(70, at, np.float32)})
            found.append(rt.step().digest)
            if looks:
                with embed.gathered(rows={"table": np.arange(10 * step, 300)}):
                    pass
    return found


OPTIMIZERS = {
    "adamw": zr.AdamW(lr=zr.warmup_cosine(0.02, warmup=2, total=9), weight_decay=0.1),
    "sgd": zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
    "lion": zr.Lion(lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize(("kind", "name"), [("node", "adamw"), ("mpi", "sgd"), ("hierarchical", "lion")])
def test_a_digest_is_that_of_a_dense_run_to_the_bit(options, kind, name):
    settings = {"optimizer": OPTIMIZERS[name], "virtual_shards": SHARDS}
    with open_group(kind="solo") as solo:
        expected = digests(solo, rows=False, **settings)
    assert len(set(expected)) == STEPS
    with open_kind(kind, options) as group:
        assert digests(group, rows=True, **settings) == expected
        assert digests(group, rows=True, looks=True, **settings) == expected


def test_digests_can_be_had_without_virtual_shards_and_left_out_with_them(options):
    optimizer = OPTIMIZERS["adamw"]
    with open_group(kind="mpi", options=options) as group:
        expected = digests(group, rows=False, optimizer=optimizer, digest=True)
        assert digests(group, rows=True, optimizer=optimizer, digest=True, looks=True) == expected
        assert digests(group, rows=True, optimizer=optimizer) == [""] * STEPS
        assert digests(group, rows=True, optimizer=optimizer, virtual_shards=SHARDS, digest=False) == [""] * STEPS


def test_what_rows_miss_is_counted_only_where_no_digest_is_made(options):
    """Without digests an update touches its rows alone; with them it touches all, and no row has an age."""
    with open_group(kind="mpi", options=options) as group:
        for digest, kept in ((False, 0), (True, None)):
            with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), group=group, virtual_shards=SHARDS, digest=digest) as rt:
                embed = rt.register("embed", {"table": np.ones(SHAPE, np.float32)}, rows=("table",))
                for _ in rt.micro_batches:
                    embed.reduce(rows={"table": ([7], np.ones((1, SHAPE[1]), np.float32))})
                rt.step()
                table = embed.sections[0].table
                assert (table.late is None) == digest
                assert table.touched.size == (0 if digest else table.count)
                if not digest and table.first <= 7 < table.first + table.count:
                    assert (table.touched == kept).sum() >= table.count - 1 - 16  # those whose turn it was, too
                told = zr.forecast(
                    {"embed": {"table": zr.TensorSpec(SHAPE)}},
                    plan=zr.Plan.zero(3),
                    optimizer=zr.AdamW(lr=0.1),
                    size=group.size,
                    rank=group.rank,
                    one_memory=group.one_memory,
                    virtual_shards=SHARDS,
                    digest=digest,
                    rows={"embed": ("table",)},
                )
                assert rt.memory().state == told.state
