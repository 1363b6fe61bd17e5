"""A rank that leaves says how far it has come, and those who miss it end with that story."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import zerort as zr
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing, exit_code
from zerort.comm.guard.verdict import Sighting, missing_error
from zerort.errors import RankFailedError
from zerort.testing import run_threads


def missed(group: zr.Group) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        group.barrier().wait()
    return caught.value


def test_the_story_names_who_left_after_which_update_and_where_the_others_are() -> None:
    def body(group: zr.Group) -> Any:
        group.standing.updates = 2
        if group.rank == 0:
            group.close()
            return None
        error = missed(group)
        assert error.exit_code == 1
        assert str(error).splitlines()[-1] == error.story
        again = missed(group)  # said again, not "Open a new group."
        assert (again.story, again.__cause__, str(again)) == (error.story, None, str(error))
        return error.story

    _, one, two = run_threads(3, body)
    assert one == two
    assert one.startswith("rank 0 left after update 2, ranks 1, 2 are at update 3: give all ranks the same number of")


def test_without_a_runtime_no_update_is_named() -> None:
    def body(group: zr.Group) -> Any:
        if group.rank == 1:
            group.close()
            return None
        return missed(group).story

    story = "rank 1 left: every rank must make the same calls before it closes the group or ends."
    assert run_threads(2, body) == [story, None]


def test_a_part_of_a_group_stands_where_the_group_does() -> None:
    def body(group: zr.Group) -> Any:
        part = group.split(0)
        assert part is not None
        group.standing.updates = 7
        if group.rank == 0:
            group.close()
            return None
        return missed(part).story

    assert str(run_threads(2, body)[1]).startswith("rank 0 left after update 7, rank 1 is at update 8: ")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SystemExit(3), 3, "rank 0 left with exit code 3: look at the output of what left for the cause."),
        (SystemExit("no data"), 1, "rank 0 left with exit code 1: look at the output of what left for the cause."),
        (KeyError("x"), 1, "rank 0 left with KeyError: 'x': look at the output of what left for the cause."),
    ],
)
def test_a_block_that_is_left_by_an_error_says_which(error: BaseException, code: int, told: str) -> None:
    def body(group: zr.Group) -> Any:
        if group.rank == 0:
            with contextlib.suppress(KeyError, SystemExit), group:
                raise error
            return None
        caught = missed(group)
        return caught.story, caught.exit_code

    assert run_threads(2, body) == [None, (told, code)]


def test_followers_are_counted_among_those_who_were_there() -> None:
    sightings = [
        Sighting(arrived=False, left=True, farewell=Standing(updates=2)),
        Sighting(arrived=True),
        Sighting(arrived=False, left=True, farewell=Standing(updates=2, follows=True)),
    ]
    error = missing_error("group", Call("barrier", "x"), waited=1, sightings=sightings, record=None, updates=2)
    assert "got none of rank 0: gone." in str(error)
    assert str(error).splitlines()[-1].startswith("rank 0 left after update 2, ranks 1, 2 are at update 3: ")


def test_of_a_killed_rank_nothing_is_made_up() -> None:
    sightings = [Sighting(arrived=False, left=True), Sighting(arrived=True)]
    error = missing_error("group", Call("barrier", "x"), waited=1, sightings=sightings, record=None, updates=2)
    assert str(error).splitlines()[-1].startswith("Look at the output of the rank that left")


@pytest.mark.parametrize("letter", ["x", "😀", "\x01", "\ud800", '"'], ids=ascii)
def test_what_is_said_can_be_read(letter: str) -> None:
    standing = Standing(updates=4)
    standing.take_exit(ValueError(letter * 5000 + "\nmore"))
    assert standing.error
    assert Standing.read(standing.words().encode().decode()) == standing
    assert len(standing.words().encode()) < 1500  # of 2048 on a node's board
    assert Standing.read("") is None


def test_exit_codes_are_pythons() -> None:
    assert [exit_code(one) for one in (None, 0, 3, 256 + 3, "text", True)] == [0, 0, 3, 3, 1, 1]
