"""The contract of groups, kept by ranks that are threads and by a group of one."""

import json
import threading
import time

import numpy as np
import pytest

from zerort.comm import open_group
from zerort.config import GroupOptions
from zerort.device import HostStream
from zerort.errors import CallError, CollectiveTimeoutError, RankFailedError
from zerort.testing import run_threads
from zerort.testing.contracts.group import GroupContract


class TestSolo(GroupContract):
    @pytest.fixture
    def on_ranks(self):
        def run(body):
            with open_group(kind="solo") as group:
                body(group)

        return run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8], scope="class")
class TestThreads(GroupContract):
    @pytest.fixture
    def on_ranks(self, size):
        return lambda body: run_threads(size, body)


@pytest.mark.slow
def test_a_missing_thread_is_named():
    stories = {}
    others = [threading.Event() for _ in range(3)]

    def body(group):
        group.barrier(name="before").wait()
        if group.rank == 1:
            assert others[0].wait(60)
            assert others[2].wait(60)
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.all_reduce(np.ones(2), name="loss").wait()
        stories[group.rank] = str(caught.value)
        others[group.rank].set()

    run_threads(3, body, options=GroupOptions(timeout=4.0))
    for rank in (0, 2):
        assert "got no rank 1." in stories[rank]
        assert "rank 1: missing; last in #0 barrier() 'before'" in stories[rank]
    assert "got it later" in stories[1]


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_call_that_is_not_eager_does_not_wait_for_the_others(verb):
    gone_on = threading.Event()

    def body(group):
        if group.rank == 1:
            assert gone_on.wait(200), "rank 0 stood still until rank 1 came"
        ticket = getattr(group, verb)(np.ones(2), eager=False)
        if group.rank == 0:
            assert not ticket.done()
            gone_on.set()
        return ticket.wait()

    first, _ = run_threads(2, body)
    assert first.sum() == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 4}[verb]


def test_a_call_after_another_groups_waits_for_it_and_its_caller_does_not():
    written = threading.Event()

    def body(group):
        array = np.zeros(4)

        def write():
            assert written.wait(200)
            array.fill(group.rank + 1)
            if group.rank == 0:
                raise ArithmeticError("told to whoever waits for it")

        with HostStream("earlier") as stream:
            earlier = stream.submit(write)
            ticket = group.all_reduce(array, out=array, eager=False, after=earlier)
            assert not ticket.done()
            behind = group.barrier()  # queued behind it, and so not reached either
            if group.rank == 0:
                with pytest.raises(TimeoutError):
                    behind.wait(0.2)
                written.set()
            total = ticket.wait()  # made, though what rank 0 waited for has failed: rank 1 needs it
            behind.wait()
            if group.rank == 0:
                with pytest.raises(ArithmeticError):
                    earlier.wait()
        return total

    for total in run_threads(2, body):
        np.testing.assert_array_equal(total, 3)


def test_a_complaint_need_not_be_waited_for():
    def body(group):
        if group.rank == 0:
            group.complain("no gradient here", wait=False)  # nobody has come yet, and nobody is told of it here
            told.set()
        else:
            assert told.wait(200), "rank 0 waits for the others"
            with pytest.raises(CallError, match="no gradient here"):
                group.all_reduce(np.ones(2)).wait()
        assert group.all_reduce(np.ones(2)).wait().sum() == 2 * group.size

    told = threading.Event()
    run_threads(3, body)


def test_a_flight_record_holds_the_last_calls(tmp_path):
    def body(group):
        group.all_reduce(np.ones(2), name="loss").wait()
        with pytest.raises(CallError):
            group.all_reduce([1.0]).wait()
        return group.flight_record(tmp_path)

    for rank, path in enumerate(run_threads(2, body)):
        record = json.loads(path.read_text())
        assert record["rank"] == rank
        assert [(row["op"], row["name"], row["status"]) for row in record["calls"]] == [
            ("all_reduce", "loss", "done"),
            ("invalid call", "", "failed: CallError"),
        ]


def test_a_thread_that_left_is_noticed_at_once():
    def body(group):
        if group.rank == 0:
            return
        with pytest.raises(RankFailedError, match="rank 0: gone"):
            group.barrier().wait()

    began = time.monotonic()
    run_threads(3, body, options=GroupOptions(timeout=30))
    assert time.monotonic() - began < 10
