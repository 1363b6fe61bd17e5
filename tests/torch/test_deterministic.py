"""With virtual shards a torch model trains to the same bits on any number of ranks, over every transport and tier."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from models import GPT, Branching, Expert, text
from mpi4py import MPI
from training import LR, assert_same, make, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

STEPS, SHARDS = 3, 8


def open_kind(kind, options):
    """Return a group of all ranks; hierarchical: two ranks to a host."""
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank // 2, WORLD.rank)
    return Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))


def train(group, plan, **options):
    """Return the losses of a few steps, and the weights after them."""
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=LR), group=group, virtual_shards=SHARDS, **options) as rt:
        model = zt.shard(make_wide(GPT), rt)
        return train_sharded(model, rt, STEPS), zt.full_state_dict(model, root=None)


@pytest.fixture(scope="module")
def alone():
    with open_group(kind="solo") as solo:
        return train(solo, zr.Plan.zero(0))


@dataclass(frozen=True)
class Case:
    """Where a run lies, and how its ranks are connected."""

    kind: str
    plan: zr.Plan
    more: dict = field(default_factory=dict)

    def __str__(self):
        return " ".join([self.kind, str(self.plan.gradient.placement), *self.more.values()])


NVME = zr.Tier.NVME
CASES = [
    Case("node", zr.Plan.zero(1)),
    Case("node", zr.Plan.zero(3)),
    Case("node", zr.Plan.zero(3), {"accumulate": "local"}),
    Case("mpi", zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)),
    Case("hierarchical", zr.Plan.zero(2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_on_any_number_of_ranks(case, options, alone, tmp_path):
    losses, weights = alone
    with open_kind(case.kind, options) as group:
        found, kept = train(group, case.plan, scratch=WORLD.bcast(str(tmp_path)), **case.more)
    np.testing.assert_array_equal(found, losses)
    assert kept.keys() == weights.keys()
    for name, weight in kept.items():
        assert torch.equal(weights[name], weight), name
    assert_same(losses, train_plain(make_wide(GPT), STEPS))


@pytest.mark.parametrize("plan", [2, 3])
@pytest.mark.skipif(WORLD.size > 4, reason="at most as many ranks as virtual shards")
def test_the_same_bits_where_a_micro_batch_leaves_a_unit_out(node, plan):
    """The second of four micro-batches goes to the first expert alone, the last one to the third; the fourth sleeps."""

    def digests(group):
        with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=LR), group=group, virtual_shards=4) as rt:
            model, found = zt.shard(make(Branching), rt, units=Expert), []
            for step in range(3):
                for shard in rt.micro_batches:
                    x, y = text(6, 4 * step + shard)
                    x[:, 0] = torch.arange(6) % 2 * (shard != 1) if shard < 3 else 2
                    model(x, y).backward()
                found.append(rt.step().digest)
            return found

    with zr.open_group(kind="solo") as alone:
        expected = digests(alone)
    assert digests(node) == expected
    assert len(set(expected)) == 3
