"""Ranks that share no memory use different parameters, without an option: who does not use a unit joins its gathers."""

import numpy as np
import pytest
import torch
from differing import (
    MARKS,
    STEPS,
    WORLD,
    Segments,
    Towers,
    branches_apart,
    expect_close,
    expect_the_same_where_ranks_sit_out,
    open_apart,
    shard_with_losses,
    towers_again,
)
from models import GPT, WIDTH, Block, Branching, Expert, text
from torch import nn
from training import LR, SAMPLES, assert_same, make_wide, part, train_plain

import zerort as zr
import zerort_torch as zt
from zerort.errors import CollectiveMismatchError

pytestmark = MARKS


@pytest.mark.parametrize(
    ("rt_anywhere", "factory"),
    [
        ("mpi", Branching),
        ("mpi", Towers),
        ("mpi", towers_again),
        ("hierarchical", Towers),
        ("hierarchical", Segments),
        ("nvme", Branching),
        ("nvme", Segments),
        ("nvme in one memory", towers_again),
        ("nvme on hosts", Towers),
    ],
    indirect=["rt_anywhere"],
)
def test_ranks_take_other_branches(rt_anywhere, factory):
    """Each rank computes with the experts, or towers, that its samples name; evaluations differ in length, too."""
    rt, losses = rt_anywhere, []
    model, expected = shard_with_losses(rt, factory)
    for step in range(STEPS):
        loss = model(*part(branches_apart(SAMPLES, step), rt.rank, rt.size))
        loss.backward()
        rt.step()
        losses.append(rt.mean(loss))
        if step == 1:
            with torch.no_grad():
                for at in range(1 + rt.rank):
                    assert torch.isfinite(model(*part(branches_apart(SAMPLES, at), rt.rank, rt.size)))
    assert_same(np.array(losses), expected)
    assert rt.memory().gathered_apart > 0


def test_steps_in_which_ranks_agree_gather_ahead_again(rt_anywhere):
    """Difference in the first, third and sixth step; the fourth watches, the fifth gathers ahead."""

    def batches(samples, seed):
        x, y = branches_apart(samples, seed)
        if seed not in (0, 2, 5):
            x[:, 0] = torch.arange(samples) % 3  # all experts on every rank
        return x, y

    rt = rt_anywhere
    expected = train_plain(make_wide(Branching), 7, batches=batches)
    model = zt.shard(make_wide(Branching), rt, units=Expert)
    losses, differed = [], []
    for step in range(7):
        loss = model(*part(batches(SAMPLES, step), rt.rank, rt.size))
        loss.backward()
        differed.append(rt.group.differences.is_known)
        rt.step()
        assert not rt.group.differences.is_known
        losses.append(rt.mean(loss))
    assert_same(np.array(losses), expected)
    assert differed == [step in (0, 2, 5) for step in range(7)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    "first_tokens",
    [([0] * 4, [1] * 4), ([0] * 4, [0, 0, 1, 1]), ([0, 0, 1, 1], [0] * 4)],
    ids=["other", "more", "less"],
)
def test_ranks_differ_for_the_first_time_when_units_are_gathered_ahead(options, first_tokens, prefetch):
    """In the third step rank 1's samples are for other experts, more of them, or fewer: as in one memory."""

    def weights(kind):
        with (
            open_apart(kind, options) as group,
            zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, prefetch=prefetch) as rt,
        ):
            model = zt.shard(make_wide(Branching), rt, units=Expert)
            for step in range(4):
                x, y = text(4, step)
                x[:, 0] = torch.tensor(first_tokens[int(step == 2 and rt.rank == 1)])
                model(x, y).backward()
                rt.step()
            return zt.full_state_dict(model, root=None)

    expected, found = weights("node"), weights("mpi")
    expect_close(found, expected)


class Ordered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x, order):
        return sum(self.experts[at](x) for at in order)


def test_ranks_come_for_what_was_gathered_ahead_in_other_orders(rt_anywhere):
    """The last rank passes over a unit that was gathered ahead, and comes back for it when its slot was used again."""
    rt, model = rt_anywhere, zt.shard(make_wide(Ordered), rt_anywhere, units=Expert)
    x, order = torch.ones(2, WIDTH, dtype=torch.float64), (0, 1, 2, 3)
    for _ in range(2):
        model(x, order).sum().backward()  # all in the same order: from the second step on it is the forecast
        rt.step()
    mine = (0, 2, 3, 1) if rt.rank == rt.size - 1 else order
    with torch.no_grad():
        found = model(x, mine)
        rt.group.barrier().wait()
        torch.testing.assert_close(found, model(x, order), rtol=1e-12, atol=1e-12)
    rt.group.barrier().wait()


@pytest.mark.parametrize("kind", ["node", "mpi"])
def test_a_unit_of_the_last_steps_first_micro_step_sleeps(options, kind):
    """It is in the order of that micro-step, and summed as zeros; in the other one it is in none."""
    with (
        open_apart(kind, options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, micro_steps=2) as rt,
    ):
        model = zt.shard(make_wide(Ordered), rt, units=Expert)
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        for used in ((0, 1), (1, 1), (2, 0)):
            for at in used:
                model(x, (at,)).sum().backward()
            assert rt.step().updated


