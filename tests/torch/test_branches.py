"""Ranks that use different parameters and share no memory: with `branches=True`, or inside `zt.gathered(model)`."""

import numpy as np
import pytest
import torch
from models import GPT, VOCAB, WIDTH, Block, Branching, Expert, text
from mpi4py import MPI
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import LR, SAMPLES, assert_same, make_wide, part, train_plain

import zerort as zr
import zerort_torch as zt
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.errors import CollectiveMismatchError, UnitStateError

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not 2 <= MPI.COMM_WORLD.size <= 3, reason="ranks that differ: two and three"),
]

WORLD, STEPS = MPI.COMM_WORLD, 3


def open_apart(kind, options):
    """Return ranks that share no memory, or not all of them."""
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    return Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))


@pytest.fixture
def rt(options):
    with open_apart("mpi", options) as group, zr.open(plan=zr.Plan.zero(3), group=group) as found:
        yield found


@pytest.fixture(params=["mpi", "hierarchical", "nvme"])
def rt_anywhere(request, options, tmp_path):
    """The same where some ranks share memory, and with parameters on NVMe."""
    on_disk = {"parameter": zr.Tier.NVME, "state": zr.Tier.NVME} if request.param == "nvme" else {}
    scratch = WORLD.bcast(str(tmp_path)) if on_disk else None
    plan, kind = zr.Plan.zero(3, **on_disk), "mpi" if on_disk else request.param
    with (
        open_apart(kind, options) as group,
        zr.open(plan=plan, optimizer=zr.AdamW(lr=LR), group=group, scratch=scratch) as found,
    ):
        yield found
    WORLD.Barrier()


def branches_apart(samples, seed):
    """Return token batches of three experts, one after the other: two ranks share one of them, three ranks none."""
    x, y = text(samples, seed)
    x[:, 0] = (torch.arange(samples) * 3 // samples + seed) % 3
    return x, y


def test_ranks_take_other_branches_inside_of_gathered(rt_anywhere):
    """Forward and backward in one block: each rank computes with the experts that its samples name."""
    rt, expected = rt_anywhere, train_plain(make_wide(Branching), STEPS, batches=branches_apart)
    model = zt.shard(make_wide(Branching), rt, units=Expert)
    losses = []
    for step in range(STEPS):
        with zt.gathered(model):
            loss = model(*part(branches_apart(SAMPLES, step), rt.rank, rt.size))
            loss.backward()
        rt.step()
        losses.append(rt.group.all_reduce(np.array([loss.item()])).wait()[0] / rt.size)
    assert_same(np.array(losses), expected)


class Towers(torch.nn.Module):
    """Two towers of which a batch uses one or both, one checkpointed or not; tied to each other and to the head."""

    def __init__(self, *, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.towers = torch.nn.ModuleDict({name: torch.nn.ModuleList([Expert(), Expert()]) for name in "ab"})
        self.scales = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(WIDTH)) for name in "ab"})
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.towers["b"][1].up.weight = self.towers["a"][0].up.weight

    def forward(self, x, y):
        h, used = self.tokens(x), "a" if (x[0, 0] % 3 == 0) else "b" if (x[0, 0] % 3 == 1) else "ab"
        for name in used:
            for block in self.towers[name]:
                recompute = name == "b" and self.recompute
                h = h + (checkpoint(block, h, use_reentrant=False) if recompute else block(h)) * self.scales[name]
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def towers_again():
    return Towers(recompute=True)


class Segments(torch.nn.Module):
    """Twice two towers of which a batch uses one; each is computed again as a whole, units in forward's order."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.towers = torch.nn.ModuleList(torch.nn.Sequential(Expert(), Expert(), Expert()) for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        h = self.tokens(x)
        for first in (0, 2):
            h = h + checkpoint(self.towers[first + int(x[0, 0] % 2)], h, use_reentrant=False)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("factory", [Branching, Towers, towers_again, Segments])
def test_ranks_take_other_branches(rt_anywhere, factory):
    """Forward and backward as ever: each rank computes with the experts, or towers, that its samples name."""
    rt = rt_anywhere
    parts = {} if factory is Branching else {"parts": rt.size}
    expected = train_plain(make_wide(factory), STEPS, batches=branches_apart, **parts)
    model = zt.shard(make_wide(factory), rt, units=(Expert, torch.nn.Embedding), branches=True)
    losses = []
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

    def weights(kind, **settings):
        with (
            open_apart(kind, options) as group,
            zr.open(
                plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, micro_steps=3, accumulate=accumulate
            ) as rt,
        ):
            model = zt.shard(make_wide(Branching), rt, units=Expert, **settings)
            for step in range(3):
                for at in range(3):
                    idle = step == 1 and rt.rank == 1
                    if idle and kind == "mpi":
                        continue
                    loss = model(*part(branches_apart(SAMPLES, step + at), rt.rank, rt.size))
                    if rt.rank == 0 or ((rt.rank + at + step) % 3 and not idle):
                        loss.backward()
                rt.step()
            return zt.full_state_dict(model, root=None)

    expected, found = weights("node"), weights("mpi", branches=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_a_rank_that_is_out_of_turn_is_told_of_a_mismatch(rt):
    """A block called outside of the model's forward is gathered by a collective of its own: others make none."""
    model = zt.shard(make_wide(GPT), rt, units=Block, branches=True)
    alone = model.blocks[1] if rt.rank else model
    batch = (torch.ones(1, 2, WIDTH, dtype=torch.float64),) if rt.rank else text(2, 0)
    with pytest.raises(CollectiveMismatchError, match=r"(?s)rank 0: .*ranks? 1.*: all_gather.*'blocks\.1 ") as caught:
        alone(*batch)
    assert "in the order of the modules" in str(caught.value)
    assert "rt, branches=True" not in str(caught.value)
    assert len(set(WORLD.allgather(str(caught.value)))) == 1


def test_other_branches_are_named_with_their_cure_by_default(rt):
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


def test_a_rank_without_any_gradient_takes_part_in_the_step(rt):
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block)
    x, y = text(2, 0)
    plain(x, y).backward()
    norm = torch.cat([one.grad.flatten() for one in plain.parameters()]).norm().item()
    for _ in range(2):  # in the second step with an order that was agreed on
        with zt.gathered(model):
            if rt.rank == rt.size - 1:
                model(x, y).backward()
        report = rt.step()
        norm, first = None, norm
        assert first is None or report.grad_norm == pytest.approx(first / rt.size, rel=1e-10)


def test_ranks_evaluate_other_lengths_inside_of_gathered(rt):
    """As ``generate()`` does: one rank is done after two tokens, another one after four."""
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt, units=Block)
    with zt.gathered(model), torch.no_grad():
        for step in range(2 + 2 * rt.rank):
            batch = text(2, step)
            assert torch.equal(model(*batch), plain(*batch))
    model(*text(2, 0)).backward()  # together again
    assert rt.step().updated
