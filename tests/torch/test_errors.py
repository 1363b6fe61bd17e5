"""Misuse says what was expected, what came, and what to do."""

import copy
import pickle

import pytest
import torch
from models import GPT, Block, text
from training import make

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError, StaleViewError, UnitStateError
from zerort_torch.parameters.memory import check_device
from zerort_torch.parameters.released import ReleasedParameter

pytestmark = pytest.mark.mpi


@pytest.fixture
def rt(node):
    with zr.open(plan=zr.Plan.zero(3), group=node) as found:
        yield found


@pytest.mark.parametrize("plan", [0, 3])
def test_a_released_parameter_cannot_be_used(group, plan):
    with zr.open(plan=zr.Plan.zero(plan), group=group) as rt:
        model = zt.shard(make(GPT), rt)
        weight = model.blocks[1].up.weight
        uses = [
            lambda: weight.norm(),
            lambda: weight + 1,
            lambda: torch.cat([weight, weight]),
            lambda: weight.data,
            lambda: weight.detach(),
            lambda: weight[0],
            lambda: torch.nn.functional.linear(torch.ones(32), weight),
            lambda: weight.tolist(),
        ]
        for use in uses:
            with pytest.raises(
                StaleViewError, match=r"Expected 'blocks.1.up.weight'|Expected 'tokens.weight'"
            ) as caught:
                use()
            assert "with zt.gathered(module):" in str(caught.value)
        assert weight.shape == (128, 32)
        assert weight.dtype is torch.float32
        assert weight.device.type == "cpu"
        assert weight.requires_grad
        assert weight.grad is None
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make(GPT).parameters())
        assert "blocks.1.up.weight" in repr(weight)
        model.zero_grad()


def test_parameters_elsewhere_are_refused():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for device in (cpu, gpu):
        check_device("w", device, device)
        check_device("w", torch.device("meta"), device)
    with pytest.raises(
        CallError, match=r"'w' on the runtime's device, cpu, got it on cuda:0\. Move .*model.to\('cpu'\)"
    ):
        check_device("w", gpu, cpu)
    with pytest.raises(CallError, match=r"open the runtime there: zr.open\(group=zr.open_group\(kind='nccl'\)\)"):
        check_device("w", gpu, cpu)
    for elsewhere in (cpu, torch.device("cuda", 1)):
        with pytest.raises(CallError, match=rf"device, cuda:0, got it on {elsewhere}\. Move .*model.to\('cuda:0'\)"):
            check_device("w", elsewhere, gpu)


def test_a_stand_in_lies_where_its_parameter_did():
    assert ReleasedParameter("w", torch.empty(3, device="meta")).stand_in().device.type == "meta"


def test_an_optimizer_over_the_models_own_parameters_is_refused(rt):
    plain = make(GPT)
    before = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = zt.shard(plain, rt)
    model(*text(2, 0)).backward()
    with pytest.raises(CallError, match=r"updated by rt.step\(\), got SGD.step\(\) over 'tokens.weight'"):
        before.step()
    free = torch.nn.Linear(2, 2)
    torch.optim.SGD(free.parameters(), lr=0.1).step()  # others go on


def test_copies_are_refused(rt):
    model = zt.shard(make(GPT), rt)
    with pytest.raises(CallError, match=r"Expected one copy of a sharded model, got copy.deepcopy of 'tokens.weight'"):
        copy.deepcopy(model)
    with pytest.raises(CallError, match=r"Expected a sharded model to stay in its process"):
        pickle.dumps(model.head.weight)


def test_what_cannot_be_sharded_is_refused(rt):
    for wrong, text_ in [
        (lambda: zt.shard([1], rt), "Expected a torch.nn.Module, got list"),
        (lambda: zt.shard(torch.nn.ReLU(), rt), "Expected a model with parameters"),
        (lambda: zt.shard(make(GPT), rt, units=torch.nn.Conv2d), "to mean some module of the model, got none"),
        (lambda: zt.shard(make(GPT), rt, units="Block"), "Expected units as module types"),
        (lambda: zt.gathered(make(GPT)).__enter__(), "Expected a module of a sharded model"),
        (lambda: zt.full_state_dict(make(GPT)), "Expected a module of a sharded model"),
        (lambda: zt.shard(torch.nn.ParameterList([torch.ones(3, dtype=torch.complex64)]), rt), r"complex64.*Convert"),
    ]:
        with pytest.raises(CallError, match=text_):
            wrong()
    model = zt.shard(make(GPT), rt, units=Block)
    with pytest.raises(CallError, match=r"Expected a model that is not sharded yet"):
        zt.shard(model, rt)


def test_values_that_differ_between_ranks_are_refused(rt):
    if rt.size == 1:
        pytest.skip("needs another rank")
    with pytest.raises(CallError, match=r"Expected the same initial values.*broadcast=True"):
        zt.shard(make(GPT, seed=rt.rank), rt)
    model = zt.shard(make(GPT, seed=rt.rank), rt, broadcast=True, name="other")
    with zt.gathered(model):
        assert torch.equal(model.head.weight, make(GPT, seed=0).head.weight)


def test_steps_and_backwards_are_counted(rt):
    model = zt.shard(make(GPT), rt)
    with pytest.raises(UnitStateError, match=r"Expected gradients before step\(\), got none.*loss.backward"):
        rt.step()
    model(*text(2, 0)).backward()
    rt.step()
    loss = model(*text(2, 0)) + model(*text(2, 1))  # twice in one graph is one backward
    loss.backward()
    with pytest.raises(
        UnitStateError, match=r"Expected at most 1 backward\(\) through the root unit per.*micro_steps="
    ):
        model(*text(2, 0)).backward()
    rt.discard_gradients()
    model(*text(2, 0)).backward()
    assert rt.step().updated
    with zt.gathered(model), pytest.raises(UnitStateError, match=r"outside gathered"):
        rt.step()


def test_backward_after_the_step_is_refused(group):
    with zr.open(plan=zr.Plan.zero(3), group=group) as rt:
        model = zt.shard(make(GPT), rt)
        stale = model(*text(2, 0))
        model(*text(2, 0)).backward()
        rt.step()
        with pytest.raises((RuntimeError, StaleViewError), match=r"modified by an inplace operation|after update 1"):
            stale.backward()


def test_buffers_of_other_sizes_are_named(rt):
    if rt.size == 1:
        pytest.skip("needs another rank")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.register_buffer("cache", torch.zeros(3 + rt.rank))
    zt.shard(model, rt)(torch.ones(1, 2)).sum().backward()
    with pytest.raises(CallError, match=r"Expected buffers of '' of one size on all ranks, got 12, 16"):
        rt.step()
