"""Any operation of a save or of a kept step refused with any error: the old checkpoint is there, or the new.

`make test` looks at every few operations, each error at others; ``ZERORT_EVERY=1`` (`make errnos`) at all of them.
"""

from __future__ import annotations

import os
import signal
import time
import warnings

import numpy as np
import pytest
from runs import EVERYTHING, open_offloaded, steps, values, weights

from zerort.checkpoint import Value, read_manifest, save, verify
from zerort.checkpoint.files.lease import LEASE
from zerort.errors import CallError, CheckpointError, StorageError
from zerort.layout import FlatLayout, Partition
from zerort.storage.files import faults
from zerort.storage.files.faults import injected
from zerort.testing import run_threads

CODES = ("eio", "enospc", "edquot", "erofs", "estale", "eintr", "enomem")
EVERY = os.environ.get("ZERORT_EVERY") == "1"
LAYOUT = FlatLayout.build({"w": (30_000,), "b": (3,)})


def operations_of(run) -> int:
    """Return how many operations a run makes."""
    with injected(f"eio@{10**9}:op=any"):
        run()
        found = faults.current()
        assert found is not None
        return found._seen[0]


def chosen(total: int, *, least: int) -> list[tuple[str, int]]:
    """Return which operations are refused with which error: all with all, or each error a few, at different places."""
    stride = 1 if EVERY else max(1, total // least)
    return [
        (code, number)
        for at, code in enumerate(CODES)
        for number in range(1 + (at * stride // len(CODES) if stride > 1 else 0), total + 1, stride)
    ]


def files_of(path):
    return sorted(["manifest.json", *(file.name for file in read_manifest(path).files)])


@pytest.mark.slow
def test_any_error_of_any_operation_of_a_save_leaves_the_old_or_the_new(tmp_path):
    path = tmp_path / "c"

    def run(number):
        def body(group):
            partition = Partition.build(LAYOUT.numel, group.size)
            mine = np.full(partition.counts[group.rank], number, np.float32)
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)
            save(path, group, [value], meta={"number": number})

        run_threads(2, body)

    run(0)
    kept = 0
    total = operations_of(lambda: run(0))
    assert total > 15
    ends = {"raised": 0, "went on": 0}
    for number, (code, at) in enumerate(chosen(total, least=6), 1):
        try:
            with injected(f"{code}@{at}:op=any"):
                run(number)
            kept = number
            ends["went on"] += 1
        except (StorageError, CheckpointError) as error:
            assert str(error).startswith("Expected")  # noqa: PT017
            ends["raised"] += 1
        found = read_manifest(path).meta["number"]
        assert found in (kept, number), (code, at)
        assert verify(path) == [], (code, at)
        kept = found
    assert ends["raised"] > ends["went on"] > 0, ends  # what may fail are deletions
    run(-1)
    assert sorted(os.listdir(path)) == files_of(path)
    print(f"{sum(ends.values())} errors in a save of {total} operations: {ends}")


@pytest.mark.slow
def test_any_error_of_any_operation_of_a_kept_step_leaves_it_or_the_one_before(tmp_path):
    """The run goes on in the same process: after `resume` it has the bits of a run that nothing disturbed."""
    last = tmp_path / "last"

    def run(group, number, fault):
        with open_offloaded(group, tmp_path / "scratch", EVERYTHING, last_step=last) as rt:
            rt.register("unit", values(0))
            rt.resume()
            while rt.updates < number:
                steps(rt, [rt.updates])
            with injected(fault):
                try:
                    steps(rt, [number])
                    completed = number + 1
                except (StorageError, CheckpointError):
                    completed = number
            kept = read_manifest(last).meta["updates"]
            assert completed <= kept <= number + 1, (fault, completed, kept)
            assert verify(last) == [], fault
            rt.discard_gradients()
            assert rt.resume().updates == kept
            if kept == number:
                steps(rt, [number])
            return completed == number, weights(rt)["unit.w"]

    def alone(number, fault=""):
        return run_threads(1, lambda group: run(group, number, fault))[0]

    alone(0)
    seen = []

    def count(group):
        with open_offloaded(group, tmp_path / "scratch", EVERYTHING, last_step=last) as rt:
            rt.register("unit", values(0))
            rt.resume()
            with injected(f"eio@{10**9}:op=any"):
                steps(rt, [1])
                seen.append(faults.current()._seen[0])

    run_threads(1, count)
    (total,) = seen
    assert total > 50
    raised = 0
    for number, (code, at) in enumerate(chosen(total, least=2), 2):
        failed, found = alone(number, f"{code}@{at}:op=any")
        raised += failed
    assert raised > 0
    # The same steps, undisturbed, end with the same bits.
    undisturbed = tmp_path / "undisturbed"

    def straight(group):
        with open_offloaded(group, undisturbed, EVERYTHING) as rt:
            rt.register("unit", values(0))
            steps(rt, range(number + 1))
            return weights(rt)["unit.w"]

    np.testing.assert_array_equal(found, run_threads(1, straight)[0])
    assert list((tmp_path / "scratch").iterdir()) == []
    print(f"{number - 1} errors in a kept step of {total} operations: {raised} raised")


@pytest.mark.slow
def test_an_operation_that_never_returns_costs_one_save_at_most(tmp_path):
    """The process is killed while one of its operations hangs; the next saver takes over at once."""
    path = tmp_path / "c"

    def run(number):
        def body(group):
            mine = np.full(LAYOUT.numel, number, np.float32)
            partition = Partition.build(LAYOUT.numel, 1)
            value = Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine)
            save(path, group, [value], meta={"number": number})

        run_threads(1, body)

    run(0)
    total = operations_of(lambda: run(0))
    stuck = 0
    for at in range(1, total + 1, 1 if EVERY else 3):
        kept = read_manifest(path).meta["number"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads that the child lacks
            child = os.fork()
        if child == 0:
            code = 1
            try:
                with injected(f"stuck@{at}:op=any"):
                    run(at)
                code = 0
            finally:
                os._exit(code)
        ended, until = (0, 0), time.monotonic() + (2.0 if EVERY else 1.0)
        while ended[0] == 0 and time.monotonic() < until:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            stuck += 1
        assert read_manifest(path).meta["number"] in (kept, at)
        assert verify(path) == []
    assert stuck > 3
    run(-1)
    assert sorted(os.listdir(path)) == files_of(path)
    assert not (path / LEASE).exists()


@pytest.mark.parametrize("text", ["eio@1:op=everything", "stuck@0", "eperm@1"])
def test_faults_that_do_not_exist_are_refused(text):
    with pytest.raises(CallError, match="Correct or unset it"), injected(text):
        pass
