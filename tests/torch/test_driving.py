"""What frameworks do with a model beside training it: conversions, schedulers, freezing for a while, and the rest."""

import io

import pytest
import torch
from models import GPT, lora_gpt, text
from torch import nn
from torch.func import functional_call
from torch.func import grad as func_grad
from training import LR, SAMPLES, assert_same, make, make_wide, part

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError, UnitStateError

pytestmark = pytest.mark.mpi


@pytest.fixture
def rt(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as found:
        yield found


# -- conversions -----------------------------------------------------------------------------------------------------


def test_conversions_that_change_nothing_pass(rt):
    model = zt.shard(make(GPT), rt)
    standing = dict(model.named_parameters())
    for convert in (
        lambda: model.to("cpu"),
        lambda: model.to(torch.device("cpu"), torch.float32),
        lambda: model.to(dtype=torch.float32, non_blocking=True),
        lambda: model.to(torch.empty(1)),
        lambda: model.cpu(),
        lambda: model.float(),
        lambda: model.type(torch.float32),
    ):
        assert convert() is model
    assert all(value is standing[name] for name, value in model.named_parameters())
    model(*text(2, 0)).backward()
    assert rt.step().updated


def test_conversions_that_change_something_are_refused(rt):
    model = zt.shard(make(GPT), rt)
    for convert, to in [
        (lambda: model.half(), "torch.float16 on cpu"),
        (lambda: model.double(), "torch.float64 on cpu"),
        (lambda: model.to(torch.bfloat16), "torch.bfloat16 on cpu"),
        (lambda: model.to("meta"), "torch.float32 on meta"),
    ]:
        with pytest.raises(CallError, match=rf"weight' to stay torch.float32 on cpu after sharding.*{to}\. Convert"):
            convert()


# -- a runtime as an optimizer ---------------------------------------------------------------------------------------


def train_with_scheduler(model, optimizer, scheduler, steps, *, shards, count):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for shard in shards:
            loss = model(*part(text(SAMPLES, step), shard, count))
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        scheduler.step()
    return losses


def test_schedulers_of_torch_drive_the_runtime(group):
    def scheduled(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))

    def grouped(model):
        biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
        others = [value for name, value in model.named_parameters() if not name.endswith("bias")]
        return [{"params": others}, {"params": biases, "lr": 3 * LR}]

    plain = make_wide(GPT)
    optimizer = torch.optim.AdamW(grouped(plain), lr=LR, weight_decay=0.0)
    expected = train_with_scheduler(plain, optimizer, scheduled(optimizer), 5, shards=[0], count=1)
    groups = [zr.ParameterGroup("*bias", lr=3 * LR)]
    settings = zr.AdamW(lr=LR, weight_decay=0.0)
    with zr.open(plan=zr.Plan.zero(3), optimizer=settings, param_groups=groups, group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        optimizer = zt.as_optimizer(rt)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert sorted(one["lr"] for one in optimizer.param_groups) == [LR, 3 * LR]
        count = sum(len(one["params"]) for one in optimizer.param_groups)
        assert count == len(list(model.parameters()))
        scheduler = scheduled(optimizer)
        losses = train_with_scheduler(
            model, optimizer, scheduler, 5, shards=rt.micro_batches, count=rt.micro_batch_count
        )
        mean = rt.group.all_reduce(torch.tensor(losses, dtype=torch.float64).numpy()).wait() / rt.micro_batch_count
        assert_same(mean, torch.tensor(expected, dtype=torch.float64).numpy())
        assert optimizer.report.updated
        assert optimizer.report.lr == pytest.approx(LR / 5)


def test_a_schedule_of_the_runtimes_own_shows_in_the_groups(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=lambda update: 0.1 / update), group=group) as rt:
        model = zt.shard(make(GPT), rt)
        optimizer = zt.as_optimizer(rt)
        seen = []
        for _ in range(3):
            seen.append(optimizer.param_groups[0]["lr"])
            loss = optimizer.step(lambda: model(*text(2, 0)).backward() or 7.0)
            assert loss == 7.0
            assert optimizer.report.lr == seen[-1]
        assert seen == [0.1 / 1, 0.1 / 2, 0.1 / 3]
        optimizer.param_groups[0]["lr"] = 0.5
        saved = optimizer.state_dict()
        model(*text(2, 0)).backward()
        optimizer.step()
        assert optimizer.report.lr == 0.5
        other = zt.as_optimizer(rt)
        other.load_state_dict(saved)
        assert other.param_groups[0]["lr"] == 0.5


