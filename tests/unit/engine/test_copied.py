"""Whole parameters that stay on each host between gathers: what fails, and what is refused."""

from collections import Counter

import numpy as np
import pytest

import zerort as zr
from zerort.buffer import Changes, CodedGather, room_nbytes
from zerort.comm import open_group
from zerort.config.offload import OffloadOptions
from zerort.device.slots import Slots
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.host_memory import HostMemory
from zerort.errors import CallError, PlanError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.storage.session import StorageSession
from zerort.testing import run_threads

BFLOAT16 = numpy_dtype("bfloat16")
DELTA = zr.Wire(gather="delta", over="all")


DIFFERENCES = zr.Wire(gather="int4", feedback=True, over="all")


@pytest.mark.parametrize(
    "wire", [DELTA, zr.Wire(gather="int8", over="all"), DIFFERENCES], ids=["delta", "int8", "differences"]
)
def test_a_gather_that_another_rank_could_not_join_is_tried_again(wire):
    def walk(group):
        plan = zr.Plan.zero(3, secondary="host")
        with zr.open(plan, zr.SGD(lr=1.0), group=group, wire=wire) as rt:
            values = np.arange(5_000).astype(BFLOAT16)
            unit = rt.register("block", {"w": values})
            found = []
            for _ in range(2):
                with unit.gathered() as p:
                    found.append(np.array(p["w"]))
                unit.reduce({"w": np.ones(5_000, BFLOAT16)})
                rt.step()
                if rt.rank == 1:
                    rt.context.complain(CallError("no such luck"))
                else:
                    with pytest.raises(CallError, match="no such luck"):
                        unit.gather().wait()
                    unit.release()
            with unit.gathered() as p:
                found.append(np.array(p["w"]))
            return found

    first, second = run_threads(2, walk)
    for mine, theirs in zip(first, second, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert not np.array_equal(first[0], first[2])


def test_a_delta_gather_tells_all_ranks_what_is_sent_and_moves_nothing_unchanged():
    partition = Partition.build(1_000, 3, weights=[2, 0, 1])

    def gathers(group):
        slots = Slots("deltas", allocate=lambda nbytes: np.empty(nbytes, np.uint8))
        moved, uncoded = Counter(), Counter()
        gather = CodedGather(Changes(), slots, uncoded)
        slots.reserve(gather.room_nbytes(partition), count=1)
        own = partition.of(group.rank)
        mine, out = np.arange(own.first, own.stop).astype(np.uint16).view(BFLOAT16), np.zeros(1_000, BFLOAT16)
        told = []
        for _ in range(2):
            before = moved["all_gather"]
            gather.start(group, mine, out=out, partition=partition, name="w", padding=8, traffic=moved).wait()
            told.append(moved["all_gather"] - before)
        assert uncoded["all_gather"] == 2 * 2 * 992
        return out.view(np.uint16).tolist(), told

    for whole, (first, second) in run_threads(3, gathers):
        assert whole == list(range(1_000))
        assert 2_000 < first <= 3 * 8 + room_nbytes(Changes(), partition.counts)
        assert second == 3 * 8  # the sizes alone
    assert room_nbytes(Changes(), partition.counts) == sum(-(-(24 + 2 * n) // 8) * 8 for n in partition.counts if n)


@pytest.mark.parametrize("secondary", [True, False])
def test_a_copy_of_what_rests_on_a_disk_is_refused(secondary):
    layout = FlatLayout.build({"w": (3,)}, dtype="bfloat16")
    with open_group(kind="solo") as group:
        host = HostMemory(group)
        storage = StorageSession(group, scratch=None, options=OffloadOptions(), traffic=Counter(), host=host)
        gather = CodedGather(Changes(), Slots("deltas", allocate=lambda nbytes: np.empty(nbytes, np.uint8)), Counter())
        with pytest.raises(PlanError, match="a copy stays on each host where computing happens, got them on NVME"):
            Backings(group, host, storage).parameters(
                layout,
                Partition.build(layout.numel, 1),
                placement=Placement.SHARDED,
                residence=SectionResidence.of(zr.Plan.zero(3, parameter=zr.Tier.NVME)),
                name="w",
                gather=gather,
                secondary=secondary,
            )


def test_a_forecast_refuses_a_second_copy_on_gpus():
    units = {"block": {"w": TensorSpec((8,), "float32")}}
    with pytest.raises(PlanError, match=r"Expected ranks that compute on the host with secondary='host', got GPUs"):
        zr.forecast(units, plan=zr.Plan.zero(3, secondary="host"), optimizer=zr.SGD(lr=1.0), size=2, device="cuda")
