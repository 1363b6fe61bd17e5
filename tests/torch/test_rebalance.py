"""torch models whose shards are cut anew while they train: parameters stay what they were, tensor and values."""

import pytest
import torch
from models import text
from training import SAMPLES, make_wide, part

import zerort as zr
import zerort_torch as zt

pytestmark = pytest.mark.mpi


def make():
    return torch.nn.Sequential(
        torch.nn.Embedding(256, 24), torch.nn.Linear(24, 32), torch.nn.Tanh(), torch.nn.Linear(32, 256)
    )


def losses(group, plan, *, changes):
    with zr.open(zr.Plan.zero(plan), zr.AdamW(lr=1e-2), group=group, virtual_shards=4) as rt:
        model = zt.shard(make_wide(make), rt, units=(torch.nn.Linear, torch.nn.Embedding))
        tensors = {name: id(value) for name, value in model.named_parameters()}
        found = []
        for step in range(4):
            if changes:
                rt.rebalance(shard_weights=[(rank + step) % 3 + (rt.size < 3) for rank in range(rt.size)])
            x, y = text(SAMPLES, step)[:2]
            for shard in rt.micro_batches:
                mine = part((x, y), shard, rt.micro_batch_count)
                torch.nn.functional.cross_entropy(model(mine[0]).flatten(0, -2), mine[1].flatten()).backward()
            found.append(rt.step().digest)
        assert {name: id(value) for name, value in model.named_parameters()} == tensors
        state = zt.full_state_dict(model)
        return found, {name: value.clone() for name, value in state.items()} if rt.rank == 0 else {}


@pytest.mark.parametrize("plan", [1, 3])
def test_a_model_trains_on_over_cuts_that_change(group, plan):
    expected, values = losses(group, plan, changes=False)
    found, after = losses(group, plan, changes=True)
    assert found == expected
    assert len(set(found)) == 4
    for name, value in values.items():
        assert torch.equal(after[name], value), name
