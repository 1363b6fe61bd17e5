"""torch models on ranks with different numbers of tokens and of batches: losses as sums, weighted steps, join."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

import zerort as zr
import zerort_torch as zt
from zerort.testing.tolerance import OVER_STEPS

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

X = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def plain(batches):
    """Train one process on whole batches; return the weights."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def opened(group, plan=3, **options):
    optimizer = zr.AdamW(lr=1e-2, weight_decay=1e-2)
    rt = zr.open(plan=zr.Plan.zero(plan), optimizer=optimizer, group=group, **options)
    return rt, zt.shard(make(), rt, units=torch.nn.Linear)


def check(model, rt, expected):
    found = zt.full_state_dict(model)
    if rt.rank == 0:
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].numpy(), value, rtol=OVER_STEPS, atol=OVER_STEPS, err_msg=name)


@pytest.mark.parametrize("plan", [1, 3])
def test_summed_losses_of_uneven_rows_are_those_of_one_process(group, plan):
    rt, model = opened(group, plan)
    with rt:
        for step in range(6):
            cuts = np.sort(np.random.default_rng(step).integers(0, 24, rt.size - 1))
            mine = np.split(np.arange(24), cuts)[rt.rank]  # some ranks have no row at all
            torch.nn.functional.mse_loss(model(X[mine]), Y[mine], reduction="sum").backward()
            assert rt.step(weight=torch.tensor(len(mine))).weight == 24
        check(model, rt, plain([np.arange(24)] * 6))


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("plan", [0, 3])
def test_ranks_with_different_numbers_of_batches_end_together(group, plan, micro_steps):
    """Rank 0 has no batch, rank 1 seven, the others fewer. A batch that is computed again gives NaN, and is dropped."""
    counts = [0, 7, 2, 5][: WORLD.size] if WORLD.size > 1 else [4]
    every = [[np.arange(rank + at, rank + at + 3) for at in range(count)] for rank, count in enumerate(counts)]
    rt, model = opened(group, plan, micro_steps=micro_steps)
    with rt:
        joining, seen, steps = rt.join(every[rt.rank]), [], 0
        for at, rows in enumerate(joining):
            loss = torch.nn.functional.mse_loss(model(X[rows]), Y[rows], reduction="sum")
            (loss * torch.nan if joining.repeating else loss).backward()
            seen.append(torch.tensor(len(rows)))
            if (at + 1) % micro_steps == 0:
                rt.step(weight=seen)
                seen, steps = [], steps + 1
        assert steps == -(-max(counts) // micro_steps)
        starts = range(0, max(counts), micro_steps)
        batches = [np.concatenate([row for one in every for row in one[at : at + micro_steps]]) for at in starts]
        check(model, rt, plain(batches))


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_statistics_are_of_a_rank_that_has_batches_of_its_own(node, micro_steps):
    """Rank 0 runs out first, then rank 1, …: a batch that is computed again must not show in BatchNorm's statistics."""
    counts = [2 * (rank + 1) for rank in range(WORLD.size)]
    batches = [[X[at : at + 4] * (rank + 1) + at for at in range(count)] for rank, count in enumerate(counts)]
    torch.manual_seed(0)
    plain = torch.nn.BatchNorm1d(6, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
    with zr.open(plan=zr.Plan.zero(2), optimizer=zr.SGD(lr=0.1), group=node, micro_steps=micro_steps) as rt:
        zt.shard(model, rt)
        for at, batch in enumerate(rt.join(batches[rt.rank])):
            model(batch).square().mean().backward()
            if (at + 1) % micro_steps == 0:
                rt.step()
    for at in range(counts[-1]):
        plain(next(mine[at] for mine in batches if at < len(mine)))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model[0], name), getattr(plain, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_zero_grad_before_and_after_a_step_keeps_the_batch_of_join(node, micro_steps):
    """A loop that clears twice per step has nothing to drop, and ends with the weights of one that never clears."""
    count, found = 2 * (node.rank + 1), []
    for clears in (False, True):
        rt, model = opened(node, micro_steps=micro_steps)
        with rt:
            optimizer = zt.as_optimizer(rt)
            for at, first in enumerate(rt.join(range(count))):
                if clears and at % micro_steps == 0:
                    optimizer.zero_grad()
                    optimizer.zero_grad()  # whether or not the one behind the step was the first
                torch.nn.functional.mse_loss(model(X[first : first + 3]), Y[first : first + 3]).backward()
                if (at + 1) % micro_steps == 0:
                    optimizer.step()
                    if clears:
                        optimizer.zero_grad()
            assert rt.updates == 2 * node.size // micro_steps
            found.append(zt.full_state_dict(model, root=None))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())
