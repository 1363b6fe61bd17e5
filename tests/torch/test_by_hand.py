"""What a user looks at and turns by hand: gradients before the step, learning rates, a plain model after training."""

import copy
import pickle

import numpy as np
import pytest
import torch
from models import GPT, text
from mpi4py import MPI
from training import LR, SAMPLES, assert_same, make_wide, part, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError, UnitStateError
from zerort.testing.tolerance import OVER_STEPS

PLANS = [zr.Plan.zero(1), zr.Plan.zero(3)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_before_the_step_are_those_of_plain_torch(group, plan, tied):
    plain = make_wide(lambda: GPT(tied=tied))
    plain(*text(SAMPLES, 0)).backward()
    expected = {name: value.grad for name, value in plain.named_parameters()}
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=LR), group=group, clip_norm=1e-3) as rt:
        model = zt.shard(make_wide(lambda: GPT(tied=tied)), rt)
        model(*part(text(SAMPLES, 0), rt.rank, rt.size)).backward()
        found = zt.gradients(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=OVER_STEPS, atol=OVER_STEPS, msg=name)
        block = zt.gradients(model.blocks[1])
        assert set(block) == {name for name, _ in model.blocks[1].named_parameters()}
        assert torch.equal(block["up.weight"], found["blocks.1.up.weight"])
        report = rt.step()  # on what was looked at
        norm = torch.cat([value.reshape(-1) for value in expected.values()]).norm().item()
        assert report.grad_norm == pytest.approx(norm, rel=OVER_STEPS)
        inside = torch.cat([found[f"blocks.1.{name}"].reshape(-1) for name in block]).norm().item()
        assert report.norms["blocks.1"] == pytest.approx(inside, rel=OVER_STEPS)


def test_looking_at_gradients_changes_no_step(group):
    expected = train_plain(make_wide(GPT), 3)
    losses = []
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        with pytest.raises(UnitStateError, match="Expected gradients before"):
            zt.gradients(model)
        for step in range(3):
            loss = model(*part(text(SAMPLES, step), rt.rank, rt.size))
            loss.backward()
            zt.gradients(model)
            rt.step()
            losses.append(rt.group.all_reduce(loss.detach().reshape(1).numpy()).wait()[0] / rt.size)
    assert_same(np.array(losses), expected)


def test_rates_set_by_hand_show_in_the_groups_of_as_optimizer_and_hold(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        optimizer = zt.as_optimizer(rt)

        def step():
            model(*text(2, 0)).backward()
            optimizer.step()
            return optimizer.report.lr, optimizer.param_groups[0]["lr"]

        assert step() == (0.1, 0.1)
        rt.set_lr(0.02)
        assert step() == (0.02, 0.02)
        assert step() == (0.02, 0.02)
        optimizer.param_groups[0]["lr"] = 0.5  # whoever speaks last
        assert step() == (0.5, 0.5)
        rt.set_lr(None)
        assert step() == (0.1, 0.1)


def test_a_group_has_an_optimizer_of_its_own(group):
    plain = make_wide(GPT)
    head = [plain.head.weight]
    others = [value for value in plain.parameters() if value is not plain.head.weight]
    optimizers = [torch.optim.AdamW(others, lr=LR), torch.optim.SGD(head, lr=0.1, momentum=0.9)]
    expected = []
    for step in range(4):
        loss = plain(*text(SAMPLES, step))
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        expected.append(loss.item())
    groups = [zr.ParameterGroup("head.*", optimizer=zt.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))]
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), param_groups=groups, group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        assert_same(train_sharded(model, rt, 4), np.array(expected))
        rates = sorted(one["lr"] for one in zt.as_optimizer(rt).param_groups)
        assert rates == [LR, 0.1]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_consolidated_model_is_a_plain_one(group, plan, tied):
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(make_wide(lambda: GPT(tied=tied)), rt)
        train_sharded(model, rt, 2)
        with torch.no_grad():
            before = model(*text(4, 0)).item()
        weights = zt.full_state_dict(model, root=None)
        assert zt.consolidate(model) is model
    plain = make_wide(lambda: GPT(tied=tied))
    plain.load_state_dict(weights)
    assert model(*text(4, 0)).item() == before == plain(*text(4, 0)).item()
    assert all(type(value) is torch.nn.Parameter for value in model.parameters())
    assert (model.head.weight is model.tokens.weight) == tied
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model).half()
    assert_same(train_plain(model, 2), train_plain(plain, 2), tolerance=0.0)  # torch's own optimizer
    again = model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in plain.state_dict().items())


def test_what_cannot_be_consolidated_is_refused(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        with pytest.raises(CallError, match="Expected the whole model that was sharded, got a part"):
            zt.consolidate(model.blocks[0])
        model(*text(2, 0)).backward()
        with pytest.raises(CallError, match=r"gradients that no step has used. Call rt.step\(\)"):
            zt.consolidate(model)
        rt.step()
        MPI.COMM_WORLD.Barrier()
        zt.consolidate(model)
        with pytest.raises(CallError, match="Expected a module of a sharded model"):
            zt.full_state_dict(model)
