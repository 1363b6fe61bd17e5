"""Ranks of one machine find out whether they see each other, also where a kernel tells less than usual."""

import os

import pytest
import seams

from zerort.comm.neighbours import see_each_other


@pytest.mark.parametrize(
    ("spaces", "seen"),
    [
        (("pid:[1]", "pid:[1]"), True),
        (("pid:[1]", "pid:[2]"), False),
        (("unknown, of process 7", "unknown, of process 8"), False),  # /proc/self/ns cannot be read
    ],
)
def test_ranks_see_each_other_in_one_process_space(spaces, seen):
    def tell(mine):
        return [mine, mine if mine in ("yes", "no") else f"{spaces[1]},{os.getpid()}"]

    with seams.inside(see_each_other, process_space=lambda: spaces[0]):
        assert see_each_other(tell) is seen
