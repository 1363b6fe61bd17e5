"""The power fails after any operation of a push: the last version that was pushed, or the next, is there and whole."""

import os

import numpy as np
from power_loss import DiskLog, put

from zerort.checkpoint import Value
from zerort.checkpoint.files import sweep
from zerort.layout import FlatLayout, Partition
from zerort.publish import Feed, Reader
from zerort.storage.files import disk
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (600,), "b": (3,)})
STRIDE = 1 if os.environ.get("ZERORT_EVERY") == "1" else 4


def values_at(version):
    index = np.arange(LAYOUT.numel)
    return (version - (version - index) % 3).astype(np.float32)


def test_every_version_that_was_pushed_is_there(tmp_path):
    log, where, found = DiskLog(), tmp_path / "above" / "feed", tmp_path / "found"

    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        own = partition.of(group.rank).slice

        def values():
            mine = values_at(feed.version + 1)[own]
            return [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)]

        feed = Feed(where, group, values, updates=lambda: 0, dtype="float32", full_every=3)
        for number in range(1, 6):
            feed.push()
            group.barrier().wait()
            if group.rank == 0:
                log.mark(number)
            group.barrier().wait()
        feed.close()

    with disk.watched(log.watch):
        run_threads(2, body)
        sweep.wait_for_sweeps()
    states = 0
    for pushed, state in log.states(str(where), stride=STRIDE):
        put(found, state)
        states += 1
        if not pushed and not (found / "feed.json").exists():
            continue
        reader = Reader(found, map_files=False)
        arrays = reader.update()
        assert pushed <= reader.version <= pushed + 1
        for extent in LAYOUT.extents:
            assert (arrays[extent.name] == values_at(reader.version)[extent.slice]).all(), (pushed, reader.version)
    print(f"{len(log.operations)} operations, {states} states")
    assert states > 50
