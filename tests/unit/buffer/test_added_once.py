"""Differences that ranks of a host add to one copy: each range once, and nobody looks before all have added."""

import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from zerort.buffer import CodedGather, DifferenceCodes
from zerort.codec import INT4
from zerort.device.slots import Slots
from zerort.layout import Partition
from zerort.testing import run_threads
from zerort.testing.threads_transport import ThreadsTransport

NUMEL = 1536


@dataclass(frozen=True, slots=True)
class Watched(DifferenceCodes):
    """Differences that note which ranges are decoded, after `go`."""

    decoded: list[int] | None = None
    go: threading.Event | None = None

    def decode(self, out, payload, *, room):
        if self.go is not None:
            assert self.go.wait(200)
        self.decoded.append(out.size)
        DifferenceCodes.decode(self, out, payload, room=room)


def gather(group, codec, *, out, partition):
    slots = Slots("codes", allocate=lambda nbytes: np.empty(nbytes, np.uint8))
    made = CodedGather(codec, slots, Counter())
    slots.reserve(made.room_nbytes(partition), count=1)
    own = partition.of(group.rank)
    mine = np.arange(own.first, own.stop, dtype=np.float32)
    return made.start(group, mine, out=out, partition=partition, name="w", padding=0, traffic=None)


def shared_copy(group):
    return group.zeros_shared([NUMEL] + [0] * (group.size - 1), "float32").full


@pytest.mark.parametrize(
    ("hosts", "decoded"),
    [
        ((0, 0, 0), [[0], [1], [2]]),
        ((0, 1, 0), [[0, 2], [0, 1, 2], [1]]),
        ((0, 1, 2), [[0, 1, 2]] * 3),
    ],
    ids=["one-host", "two-hosts", "one-each"],
)
def test_ranks_that_share_memory_decode_other_ranges(hosts, decoded, monkeypatch):
    monkeypatch.setattr(ThreadsTransport, "memories", hosts)
    partition = Partition.of_counts([256, 512, 768])
    sizes = [[partition.counts[one] for one in ranks] for ranks in decoded]

    def body(group):
        codec = Watched(INT4, decoded=[])
        gather(group, codec, out=copies[hosts[group.rank]], partition=partition).wait()
        return codec.decoded

    copies = [np.zeros(NUMEL, np.float32) for _ in set(hosts)]
    assert run_threads(3, body) == sizes
    for copy in copies:  # the same on every host, each range added once
        np.testing.assert_allclose(copy, np.arange(NUMEL), atol=NUMEL / 13)
        assert copy.tobytes() == copies[0].tobytes()


def test_nobody_has_the_whole_before_all_have_added():
    partition, go = Partition.of_counts([512, 1024]), threading.Event()

    def body(group):
        out = shared_copy(group)
        ticket = gather(group, Watched(INT4, decoded=[], go=go if group.rank else None), out=out, partition=partition)
        if group.rank == 0:
            with pytest.raises(TimeoutError):
                ticket.wait(0.2)
            go.set()
        return np.array(ticket.wait())

    first, second = run_threads(2, body)
    assert first.tobytes() == second.tobytes()
    assert first[512:].any()
