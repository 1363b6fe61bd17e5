"""Calls that may differ between ranks: they give way, wait, or are joined; all others are a mismatch."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from zerort.comm.guard.differing import Join, RanksDiffer
from zerort.comm.guard.stance import GIVES_WAY, Stance
from zerort.errors import CallError, CollectiveError, CollectiveMismatchError, RankFailedError
from zerort.testing import run_threads

UNITS = 5


def values(unit, rank):
    return np.full(3 + unit, 10.0 * unit + rank)


def add_joins(group):
    """Let the group gather some arrays at any time; count how often this rank joined."""
    joined = []

    def join(unit):
        joined.append(unit)
        return nullcontext(Join(values(unit, group.rank), np.empty((3 + unit) * group.size), [3 + unit] * group.size))

    for unit in range(UNITS):
        group.differences.joins[f"unit {unit}"] = lambda unit=unit: join(unit)
    return joined


def gather(group, unit):
    """Gather one of them, by a call that others can join."""
    counts = [3 + unit] * group.size
    with group.differences.having(Stance(turn=unit)):
        found = group.all_gather(values(unit, group.rank), counts=counts, name=f"unit {unit}").wait()
    assert np.array_equal(found, np.concatenate([values(unit, rank) for rank in range(group.size)]))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_gather_what_they_like_among_sums_that_all_make(size, seed):
    """Sums run ahead, in one order on all ranks; what else a rank does between them is its own business."""

    def body(group):
        add_joins(group)
        own = random.Random(100 * seed + group.rank)
        tickets = []
        for at in range(4):
            for _ in range(own.randrange(5)):
                gather(group, own.randrange(UNITS))
            tickets.append(group.all_reduce(np.full(5, float(at + group.rank)), name=f"sum {at}", eager=False))
        for at, ticket in enumerate(tickets):
            assert np.array_equal(ticket.wait(), np.full(5, sum(at + rank for rank in range(group.size))))
        gather(group, own.randrange(UNITS))
        group.barrier().wait()

    run_threads(size, body)


def test_the_first_turn_comes_first_and_each_unit_travels_once():
    """Two ranks, each with units of its own and one in common: nobody gathers what another has just gathered."""

    def body(group):
        joined = add_joins(group)
        for unit in (0, 2, 4) if group.rank else (1, 2, 3):
            gather(group, unit)
        group.barrier().wait()
        return joined

    assert run_threads(2, body) == [[0, 4], [1, 3]]


def test_where_all_make_the_same_calls_nobody_joins():
    def body(group):
        joined = add_joins(group)
        for unit in range(UNITS):
            gather(group, unit)
        group.barrier().wait()
        return joined, group.differences.is_known, group.differences.surplus

    assert run_threads(3, body) == [([], False, 0)] * 3


def test_calls_that_give_way_do_so_on_every_rank_until_the_difference_is_forgotten():
    def body(group):
        def speculate(name):
            with group.differences.having(GIVES_WAY):
                return group.all_gather(np.ones(1), name=name, eager=False)

        ahead = [speculate(f"ahead {group.rank}"), speculate("behind")]
        for ticket in ahead:
            with pytest.raises(RanksDiffer):
                ticket.wait()
        assert group.differences.is_known
        group.barrier().wait()
        group.differences.forget()
        assert speculate("again").wait().size == group.size

    run_threads(3, body)


def test_a_call_that_waits_is_made_after_others_have_given_way():
    def body(group):
        if group.rank:
            with group.differences.having(GIVES_WAY), pytest.raises(RanksDiffer):
                group.all_gather(np.ones(1), name="ahead").wait()
        return group.all_reduce(np.ones(1)).wait()[0]

    assert run_threads(3, body) == [3.0] * 3


def test_calls_without_a_stance_are_a_mismatch():
    """Also behind gathers that the ranks have joined: the group stays usable."""

    def body(group):
        add_joins(group)
        if group.rank == 1:
            gather(group, 3)
        with pytest.raises(CollectiveMismatchError, match=r"(?s)all_reduce.* at .*barrier\(\)") as caught:
            (group.barrier() if group.rank else group.all_reduce(np.ones(1))).wait()
        assert not isinstance(caught.value, RanksDiffer)
        return group.all_reduce(np.ones(1)).wait()[0]

    assert run_threads(3, body) == [3.0] * 3


def test_a_rank_that_cannot_join_tells_all():
    """Its disk fails, say: the gather fails on every rank, and so does what it waited for."""

    def body(group):
        add_joins(group)
        if group.rank == 1:
            group.differences.joins["unit 2"] = lambda: 1 / 0
        call = (lambda: group.barrier().wait()) if group.rank else (lambda: gather(group, 2))
        with pytest.raises(CallError, match=r"unit 2: ZeroDivisionError.*rank 1"):
            call()

    run_threads(3, body)


def test_a_call_that_is_interrupted_has_the_number_that_the_others_give_it(monkeypatch):
    """Gathers that a rank has joined count."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def body(group):
        add_joins(group)
        for unit in (0, 1, 2) if group.rank else ():
            gather(group, unit)
        assert group.all_reduce(np.ones(1)).wait()[0] == 2.0
        made = group._calls._sequence + group.differences.surplus
        if group.rank:
            with pytest.raises(RankFailedError) as caught:
                group.barrier().wait()
        else:
            assert group.differences.surplus > 0
            monkeypatch.setattr(group._calls, "_new_call", interrupt)
            with pytest.raises(KeyboardInterrupt):
                group.reduce(np.ones(1), root=0)
            monkeypatch.undo()
            with pytest.raises(CollectiveError) as caught:
                group.barrier().wait()
        return made, str(caught.value)

    (made, _), (same, told) = run_threads(2, body)
    assert made == same
    assert f"KeyboardInterrupt: ; in #{made} reduce" in told
