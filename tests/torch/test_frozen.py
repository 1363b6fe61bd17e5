"""LoRA over a quantised base: frozen weights rest as codes, and what is learned is what their values teach."""

import functools

import numpy as np
import pytest
import torch
from models import GPT, text
from mpi4py import MPI
from training import LR, make, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.codec import ROWS
from zerort.errors import CallError

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size not in (2, 3), reason="2 and 3 ranks")]
PLANS = {
    "zero2": zr.Plan.zero(2),
    "zero3": zr.Plan.zero(3),
    "nvme": zr.Plan.zero(3, parameter=zr.Tier.NVME, state=zr.Tier.NVME),
}


class LoRA(torch.nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices beside it."""

    def __init__(self, base, *, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, rank) / 100)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def with_adapters(recompute=None):
    """Return a GPT whose weights are all frozen, with an adapter beside every linear layer of its blocks."""
    model = GPT(layers=2, recompute=recompute).requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is torch.nn.Linear:
                setattr(module, name, LoRA(child))
    return model


def decoded_before(format, recompute=None):
    """Return the same model with a base that was encoded and decoded."""
    model = with_adapters(recompute)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            flat = parameter.detach().numpy().reshape(-1)
            rows = np.empty(ROWS[format].nbytes_of(flat.size), np.uint8)
            ROWS[format].encode(rows, flat)
            ROWS[format].decode(flat, rows)
    return model


def learned(factory, group, plan, **options):
    """Return the losses of a few steps, the weights after them, and the bytes of parameters."""
    with zr.open(plan, zr.AdamW(lr=LR), group=group, **options) as rt:
        model = zt.shard(make(factory), rt)
        losses = train_sharded(model, rt, 3, batches=text)
        memory = rt.memory()
        return losses.tolist(), zt.full_state_dict(model, root=None), memory.parameter + memory.nvme


@pytest.mark.parametrize(
    ("plan", "format", "recompute"),
    [("zero2", "int4", None), ("zero3", "int8", False), ("nvme", "int8", None)],
)
def test_adapters_learn_over_a_coded_base_as_over_its_values(group, tmp_path, plan, format, recompute):
    scratch = WORLD.bcast(str(tmp_path))
    losses, weights, plain = learned(
        functools.partial(decoded_before, format, recompute), group, PLANS[plan], scratch=scratch
    )
    got, found, coded = learned(
        functools.partial(with_adapters, recompute), group, PLANS[plan], scratch=scratch, frozen_format=format
    )
    assert got == losses
    before = make(with_adapters).state_dict()
    assert not any(torch.equal(found[name], before[name]) for name in found if name.endswith((".up", ".down")))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert coded < plain


def test_a_coded_base_is_saved_decoded_and_stays_frozen(node, tmp_path):
    where = WORLD.bcast(str(tmp_path))
    with zr.open(PLANS["zero3"], zr.AdamW(lr=LR), group=node, frozen_format="int8") as rt:
        model = zt.shard(make(with_adapters), rt)
        weight = next(one for name, one in model.named_parameters() if name.endswith("base.weight"))
        with pytest.raises(CallError, match=r"to stay frozen, as it was at zt.shard\(model, rt\), got requires_grad"):
            weight.requires_grad_(True)
        train_sharded(model, rt, 1, batches=text)
        rt.save(f"{where}/saved")
        expected = zt.full_state_dict(model, root=None)
    with zr.open(PLANS["zero2"], zr.AdamW(lr=LR), group=node) as rt:
        model = zt.shard(make(with_adapters, seed=8), rt)
        rt.load(f"{where}/saved")
        found = zt.full_state_dict(model, root=None)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
