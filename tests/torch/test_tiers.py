"""Where a torch model's parameters, gradients and state rest does not show in a single bit of what it learns."""

import functools
import os

import pytest
import torch
from models import CNN, GPT, images, text
from mpi4py import MPI
from training import LR, make, part, train_sharded

import zerort as zr
import zerort_torch as zt

WORLD = MPI.COMM_WORLD
HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
pytestmark = pytest.mark.mpi
OFFLOAD = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
PLANS = {
    "state": zr.Plan.zero(3, state=NVME),
    "state of whole parameters": zr.Plan.zero(1, state=NVME),
    "infinity": zr.Plan.zero(3, parameter=NVME, gradient=HOST, state=NVME),
    "all": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
}


@pytest.fixture
def scratch(tmp_path):
    """One directory for all ranks; nothing is left in it."""
    where = WORLD.bcast(str(tmp_path))
    yield where
    WORLD.Barrier()
    assert os.listdir(where) == []


def tied_bf16():
    return GPT(layers=2, tied=True).to(torch.bfloat16)


def recomputing():
    return GPT(layers=2, recompute=False)


def learned(factory, group, *, batches=text, steps=4, **options):
    """Return the losses of a few steps, and the weights after them."""
    with zr.open(optimizer=zr.AdamW(lr=LR), group=group, **options) as rt:
        model = zt.shard(make(factory), rt)
        losses = train_sharded(model, rt, steps, batches=batches)
        return losses.tolist(), zt.full_state_dict(model, root=None)


@functools.cache
def learned_in_memory(factory, group, batches, stage):
    return learned(factory, group, batches=batches, plan=zr.Plan.zero(stage))


@pytest.mark.parametrize(
    ("factory", "batches", "plan"),
    [*((tied_bf16, text, plan) for plan in PLANS), (recomputing, text, "infinity"), (CNN, images, "all")],
)
def test_what_is_learned_has_the_bits_of_a_run_in_memory(group, scratch, factory, batches, plan):
    losses, weights = learned_in_memory(factory, group, batches, 1 if "whole" in plan else 3)
    got, found = learned(factory, group, batches=batches, plan=PLANS[plan], scratch=scratch, offload=OFFLOAD)
    assert got == losses
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_parameters_are_read_unit_by_unit(node, scratch):
    with zr.open(plan=PLANS["infinity"], group=node, scratch=scratch, offload=OFFLOAD) as rt:
        model = zt.shard(make(GPT), rt)
        whole = sum(unit.nbytes for unit in rt.units.values())
        held = rt.memory()
        assert held.parameter == 0
        model(*part(text(4 * rt.size, 0), rt.rank, rt.size)).backward()
        rt.step()
        assert 0 < rt.memory().gathered_peak < 0.8 * whole
        assert rt.memory().parameter == 0


def test_values_go_in_and_out(node, scratch):
    """`gathered`, written to, and `load_state_dict`, where parameters rest on a disk."""
    with zr.open(plan=PLANS["infinity"], group=node, scratch=scratch, offload=OFFLOAD) as rt:
        model, other = zt.shard(make(GPT), rt), make(GPT, seed=3)
        with zt.gathered(model.head, write=True), torch.no_grad():
            model.head.weight.fill_(0.5)
        with zt.gathered(model):
            assert bool((model.head.weight == 0.5).all())
        model.load_state_dict(other.state_dict())
        with torch.no_grad():
            assert torch.equal(model(*text(2, 9)), other(*text(2, 9)))


def deep():
    return GPT(layers=8)


def test_a_budget_is_shared_out_over_the_whole_model(group, scratch):
    losses, weights = learned_in_memory(deep, group, text, 3)
    with zr.open(optimizer=zr.AdamW(lr=LR), group=group) as rt:
        zt.shard(make(deep), rt)
        whole = WORLD.bcast(rt.memory())
    budget = zr.Plan.fit(host=int(0.5 * whole.at_rest) + whole.buckets + whole.gathered + 100_000, nvme="1GiB")
    with zr.open(plan=budget, optimizer=zr.AdamW(lr=LR), group=group, scratch=scratch, offload=OFFLOAD) as rt:
        model = zt.shard(make(deep), rt)
        tiers = [section.tiers for unit in rt.units.values() for section in unit.sections]
        assert {one.parameter for one in tiers} == {zr.Tier.DEVICE}  # the hottest of all units, not all of the first
        assert tiers[-1].state is NVME
        assert train_sharded(model, rt, 4, batches=text).tolist() == losses
        memory = rt.memory()
        assert memory.at_rest + memory.buckets + memory.gathered + memory.streaming <= budget.memory
        found = zt.full_state_dict(model, root=None)
        assert all(torch.equal(found[name], weights[name]) for name in weights)