def test_zero_grad_of_the_optimizer_drops_gradients(rt):
    model = zt.shard(make(GPT), rt)
    optimizer = zt.as_optimizer(rt)
    optimizer.zero_grad()
    model(*text(2, 0)).backward()
    optimizer.zero_grad()
    model(*text(2, 1)).backward()  # another one would be refused
    optimizer.step()
    assert optimizer.report.updated


def test_zero_grad_drops_the_gradients_of_ranks_that_have_some(rt):
    """In a loop that clears for every batch, a further call drops: on all ranks, also on one that has none."""
    model = zt.shard(make(GPT), rt)
    optimizer = zt.as_optimizer(rt)
    for step in range(3):
        optimizer.zero_grad()
        with zt.gathered(model):
            if rt.rank == 0:
                model(*text(2, 50 + step)).backward()
        optimizer.zero_grad()
        model(*text(2, step)).backward()
        optimizer.step()
    found = zt.full_state_dict(model, root=None)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=rt.group) as alone:
        other = zt.shard(make(GPT), alone)
        for step in range(3):
            other(*text(2, step)).backward()
            alone.step()
        assert all(torch.equal(found[name], one) for name, one in zt.full_state_dict(other, root=None).items())


def test_ranks_that_step_while_others_drop_are_named(rt):
    if rt.size == 1:
        pytest.skip("one rank does as itself does")
    model = zt.shard(make(GPT), rt)
    optimizer = zt.as_optimizer(rt)
    with zt.gathered(model):
        if rt.rank == 0:
            model(*text(2, 0)).backward()
    if rt.rank:
        optimizer.zero_grad()  # the first: nothing to clear here
    go_on = optimizer.step if rt.rank else optimizer.zero_grad
    with pytest.raises(UnitStateError, match=r"got rank 0 of \d to drop them\. Call rt\.discard_gradients\(\)"):
        go_on()
    model(*text(2, 1)).backward()
    optimizer.step()
    assert optimizer.report.updated


