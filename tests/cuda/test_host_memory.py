"""What a runtime on GPUs has on the host: pinned, given back when it is no longer needed, on all ranks or on none."""

import os
import threading
import warnings
from collections import Counter

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")


import zerort as zr  # noqa: E402
from zerort.comm import open_group  # noqa: E402
from zerort.comm.transports.nccl.pinned import open_pinned  # noqa: E402
from zerort.config import GroupOptions  # noqa: E402
from zerort.engine.residence.host_memory import HostMemory  # noqa: E402
from zerort.errors import ClosedError  # noqa: E402
from zerort.storage.session import StorageSession  # noqa: E402

HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
SMALL, LARGE = 1024, 1024**2


@pytest.fixture(scope="module")
def group():
    with open_group(kind="nccl", options=GroupOptions(timeout=20.0)) as group:
        yield group


def is_pinned(array):
    return cupy.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == cupy.cuda.runtime.memoryTypeHost


def step(rt):
    for unit in rt.units.values():
        unit.reduce({"w": cupy.ones(unit.sections[0].layout.numel, np.float32)})
    rt.step()


def values(numel):
    return {"w": np.ones(numel, np.float32)}


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("depth", [2, 5])
def test_what_streams_from_a_disk_passes_through_pinned_memory(group, tmp_path, update_on, depth):
    offload = zr.OffloadOptions(chunk_nbytes=8192, depth=depth, update_on=update_on)
    plan = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
    with zr.open(group=group, plan=plan, scratch=tmp_path, offload=offload, optimizer=zr.SGD(lr=0.5)) as rt:
        for numel, nbytes in ((1024, 2 * 4096), (10 * 2048, 2 * 8192)):  # chunks grow between steps
            rt.register(f"of {numel}", values(numel))
            step(rt)
            step(rt)
            slots = rt.context.update_stream._pipeline._workspace.slots
            assert slots.slot_nbytes == nbytes
            assert slots.count
            assert all(is_pinned(slot.memory) for slot in slots)
        for unit, updates in zip(rt.units.values(), (4, 2), strict=True):
            with unit.gathered() as p:
                assert (p["w"].get() == 1 - 0.5 * updates).all()


def test_a_unit_is_gathered_when_its_own_update_is_back(group):
    """What another one's update brings back is held up on the GPU, and stays so until the first unit was looked at."""
    gate, passed = threading.Event(), []

    def hold_up(_):
        gate.wait(60)
        passed.append(True)

    class Held(zr.SGD):
        def update_(self, param, *arrays, **settings):
            super().update_(param, *arrays, **settings)
            if param.size == LARGE:
                lane = group.device.named_stream("copy out")
                lane.submit(lambda: lane.cuda.launch_host_func(hold_up, None), after=())

    offload = zr.OffloadOptions(chunk_nbytes=4 * LARGE, update_on="device")
    with zr.open(group=group, plan=zr.Plan.zero(3, parameter=HOST), offload=offload, optimizer=Held(lr=0.5)) as rt:
        small, large = rt.register("small", values(SMALL)), rt.register("large", values(LARGE))
        step(rt)
        with small.gathered() as p:
            assert (p["w"].get() == 0.5).all()
        assert not passed
        gate.set()
        with large.gathered() as p:
            assert (p["w"].get() == 0.5).all()
        assert passed


def test_pinned_memory_that_grows_gives_the_smaller_one_back(group, tmp_path):
    offload = zr.OffloadOptions(chunk_nbytes=4 * LARGE, update_on="host")
    optimizer = zr.SGD(lr=1.0, momentum=0.9)
    with zr.open(group=group, plan=zr.Plan.zero(3, state=HOST), offload=offload, optimizer=optimizer) as rt:
        rt.register("small", values(SMALL))
        step(rt)
        before, held = rt.context.staging._pinned, rt.context.host.nbytes
        assert is_pinned(before)
        rt.register("large", values(LARGE))
        assert not is_pinned(before)
        assert (
            rt.context.host.nbytes - held == rt.context.staging._pinned.nbytes - before.nbytes + 4 * LARGE
        )  # the momentum's
        step(rt)
        with rt.units["large"].gathered() as p:
            assert (p["w"].get() == 0).all()


@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child_copies_no_pinned_memory(group, shared):
    """What the parent writes later it sees, too: the pages are the same. Workers of a DataLoader are forked."""
    with open_pinned(group, LARGE, shared=shared) as pinned:
        array = pinned.empty(LARGE, "uint8")
        assert is_pinned(array)
        array[:] = 1
        written, seen = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads that the child lacks
            child = os.fork()
        if child == 0:
            os.read(written[0], 1)
            os.write(seen[1], bytes(array[-1:]))
            os._exit(0)
        array[:] = 7
        os.write(written[1], b"!")
        assert os.read(seen[0], 1) == b"\x07"
        os.waitpid(child, 0)
        for end in (*written, *seen):
            os.close(end)


def test_a_store_that_cannot_be_bridged_to_a_gpu_leaves_no_files(group, tmp_path):
    part = group.split(0)
    host = HostMemory(part)
    part.close()
    storage = StorageSession(group, scratch=tmp_path, options=zr.OffloadOptions(), traffic=Counter(), host=host)
    with pytest.raises(ClosedError):
        storage.prepare(4096, what="a value")
    assert os.listdir(tmp_path) == []
    storage.close()
