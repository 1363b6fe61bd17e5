"""A failure between the lease of a slot for codes and its release gives the slot back."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from zerort.buffer import BlockCodes, Changes, CodedGather, CodedReduce, NonZeros
from zerort.buffer.coded import ranges
from zerort.buffer.coded.senders import Senders
from zerort.codec.formats import INT8, Format
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.testing import run_threads

NUMEL = 4096
WAYS = {
    "gather": lambda slots: CodedGather(BlockCodes(INT8), slots, Counter()),
    "delta": lambda slots: CodedGather(Changes(), slots, Counter()),
    "sparse": lambda slots: CodedGather(NonZeros(4), slots, Counter()),
    "reduce": lambda slots: CodedReduce(INT8, slots, Senders(((0,),), 1, 64), None, Counter()),
}


class Failure(Exception):
    """What no part of the runtime raises."""


def fail(*args, **kwargs):
    raise Failure


@pytest.mark.parametrize("where", ["encode", "submit"])
@pytest.mark.parametrize("way", WAYS)
def test_a_failure_leaves_no_slot_on_lease(way, where, monkeypatch):
    def body(group):
        slots = Slots("codes", allocate=lambda nbytes: np.zeros(nbytes, np.uint8))
        slots.reserve(1 << 16, count=1)
        dtype = ml_dtypes.bfloat16 if way == "delta" else np.float32
        mine, out = np.ones(NUMEL, dtype), np.zeros(NUMEL, dtype)
        mine[::2] *= way != "sparse"
        coded = WAYS[way](slots)

        def start():
            how = {"partition": Partition.build(NUMEL, 1), "name": "w", "padding": 0, "traffic": None}
            return coded.start(group, mine, out=out, **how)

        with monkeypatch.context() as patch:
            if where == "submit":
                patch.setattr(group.device.named_stream("decode"), "submit", fail)
            elif way == "delta":
                patch.setattr(ranges, "encode_delta", fail)
            elif way == "sparse":
                patch.setattr(ranges, "write_sparse", fail)
            else:
                patch.setattr(Format, "encode", fail)
            with pytest.raises(Failure):
                start()
        assert (slots.available, slots.leased_nbytes) == (1, 0)
        start().wait()
        assert np.allclose(out.astype(np.float32), mine.astype(np.float32), atol=0.01)

    run_threads(1, body)


def test_memory_that_cannot_be_made_leaves_the_slot_free():
    slots = Slots("buckets", allocate=fail, persistent=False)
    slots.reserve(10, count=1)
    with pytest.raises(Failure):
        slots.lease(10)
    assert (slots.available, slots.leased_nbytes) == (1, 0)