def test_what_the_optimizer_cannot_do_is_refused(rt):
    with pytest.raises(CallError, match=r"Expected zt.shard\(model, rt\) before zt.as_optimizer"):
        zt.as_optimizer(rt)
    zt.shard(make(GPT), rt)
    optimizer = zt.as_optimizer(rt)
    with pytest.raises(CallError, match=r"add_param_group.*zr.open\(param_groups="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.filterwarnings("ignore:The gradients of a sharded model:RuntimeWarning")
@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_is_refused(rt, unscales):
    model = zt.shard(make(GPT), rt)
    optimizer, scaler = zt.as_optimizer(rt), torch.amp.GradScaler("cpu")
    scaler.scale(model(*text(2, 0))).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(CallError, match=r"got a torch.amp.GradScaler.*zr.LossScale"):
        scaler.step(optimizer)
    rt.discard_gradients()
    model(*text(2, 0)).backward()
    optimizer.step()  # without it, goes on
    assert optimizer.report.updated


def test_a_grad_scaler_beside_the_runtimes_step_is_refused_by_torch(rt):
    """Nothing tells its scale from another factor of the loss; its update() misses an optimizer."""
    model, scaler = zt.shard(make(GPT), rt), torch.amp.GradScaler("cpu", init_scale=1024.0)
    model(*text(2, 0)).backward()
    plain = zt.gradients(model)
    rt.discard_gradients()
    scaler.scale(model(*text(2, 0))).backward()
    scaled = zt.gradients(model)
    assert all(torch.equal(scaled[name], 1024.0 * value) for name, value in plain.items())
    assert rt.step().updated
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


# -- requires_grad off and on ----------------------------------------------------------------------------------------


def train_alternating(model, step, losses):
    """Train the head in even steps, the blocks in odd ones."""
    for index in range(4):
        model.requires_grad_(True)
        (model.blocks if index % 2 == 0 else model.head).requires_grad_(False)
        losses.append(step(index))
    model.requires_grad_(True)
    losses.append(step(4))


def test_training_is_turned_off_and_on(group):
    plain, expected = make_wide(GPT), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def plain_step(index):
        optimizer.zero_grad()
        loss = plain(*text(SAMPLES, index))
        loss.backward()
        optimizer.step()
        return loss.item()

    train_alternating(plain, plain_step, expected)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as rt:
        model, losses = zt.shard(make_wide(GPT), rt), []

        def step(index):
            loss = model(*part(text(SAMPLES, index), rt.rank, rt.size))
            loss.backward()
            report = rt.step()
            frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
            assert set(report.without_gradient) == frozen
            return loss.item()

        train_alternating(model, step, losses)
        mean = rt.group.all_reduce(torch.tensor(losses, dtype=torch.float64).numpy()).wait() / rt.size
        assert_same(mean, torch.tensor(expected, dtype=torch.float64).numpy())


def test_training_is_turned_off_in_a_gathered_block(rt):
    model = zt.shard(make(GPT), rt)
    with zt.gathered(model.head):
        model.head.weight.requires_grad = False
    assert not model.head.weight.requires_grad
    model(*text(2, 0)).backward()
    assert rt.step().without_gradient == ("head.weight",)
    model.head.weight.requires_grad = True
    model(*text(2, 0)).backward()
    assert rt.step().without_gradient == ()


def test_what_was_frozen_stays_frozen(rt):
    model = zt.shard(make(lora_gpt), rt)
    model.head.requires_grad_(False)
    for unfreeze in (lambda: model.requires_grad_(True), lambda: setattr(model.head.weight, "requires_grad", True)):
        with pytest.raises(CallError, match=r"weight' to stay frozen, as it was at zt.shard.*Shard the model with it"):
            unfreeze()
    with zt.gathered(model.head):
        model.head.weight.requires_grad = True
    with pytest.raises(CallError, match=r"'head.weight' to stay frozen"):
        model(*text(2, 0))
    assert not model.head.weight.requires_grad
    model(*text(2, 0)).backward()
    assert rt.step().updated


# -- what cannot be sharded, or not be done with a sharded model -----------------------------------------------------


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_that_cannot_be_sharded_are_refused(rt):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for model, message in [
        (nn.Sequential(nn.LazyLinear(3)), r"got '0.weight', which a lazy module makes.*Run one forward"),
        (nn.Sequential(nn.Linear(2, 2), scripted), r"got the scripted module '1'"),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), r"got SyncBatchNorm '1'.*Use nn.BatchNorm"),
        (Complex(), r"got 'w' in torch.complex64.*view_as_real"),
    ]:
        with pytest.raises(CallError, match=message):
            zt.shard(model, rt)
        assert not any("OffloadedArray" in type(value).__name__ for value in model.parameters())


def test_a_lazy_module_can_be_sharded_after_its_first_forward(rt):
    model = make(lambda: nn.Sequential(nn.LazyLinear(3)))
    torch.manual_seed(0)
    model(torch.ones(1, 4))
    model = zt.shard(model, rt)
    model(torch.ones(1, 4)).sum().backward()
    assert rt.step().updated


def test_a_model_is_not_pickled(rt):
    model = zt.shard(make(GPT), rt)
    with pytest.raises(CallError, match=r"got pickling of the model. Save zt.full_state_dict\(model\)"):
        torch.save(model, io.BytesIO())


def test_transforms_of_torch_func(rt):
    other = make_wide(GPT, seed=3)
    x, y = text(2, 0)
    given = {name: value.detach() for name, value in other.named_parameters()}
    model = zt.shard(make_wide(GPT), rt)
    found = func_grad(lambda parameters: functional_call(model, parameters, (x, y)))(given)
    other(x, y).backward()
    for name, value in other.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-10, atol=1e-12)


def test_backwards_that_a_step_cannot_average_are_refused(rt):
    model = zt.shard(make(GPT), rt)
    loss = model(*text(2, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(UnitStateError, match=r"got one more. A step averages over ranks and micro-steps"):
        loss.backward()
