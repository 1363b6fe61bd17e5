"""What parameters refuse; what they do is in their contract (tests/ranks/test_residence.py)."""

from collections import Counter

import numpy as np
import pytest

from zerort.comm import open_group
from zerort.config import Plan
from zerort.config.offload import OffloadOptions
from zerort.device import HostDevice
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.host_memory import HostMemory
from zerort.engine.residence.replicated import ReplicatedParameters
from zerort.errors import CallError, PlanError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.storage.session import StorageSession

LAYOUT = FlatLayout.build({"w": (3,)})


def test_parameters_are_no_sums():
    with open_group(kind="solo") as group:
        host = HostMemory(group)
        storage = StorageSession(group, scratch=None, options=OffloadOptions(), traffic=Counter(), host=host)
        backings = Backings(group, host, storage)
        with pytest.raises(PlanError, match="Sums grow in buckets"):
            backings.parameters(
                LAYOUT,
                Partition.build(LAYOUT.numel, 1),
                placement=Placement.PARTIAL,
                residence=SectionResidence.of(Plan.zero(3)),
                name="sums",
            )


def test_the_partition_is_of_the_layout():
    array = ChunkedArray("whole", (0, LAYOUT.numel), np.zeros(LAYOUT.numel, np.float32), device=HostDevice())
    with (
        open_group(kind="solo") as group,
        pytest.raises(CallError, match="Expected a partition of 64 elements over 1 ranks"),
    ):
        ReplicatedParameters(LAYOUT, Partition.build(3, 1), array=array, group=group)
