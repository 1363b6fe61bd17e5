"""Buffers and the engine put work onto several streams: it has one order, also where a walk would not show it."""

import time

import gpu_runs
import hardware
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import zerort as zr  # noqa: E402
from zerort import trace  # noqa: E402
from zerort.buffer import GradientBucket  # noqa: E402
from zerort.device.slots import Slots  # noqa: E402
from zerort.layout import FlatLayout, Partition, Placement  # noqa: E402
from zerort.optim.kernels import bucket_kernels_for  # noqa: E402

pytestmark = [pytest.mark.mpi, gpu_runs.at_most(2)]

DEVICE, HOST, NVME = zr.Tier.DEVICE, zr.Tier.HOST, zr.Tier.NVME
ON_GPUS = zr.OffloadOptions(chunk_nbytes=8192, threads=2, update_on="device")
NUMEL = 49_152  # cut evenly over the ranks


@pytest.fixture(autouse=True)
def elsewhere():
    """The caller works on a stream of its own."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def host_reads(rt):
    """Tell the race check that parameters on the host are looked at."""
    for section in rt.units.trained_sections():
        if isinstance(section.shard.memory, np.ndarray):
            hardware.host_reads(section.shard.memory)


@pytest.fixture
def slots(gpus):
    slots = Slots(
        "buckets",
        cure="",
        allocate=lambda nbytes: gpus.device.empty(nbytes, "uint8"),
        free=lambda memory: None,
        device=gpus.device,
    )
    slots.reserve(NUMEL * 4, count=1)
    return slots


def full_bucket(group, slots, *, rests, sink=None):
    layout = FlatLayout.build({"w": (NUMEL,)}, dtype="float32")
    bucket = GradientBucket(
        layout,
        Partition.build(layout.numel, group.size),
        group=group,
        placement=rests,
        needed=Placement.SHARDED,
        slots=slots,
        sink=sink,
        kernels=bucket_kernels_for(group.device),
    )
    bucket.add("w", cupy.full(NUMEL, group.rank + 1, np.float32))
    bucket.end_micro_step()
    return bucket


@pytest.mark.parametrize("rests", [Placement.REPLICATED, Placement.SHARDED])
def test_a_bucket_settles_what_it_has_just_fired(rests, gpus, slots):
    bucket = full_bucket(gpus, slots, rests=rests)
    bucket.fire()
    summed = bucket.finish_reduce()
    assert (summed.get() == gpus.size * (gpus.size + 1) / 2).all()
    bucket.close()


class Refusing:
    """Nothing can be put away."""

    sums_copies = False

    def __init__(self, group):
        count = Partition.build(NUMEL, group.size).counts[group.rank]
        self.room = group.device.empty(count, "float32")

    def put(self, reduce_into, /):
        reduce_into(self.room)
        raise ZeroDivisionError

    def reset(self):
        pass


def test_a_slot_is_read_also_if_its_sum_cannot_be_put_away(gpus, slots):
    bucket = full_bucket(gpus, slots, rests=Placement.SHARDED, sink=Refusing(gpus))
    with pytest.raises(ZeroDivisionError):
        bucket.fire()
    bucket.reset()
    slot = slots.lease(NUMEL * 4)
    slot.memory.fill(0)
    slot.release()
    bucket.close()


def test_a_gather_that_nobody_used_leaves_its_slot(gpus):
    with zr.open(group=gpus, plan=zr.Plan.zero(3, parameter=HOST), prefetch=0, offload=ON_GPUS) as rt:
        gpu_runs.register(rt, "float32")
        first, second, *_ = rt.units.values()
        first.gather()
        first.release()
        with second.gathered() as p:
            assert (p["w"].get() == gpu_runs.first_values("float32")[1]["w"]).all()


def test_values_are_assigned_behind_a_gather(gpus):
    """An update of shards is on its way to all ranks when others take its place."""
    with zr.open(group=gpus, plan=zr.Plan.zero(1)) as rt:
        unit = rt.register("unit", {"w": np.ones(NUMEL, np.float32)})
        unit.reduce({"w": cupy.ones(NUMEL, np.float32)})
        rt.step()
        unit.assign({"w": np.full(NUMEL, 7, np.float32)})
        with unit.gathered() as p:
            assert (p["w"].get() == 7).all()


def test_a_digest_is_of_what_was_written(gpus):
    digests = set()
    for plan in (zr.Plan.zero(2), zr.Plan.zero(3, state=HOST), zr.Plan.zero(3, parameter=HOST, state=HOST)):
        with zr.open(group=gpus, plan=plan, virtual_shards=gpus.size, offload=ON_GPUS) as rt:
            digests.add(gpu_runs.train(rt, "bfloat16", steps=1)[0].digest)
            host_reads(rt)
    assert len(digests) == 1


@pytest.mark.parametrize("plan", [zr.Plan.zero(0), zr.Plan.zero(3, parameter=HOST, state=HOST)])
@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_a_checkpoint_is_of_what_was_written(master, plan, gpus, shared_tmp_path):
    optimizer = zr.AdamW(lr=1e-3, master=master)
    with zr.open(group=gpus, plan=plan, optimizer=optimizer, offload=ON_GPUS) as rt:
        gpu_runs.train(rt, "bfloat16", steps=1)
        rt.save(shared_tmp_path / "saved")
        host_reads(rt)
        expected = gpu_runs.weights(rt)
    for form in dict.fromkeys((master, "float32")):
        with zr.open(group=gpus, plan=plan, optimizer=zr.AdamW(lr=1e-3, master=form), offload=ON_GPUS) as rt:
            gpu_runs.register(rt, "bfloat16")
            rt.load(shared_tmp_path / "saved")
            for name, value in gpu_runs.weights(rt).items():
                np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_what_comes_back_late_is_what_a_disk_gets(gpus, shared_tmp_path):
    """A chunk is written when it has come back from the GPU, not when it was computed there."""

    class Late(zr.SGD):
        def update_(self, *arrays, **settings):
            super().update_(*arrays, **settings)
            gpus.device.named_stream("copy out").submit(lambda: time.sleep(0.05), after=())

    plan = zr.Plan.zero(3, parameter=NVME, state=NVME)
    with zr.open(group=gpus, plan=plan, optimizer=Late(lr=0.5), offload=ON_GPUS, scratch=shared_tmp_path) as rt:
        unit = rt.register("unit", {"w": np.ones(1000, np.float32)})
        unit.reduce({"w": cupy.ones(1000, np.float32)})
        rt.step()
        with unit.gathered() as p:
            assert (p["w"].get() == 0.5).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_norm_of_all_units_is_waited_for_once(deterministic, gpus):
    options = {"virtual_shards": gpus.size} if deterministic else {}
    with zr.open(group=gpus, plan=zr.Plan.zero(2), **options) as rt:
        for at in range(3):
            rt.register(f"unit{at}", {"w": np.ones((at + 1) * NUMEL, np.float32)})
            rt.units[f"unit{at}"].reduce({"w": cupy.ones((at + 1) * NUMEL, np.float32)})
        trace.reset()
        trace.enable()
        try:
            report = rt.step()
        finally:
            trace.disable()
        spans = trace.spans()
        trace.reset()
    assert report.grad_norm == pytest.approx((6 * NUMEL) ** 0.5)
    (measure,) = (span for span in spans if span.name == "measure")
    copies = [one for one in spans if one.name == "copy out" and measure.begin_ns <= one.begin_ns < measure.end_ns]
    assert len(copies) == 1
