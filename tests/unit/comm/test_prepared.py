"""Calls that are made again: which of them keep their shortcut."""

import numpy as np
import pytest

from zerort import native
from zerort.comm import open_group


@pytest.mark.skipif(not native.AVAILABLE, reason="shortcuts are native")
def test_a_call_behind_queued_work_keeps_its_shortcut_for_later():
    source = np.arange(8.0)
    with open_group(kind="node") as group:
        calls = group._calls

        def call():
            np.testing.assert_array_equal(group.all_reduce(source).wait(), source)

        for _ in range(3):
            call()
        (known,) = calls._known.values()
        shortcut, queue = known.shortcut, calls._queue
        assert shortcut
        calls._queue = ["work that nobody has begun"]
        for _ in range(20):  # more than a shortcut that has become stale is made anew
            call()
        calls._queue = queue
        call()
        assert known.shortcut is shortcut
