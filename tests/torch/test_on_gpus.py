"""Training where the GPUs are, on a stream of torch's own. Where torch has none, the same lines run on hosts."""

import contextlib

import pytest
import torch
from models import GPT, text
from training import LR, assert_same, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.comm import open_group
from zerort.errors import PlanError
from zerort_torch.parameters.memory import torch_device

pytestmark = pytest.mark.mpi

GPUS = torch.cuda.is_available()
STEPS = 4
OPTIMIZERS = {"own": zr.AdamW(lr=LR), "torch": zt.optimizer(torch.optim.AdamW, lr=LR)}


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="nccl" if GPUS else "node", options=options) as found:
        yield found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", [1, 3])
def test_losses_and_weights(group, plan, optimizer):
    expected = train_plain(make_wide(GPT), STEPS)
    with zr.open(plan=zr.Plan.zero(plan), optimizer=OPTIMIZERS[optimizer], group=group) as rt:
        device = torch_device(rt.device)
        with torch.cuda.stream(torch.cuda.Stream(device)) if GPUS else contextlib.nullcontext():
            model = zt.shard(make_wide(GPT).to(device), rt)
            assert {parameter.device for parameter in model.parameters()} == {device}
            got = train_sharded(model, rt, STEPS, batches=lambda *which: [one.to(device) for one in text(*which)])
            assert_same(got, expected)
            weights = zt.full_state_dict(model, root=None)
            with zt.gathered(model.head):
                assert torch.equal(weights["head.weight"], model.head.weight)


@pytest.mark.skipif(not GPUS, reason="on GPUs")
def test_sparse_embeddings_are_refused_on_gpus(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = torch.nn.Embedding(9, 4, sparse=True, device=torch_device(rt.device))
        with pytest.raises(PlanError, match="sparse=True on hosts, got a runtime on GPUs"):
            zt.shard(model, rt)
