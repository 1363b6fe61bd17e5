"""Kill a publisher at each of its operations, and a reader at each of its own: ``publish_kills.py DIRECTORY STRIDE``.

A child publishes with two ranks (threads) and is killed by the n-th operation on the file system, for every STRIDE-th
n; then a reader finds a whole version, and the next child goes on. A child that reads and writes safetensors is killed
in the same way, while versions come and go: the file it writes is whole, and the feed as it was.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from zerort.checkpoint import Value
from zerort.checkpoint.files.sweep import wait_for_sweeps
from zerort.layout import FlatLayout, Partition
from zerort.publish import Feed, Reader
from zerort.storage.files import faults
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (500, 100), "b": (1000,)})


def values_at(version):
    """Return the model of a version: one element in ten changes from each to the next."""
    index = np.arange(LAYOUT.numel)
    return (version - (version - index) % 10).astype(np.float32)


def publish(where, pushes):
    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        feed = None

        def values():
            mine = values_at(feed.version + 1)[partition.of(group.rank).slice]
            return [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)]

        feed = Feed(where, group, values, updates=lambda: 0, dtype="float32", full_every=4)
        for _ in range(pushes):
            feed.push()
        feed.close()

    run_threads(2, body)
    wait_for_sweeps()


def check(arrays, version):
    wanted = values_at(version)
    for extent in LAYOUT.extents:
        assert (arrays[extent.name].astype(np.float32).reshape(-1) == wanted[extent.slice]).all(), version


def in_child(work):
    """Return whether the work was killed; it must not fail in any other way."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def until_it_lives(work, stride, after):
    """Kill ``work`` at operation 1, 1 + stride, …, until it ends by itself; return how many were killed."""
    points = 0
    while True:

        def doomed(number=1 + points * stride):
            with faults.injected(f"kill@{number}:op=any"):
                work()

        killed = in_child(doomed)
        after()
        if not killed:
            return points
        points += 1


def main():
    where, stride = Path(sys.argv[1]) / "feed", int(sys.argv[2])
    where.parent.mkdir(parents=True, exist_ok=True)
    publish(where, 1)
    reader = Reader(where)
    versions = [1]

    def look():
        for one in (reader, Reader(where)):
            check(one.update(), one.version)
        assert reader.version >= versions[-1]
        versions.append(reader.version)

    writes = until_it_lives(lambda: publish(where, 6 if stride > 1 else 12), stride, look)
    assert len(set(versions)) > 3  # killed in every stage of several pushes
    kept = {name.split("-")[0] for name in os.listdir(where)}
    assert kept <= {"feed.json", "full", "delta", "version"}, kept

    target = where.parent / "model.safetensors"
    saved = []

    def read():
        from safetensors.numpy import load_file

        one = Reader(where)
        one.update()
        one.save(target)
        check(load_file(target), one.version)

    def look_at_file():
        from safetensors.numpy import load_file

        publish(where, 1)
        look()
        if target.exists():
            found = load_file(target)
            saved.append(int(found["w"].astype(np.float32).max()))
            check(found, saved[-1])

    reads = until_it_lives(read, max(1, stride // 4), look_at_file)
    assert saved

    # At any moment, while versions are published: half-way through a file, a check, an update.
    moments = 0
    publisher = os.fork()
    if publisher == 0:
        publish(where, 40 if stride > 1 else 400)
        os._exit(0)
    follower = Reader(where)
    while os.waitpid(publisher, os.WNOHANG)[0] == 0:
        child = os.fork()
        if child == 0:
            one = Reader(where)
            while True:
                check(one.update(), one.version)
        time.sleep(0.002 * (1 + moments % 9))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status == signal.SIGKILL, status
        check(follower.update(), follower.version)
        moments += 1
    check(follower.update(), follower.version)
    print(f"{writes} kills of a publisher, {reads} of a reader that writes, {moments} of one that reads")


if __name__ == "__main__":
    main()
