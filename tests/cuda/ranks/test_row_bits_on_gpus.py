"""Tables by rows on GPUs whose bits do not depend on the ranks: `virtual_shards`, digests, and cuts that change."""

import gpu_runs
import hardware
import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

import zerort as zr
from zerort.comm import open_group

pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

SHAPES = {"users": (5_000, 6), "items": (300, 70), "w": (6, 3)}
TABLES, SHARDS, STEPS = ("users", "items"), 5, 4
OPTIMIZERS = {
    "adamw": zr.AdamW(lr=zr.warmup_cosine(0.02, warmup=2, total=9), weight_decay=0.1),
    "sgd": zr.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
    "lion": zr.Lion(lr=0.01, weight_decay=0.1),
}


def lot(*numbers):
    return np.random.default_rng(numbers)


def there(rt, value):
    """Return an array of the host where the runtime computes."""
    out = rt.device.zeros(value.size, value.dtype)
    rt.device.put(np.ascontiguousarray(value).reshape(-1), out=out)
    return out.reshape(value.shape)


def run(group, optimizer, *, stage=3, lazy=False, before=lambda rt, step: None, **options):
    """Return the digest of every step, and all bits at the end; some micro-batches have no rows."""
    values = {
        name: lot(at).standard_normal(shape).astype(np.float32) for at, (name, shape) in enumerate(SHAPES.items())
    }
    found = []
    with zr.open(zr.Plan.zero(stage), optimizer, group=group, clip_norm=0.5, **options) as rt:
        unit = rt.register("model", values, rows=TABLES, lazy=lazy)
        for step in range(STEPS):
            before(rt, step)
            for at in rt.micro_batches:
                rows = {
                    name: lot(step, at, len(name)).integers(0, SHAPES[name][0], 9 * (at != step)) for name in TABLES
                }
                with unit.gathered(rows=rows) as p:
                    seen = {name: rt.device.fetch(p[name]) for name in TABLES}
                slopes = {name: lot(step, at, 7).standard_normal((len(seen[name]), 1)) * seen[name] for name in TABLES}
                unit.reduce(
                    {"w": there(rt, lot(step, at).standard_normal(SHAPES["w"]).astype(np.float32))},
                    rows={name: (rows[name], there(rt, slopes[name].astype(np.float32))) for name in TABLES},
                )
            found.append(rt.step().digest)
        with unit.gathered() as p:
            return [*found, *(rt.device.fetch(p[name]).tobytes() for name in SHAPES)]


def cut_anew(rt, step):
    """Cut all shards anew before most of the steps, some ranks without any."""
    weights = lot(rt.size, step).integers(0, 4, rt.size)
    rt.rebalance(shard_weights=weights if weights.any() else None)


CASES = {
    "zero3": {"optimizer": OPTIMIZERS["adamw"]},
    "zero1-momentum": {"optimizer": OPTIMIZERS["sgd"], "stage": 1},
    "without-digests": {"optimizer": OPTIMIZERS["adamw"], "digest": False},
    "lion-cut-anew": {"optimizer": OPTIMIZERS["lion"], "digest": False, "before": cut_anew},
    "lazy-cut-anew": {"optimizer": OPTIMIZERS["adamw"], "lazy": True, "before": cut_anew},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_number_of_gpus_has_the_bits_of_one_host(gpus, case):
    """Digests included, whatever the cuts: no three gradients of one micro-batch are of one row."""
    alone = {key: value for key, value in case.items() if key not in ("stage", "before")}
    with open_group(kind="solo") as solo:
        expected = run(solo, virtual_shards=SHARDS, **alone)
    hardware.reseed(3 + gpus.size)
    with cupy.cuda.Stream(non_blocking=True):  # the caller's own
        found = run(gpus, virtual_shards=SHARDS, **case)
    hardware.reseed(0)
    assert found == expected
    assert len(set(expected[:STEPS])) == (1 if case.get("digest") is False else STEPS)


def test_rows_that_have_moved_are_there_for_the_next_gather(gpus):
    """Nothing of the group's comes between the two, and the caller has a stream of its own."""
    hardware.reseed(9 + gpus.size)
    table = lot(4).standard_normal((300, 70))
    with (
        cupy.cuda.Stream(non_blocking=True),
        zr.open(
            zr.Plan.zero(3), OPTIMIZERS["adamw"], group=gpus, shard_weights=[1 + r for r in range(gpus.size)]
        ) as rt,
    ):
        unit = rt.register("embed", {"table": table}, rows=("table",))
        for weights in (None, [3 - (rank > 0) for rank in range(gpus.size)]):
            rt.rebalance(shard_weights=weights)
            with unit.gathered(rows={"table": np.arange(0, 300, 7)}) as p:
                np.testing.assert_array_equal(rt.device.fetch(p["table"]), table[::7])
    hardware.reseed(0)


def digests(group, *, rows, optimizer, looks=False):
    """Return the digest of every step. Gradients are whole numbers, so that sums are exact in any order."""
    shape, found = (3_000, 6), []
    with zr.open(zr.Plan.zero(3), optimizer, group=group, digest=True) as rt:
        embed = rt.register("embed", {"table": lot(1).standard_normal(shape, np.float32)}, rows=("table",) * rows)
        for step in range(STEPS):
            for at in rt.micro_batches:
                touched = lot(step, at).choice(shape[0], 9, replace=False)
                values = lot(step, at, 1).integers(-9, 9, (9, shape[1])).astype(np.float32)
                if rows:
                    embed.reduce(rows={"table": (touched, there(rt, values))})
                else:
                    whole = np.zeros(shape, np.float32)
                    whole[touched] = values
                    embed.reduce({"table": there(rt, whole)})
            found.append(rt.step().digest)
            if looks:
                with embed.gathered(rows={"table": np.arange(10 * step, 300)}):
                    pass
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_digest_of_rows_is_that_of_dense_tables_on_gpus(gpus, optimizer):
    expected = digests(gpus, rows=False, optimizer=optimizer)
    assert len(set(expected)) == STEPS
    assert digests(gpus, rows=True, optimizer=optimizer) == expected
    assert digests(gpus, rows=True, optimizer=optimizer, looks=True) == expected
