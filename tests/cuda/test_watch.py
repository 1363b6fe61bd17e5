"""The watch over a communicator: who is inside NCCL when it ends."""

import threading
import time

import pytest

pytest.importorskip("cupy")

from zerort.comm import open_group
from zerort.config import GroupOptions
from zerort.errors import CollectiveError, CollectiveTimeoutError


@pytest.fixture
def group(tmp_path):
    with open_group(kind="nccl", options=GroupOptions(timeout=1.0, flight_dir=str(tmp_path))) as group:
        yield group


@pytest.fixture
def inside(group):
    """Start a thread that is inside NCCL until it may go; what is appended to ``left`` says that it is out."""
    go, left, entered = threading.Event(), [], threading.Event()

    def stay(seconds):
        with group._transport.device.cupy_device, group._transport._watch.entry("#7 all_reduce"):
            entered.set()
            go.wait(seconds)
            left.append(True)

    threads = []

    def start(seconds):
        threads.append(threading.Thread(target=stay, args=(seconds,)))
        threads[0].start()
        entered.wait(10)
        return left

    yield start
    go.set()
    threads[0].join(10)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("verb", ["abort", "close", "end"])
def test_the_end_waits_until_nobody_is_inside(group, inside, verb):
    watch, left = group._transport._watch, inside(0.3)
    getattr(watch, verb)()
    assert left
    with pytest.raises(CollectiveError, match="open for #8 all_gather, got it ended"), watch.entry("#8 all_gather"):
        pytest.fail("someone came in")


def test_an_entry_that_does_not_return_breaks_the_group(group, inside):
    """NCCL may block whoever enters it, to connect to a rank that is gone, say."""
    left, until = inside(20), time.monotonic() + 10
    while group._transport.broken is None and time.monotonic() < until:
        time.sleep(0.01)
    assert isinstance(group._transport.broken, CollectiveTimeoutError)
    assert "finish #7 all_reduce within 1.0 s" in str(group._transport.broken)
    assert not left
