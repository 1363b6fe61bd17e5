"""Ranks that use different parameters and share no memory, in one order of all gathers (`branches=True`), or gathered.

What they do without either is in `test_differing.py`.
"""

import numpy as np
import pytest
import torch
from differing import (
    MARKS,
    STEPS,
    Segments,
    Towers,
    branches_apart,
    expect_the_same_where_ranks_sit_out,
    open_apart,
    shard_with_losses,
    towers_again,
)
from models import GPT, WIDTH, Block, Branching, Expert, text
from training import SAMPLES, assert_same, make_wide, part

import zerort as zr
import zerort_torch as zt
from zerort.errors import CollectiveMismatchError, UnitStateError

pytestmark = MARKS


@pytest.mark.parametrize("rt_anywhere", ["mpi", "hierarchical", "nvme"], indirect=True)
def test_ranks_take_other_branches_inside_of_gathered(rt_anywhere):
    """Forward and backward in one block: each rank computes with the experts that its samples name."""
    rt, losses = rt_anywhere, []
    model, expected = shard_with_losses(rt, Branching)
    for step in range(STEPS):
        with zt.gathered(model):
            loss = model(*part(branches_apart(SAMPLES, step), rt.rank, rt.size))
            loss.backward()
        rt.step()
        losses.append(rt.group.all_reduce(np.array([loss.item()])).wait()[0] / rt.size)
    assert_same(np.array(losses), expected)


@pytest.mark.parametrize(
    ("rt_anywhere", "factory"),
    [("mpi", Branching), ("mpi", towers_again), ("mpi", Segments), ("hierarchical", Towers), ("nvme", towers_again)],
    indirect=["rt_anywhere"],
)
def test_ranks_take_other_branches(rt_anywhere, factory):
    """Forward and backward as ever: each rank computes with the experts, or towers, that its samples name."""
    rt, losses = rt_anywhere, []
    model, expected = shard_with_losses(rt, factory, branches=True)
    for step in range(STEPS):
        loss = model(*part(branches_apart(SAMPLES, step), rt.rank, rt.size))
        loss.backward()
        losses.append(rt.mean(loss))  # between backward and step: the ranks have all done the same by then
        rt.step()
    assert_same(np.array(losses), expected)
    with torch.no_grad():  # an evaluation takes turns, too
        assert np.isfinite(rt.mean(model(*part(branches_apart(SAMPLES, rt.rank), rt.rank, rt.size))))


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
def test_ranks_sit_out_micro_steps(options, accumulate):
    """In some micro-steps a rank makes no backward pass, in the second step rank 1 not even a forward."""
    expect_the_same_where_ranks_sit_out(options, accumulate, branches=True)


def test_a_part_that_is_called_out_of_turn_is_joined(rt):
    """A block called outside of the model's forward is gathered apart: the others join it in the middle of theirs."""
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block, branches=True)
    h, batch = torch.ones(1, 2, WIDTH, dtype=torch.float64), text(2, 0)
    with torch.no_grad():
        found = model.blocks[1](h) if rt.rank else model(*batch)
        assert torch.equal(found, plain.blocks[1](h) if rt.rank else plain(*batch))
    rt.group.barrier().wait()


def test_where_ranks_cannot_join_other_branches_are_named_with_their_cure(options):
    """A copy of the whole on each host has a state that all ranks change together."""
    with open_apart("mpi", options) as group, zr.open(plan=zr.Plan.zero(3, secondary="host"), group=group) as rt:
        model = zt.shard(make_wide(Branching), rt, units=Expert)
        with pytest.raises(CollectiveMismatchError, match=r"(?s)'experts\.\d .*zt\.shard\(model, rt, branches=True\)"):
            model(*part(branches_apart(SAMPLES, 0), rt.rank, rt.size))


def test_reentrant_checkpointing_is_refused_with_branches(rt):
    model = zt.shard(make_wide(lambda: GPT(recompute=True)), rt, units=Block, branches=True)
    with pytest.raises(UnitStateError, match=r"branches=True, got one inside another: reentrant"):
        model(*text(2, 0)).backward()


class Choice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([Expert(), Expert()])

    def forward(self, x, which):
        return self.experts[which](x)


def test_one_backward_through_two_models_with_branches_is_refused(rt):
    """Nobody could tell whose turn it is; one after the other, each with a backward of its own, they train."""
    one, two = (zt.shard(make_wide(Choice), rt, units=Expert, branches=True, name=name) for name in ("one", "two"))
    x, which = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True), rt.rank % 2
    for model in (one, two):
        model(x, which).sum().backward()
    assert rt.step().updated
    with pytest.raises(UnitStateError, match=r"got two of them\. Put both into one module"):
        two(one(x, which), 1 - which).sum().backward()


def test_consolidated_models_leave_no_turns_behind(rt):
    model = zt.shard(make_wide(GPT), rt, units=Block, branches=True)
    model(*text(2, rt.rank)).backward()
    rt.step()
    zt.consolidate(model)
    other = zt.shard(make_wide(GPT), rt, units=Block, name="other")
    other(*text(2, 0)).backward()
    assert rt.step().updated


def test_ranks_evaluate_other_lengths_inside_of_gathered(rt):
    """As ``generate()`` does: one rank is done after two tokens, another one after four."""
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block)
    with zt.gathered(model), torch.no_grad():
        for step in range(2 + 2 * rt.rank):
            batch = text(2, step)
            assert torch.equal(model(*batch), plain(*batch))
    model(*text(2, 0)).backward()  # together again
    assert rt.step().updated