def test_a_unit_that_slept_is_used_in_one_of_the_micro_steps(options):
    """On one rank in one, on the others in both: whole gradients are summed once, in the same order on all ranks."""
    with (
        open_apart("mpi", options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, micro_steps=2, accumulate="local") as rt,
    ):
        model = zt.shard(make_wide(Ordered), rt, units=Expert)
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        for used in (((0,), (0,)), ((0, 1), (0, 2) if rt.rank else (0, 1, 2))):
            for order in used:
                model(x, order).sum().backward()
            assert rt.step().updated


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
def test_ranks_sit_out_micro_steps(options, accumulate):
    """In some micro-steps a rank makes no backward pass, in the second step rank 1 not even a forward."""
    expect_the_same_where_ranks_sit_out(options, accumulate)


def test_a_rank_without_forward_and_backward_takes_part_in_the_step(rt):
    """It joins what the others gather from within its step, which sums zeros for it."""
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block)
    for step in range(4):
        batch = text(2, step)
        plain.zero_grad()
        plain(*batch).backward()
        norm = torch.cat([one.grad.flatten() for one in plain.parameters()]).norm().item()
        with torch.no_grad():
            for one in plain.parameters():
                one -= 0.1 * one.grad / rt.size
        if rt.rank == (rt.size - 1 if step % 2 else 0):
            model(*batch).backward()
        assert rt.step().grad_norm == pytest.approx(norm / rt.size, rel=1e-10)


def test_ranks_evaluate_other_lengths(rt_anywhere):
    """As ``generate()`` does: one rank is done after two tokens, another one after four."""
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt_anywhere, units=Block)
    with torch.no_grad():
        for step in range(2 + 2 * rt_anywhere.rank):
            batch = text(2, step)
            assert torch.equal(model(*batch), plain(*batch))
    model(*text(2, 0)).backward()  # together again
    assert rt_anywhere.step().updated


def test_a_part_of_the_model_alone_is_joined_by_ranks_that_call_the_whole(rt):
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block)
    h, batch = torch.ones(1, 2, WIDTH, dtype=torch.float64), text(2, 0)
    with torch.no_grad():
        found = model.blocks[1](h) if rt.rank else model(*batch)
        assert torch.equal(found, plain.blocks[1](h) if rt.rank else plain(*batch))
    assert rt.mean(rt.rank) == (rt.size - 1) / 2


def test_calls_that_are_no_gathers_are_still_a_mismatch(rt):
    """A rank that computes is joined by one that waits; then both are told that they wait for different things."""
    model = zt.shard(make_wide(GPT), rt, units=Block)
    if rt.rank:
        with torch.no_grad():
            model(*text(2, rt.rank))
    call = rt.group.all_reduce if rt.rank else rt.group.broadcast
    with pytest.raises(CollectiveMismatchError, match=r"(?s)rank 0: broadcast.*rank.* 1.*: all_reduce") as caught:
        call(np.zeros(1)).wait()
    assert len(set(WORLD.allgather(str(caught.value)))) == 1
    model(*text(2, 0)).backward()
    assert rt.step().updated


def test_ranks_that_discard_their_gradients_gather_alike_again(rt):
    """After an evaluation that differed there may be no step; `rt.discard_gradients` is where all ranks meet."""
    model = zt.shard(make_wide(Branching), rt, units=Expert)
    with torch.no_grad():
        model(*branches_apart(SAMPLES, WORLD.rank))
        model.experts[WORLD.rank % 2](torch.zeros(1, 1, WIDTH, dtype=torch.float64))
    rt.discard_gradients()
    assert not rt.group.differences.is_known
    with zt.gathered(model):
        assert all(one.isfinite().all() for one in model.parameters())


class SparseExperts(nn.Module):
    """A table by rows before experts, of which ranks use different ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=True)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, rows, expert):
        return self.experts[expert](self.table(rows)).sum()


def test_a_table_by_rows_is_joined_by_nobody(options):
    """Its rows may be late: ranks that differ beside one are told, and what was gathered then is gathered anew."""
    rows, other = torch.tensor([[1, 2 + WORLD.rank]]), WORLD.rank % 2
    with (
        open_apart("mpi", options) as group,
        zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group, prefetch=0) as rt,
    ):
        model = zt.shard(make_wide(SparseExperts), rt, units=Expert)
        for _ in range(3):
            model(rows, 0).backward()
            rt.step()
        with pytest.raises(CollectiveMismatchError, match="branches=True"):
            model(rows, other)
        calls = [lambda: zt.full_state_dict(model.table), lambda: model.experts[1](torch.zeros(1, WIDTH).double())]
        with pytest.raises(CollectiveMismatchError):
            calls[other]()
        rt.discard_gradients()
        model(rows, 0).backward()
        assert rt.step().updated
        with zt.gathered(model):
            whole = model.table.weight.detach().clone()
        np.testing.assert_array_equal(zt.full_state_dict(model, root=None)["table.weight"], whole)
