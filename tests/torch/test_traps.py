"""What plain torch allows and a sharded model cannot do as it is: the right result, or an error with the cure."""

import pytest
import torch
from models import GPT, VOCAB, WIDTH, text
from mpi4py import MPI
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from training import assert_same, make, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError, NonFiniteError, UnitStateError

pytestmark = pytest.mark.mpi


@pytest.fixture
def rt(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=1e-2), group=group) as found:
        yield found


@pytest.fixture
def scratch(tmp_path):
    """One directory for all ranks."""
    where = MPI.COMM_WORLD.bcast(str(tmp_path))
    yield where
    MPI.COMM_WORLD.Barrier()


# -- what stands in a module -----------------------------------------------------------------------------------------


def test_functional_call_computes_with_the_parameters_that_it_is_given(rt):
    other = make_wide(GPT, seed=3)
    given = {name: value.detach().clone().requires_grad_() for name, value in other.named_parameters()}
    model = zt.shard(make_wide(GPT), rt)
    x, y = text(2, 0)
    for passed in (given, {"blocks.1.up.weight": given["blocks.1.up.weight"]}):
        expected = functional_call(make_wide(GPT), passed, (x, y))
        assert torch.equal(functional_call(model, passed, (x, y)), expected)
    functional_call(model, given, (x, y)).backward()
    other(x, y).backward()
    for name, value in other.named_parameters():
        torch.testing.assert_close(given[name].grad, value.grad, rtol=1e-10, atol=1e-12)
    assert torch.equal(model(x, y), make_wide(GPT)(x, y))  # and its own are back


def test_a_parameter_that_was_assigned_is_used_and_refused_at_the_step(rt):
    model = zt.shard(make_wide(GPT), rt)
    new = nn.Parameter(torch.zeros(VOCAB, WIDTH, dtype=torch.float64))
    model.head.weight = new
    x, y = text(2, 0)
    loss = model(x, y)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(float(VOCAB))).item())
    assert model.head.weight is new
    loss.backward()
    with pytest.raises(CallError, match=r"handed over by zt.shard\(model, rt\), got 'head.weight', which came later"):
        rt.step()


def test_a_frozen_parameter_that_was_assigned_is_used(rt):
    model = zt.shard(make_wide(GPT), rt)
    values = torch.ones(VOCAB, WIDTH, dtype=torch.float64)
    model.head.weight = nn.Parameter(values, requires_grad=False)
    model(*text(2, 0)).backward()
    assert rt.step().without_gradient == ("head.weight",)
    assert torch.equal(model.state_dict()["head.weight"], values)


@pytest.mark.parametrize("part_of", [lambda model: model, lambda model: model.blocks[1].up], ids=["model", "part"])
def test_loading_by_assignment_is_refused(rt, part_of):
    model = zt.shard(make_wide(GPT), rt)
    weights = part_of(make_wide(GPT, seed=3)).state_dict()
    with pytest.raises(CallError, match=r"Expected load_state_dict\(…, assign=False\).*got assign=True"):
        part_of(model).load_state_dict(weights, assign=True)
    part_of(model).load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in part_of(model).state_dict().items())


@pytest.mark.parametrize("to", [lambda model: model, lambda model: model.blocks[0]], ids=["model", "block"])
def test_a_module_that_was_added_later_is_refused_at_the_step(rt, to):
    model = zt.shard(make_wide(GPT), rt)
    model(*text(2, 0)).backward()
    rt.step()
    to(model).adapter = nn.Linear(4, 4)
    model(*text(2, 0)).backward()
    with pytest.raises(CallError, match=r"got '\S*adapter.weight', '\S*adapter.bias', which came later"):
        rt.step()
    to(model).adapter.requires_grad_(False)  # nobody need train it then
    model(*text(2, 0)).backward()
    assert rt.step().updated


class Listed(nn.Module):
    """Computes with the objects that it was made with."""

    def __init__(self, *, registered):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.kept = [self.body.weight if registered else nn.Parameter(torch.ones(4, 4))]

    def forward(self, x):
        return (self.body(x) @ self.kept[0]).square().mean()


@pytest.mark.parametrize("registered", [True, False])
def test_a_parameter_that_is_kept_in_a_list_is_refused_at_the_step(rt, registered):
    model = zt.shard(make(lambda: Listed(registered=registered)), rt)
    model(torch.ones(2, 4)).backward()
    name = "body.weight" if registered else "kept"
    with pytest.raises(CallError, match=rf"got one for the object that '{name}' .*nn.ParameterList"):
        rt.step()


# -- values that are not there ---------------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """Keeps its weight as an attribute, which autograd's hooks do not see."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.w, (gradient * ctx.x).sum(0)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.w = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x):
        return Scale.apply(self.first(x), self.w).square().mean()


@pytest.mark.parametrize("nvme", [False, True])
def test_a_function_that_keeps_a_weight_as_an_attribute(group, scratch, nvme):
    """It has the right gradients where the weight is always there; elsewhere the error names it."""
    plan = zr.Plan.zero(3, parameter=zr.Tier.NVME, state=zr.Tier.NVME) if nvme else zr.Plan.zero(3)
    x = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = make_wide(Keeping)
    plain(x).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()
    with zr.open(plan=plan, group=group, scratch=scratch) as rt:
        model = zt.shard(make_wide(Keeping), rt)
        model(x).backward()
        if group.kind == "node" and not nvme:
            assert rt.step().grad_norm == pytest.approx(norm, rel=1e-10)
        else:
            with pytest.raises(NonFiniteError, match=r"autograd.Function.*ctx.save_for_backward\(w\)"):
                rt.step()


# -- writes ----------------------------------------------------------------------------------------------------------


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH, max_norm=0.5), nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.tokens(x)).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("plan", [0, 3])
def test_a_forward_that_writes_to_a_parameter_is_refused(group, plan):
    with zr.open(plan=zr.Plan.zero(plan), group=group) as rt:
        model = zt.shard(make(Renormed), rt)
        with pytest.raises(CallError, match=r"'tokens.weight' to be read while gathered, got a write.*write=True"):
            model(*text(2, 0))
        assert not any(unit.is_gathered for unit in rt.units.values())


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.data.mul_(2),
        lambda w: setattr(w, "data", torch.zeros_like(w)),
        lambda w: nn.init.normal_(w),
    ],
    ids=["in place", "data in place", "data", "init"],
)
@pytest.mark.parametrize("plan", [0, 3])
def test_a_write_to_what_was_gathered_to_be_read_is_refused(group, plan, write):
    with zr.open(plan=zr.Plan.zero(plan), group=group) as rt:
        model = zt.shard(make(GPT), rt)
        with (
            torch.no_grad(),
            pytest.raises(CallError, match=r"'head.weight' to be read while gathered, got a write.*write=True"),
            zt.gathered(model.head),
        ):
            write(model.head.weight)
        with torch.no_grad(), zt.gathered(model.head, write=True):
            model.head.weight.fill_(2)
        with zt.gathered(model):
            assert (model.head.weight == 2).all()


class Rescaling(nn.Module):
    """Divides its weights when it is evaluated, as models for 16-bit inference do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        if not self.training:
            with torch.no_grad():
                self.body.weight.div_(2)
        return self.body(x)


def test_weights_that_are_rescaled_in_evaluation_are_refused(rt):
    model = zt.shard(make(Rescaling), rt)
    model(torch.ones(1, 4)).sum().backward()
    rt.step()
    with torch.no_grad(), pytest.raises(CallError, match=r"'body.weight' to be read while gathered, got a write"):
        model.eval()(torch.ones(1, 4))


def test_what_one_rank_alone_does_is_told_on_all_ranks(group):
    with zr.open(plan=zr.Plan.zero(3), group=group) as rt:
        model = zt.shard(make(GPT), rt)

        def write():
            with torch.no_grad(), zt.gathered(model.head):
                if rt.rank == 0:
                    model.head.weight.mul_(2)
            rt.group.barrier().wait()

        with pytest.raises(CallError, match=r"'head.weight' to be read while gathered"):
            write()
        if rt.rank == 0:
            model.adapter = nn.Linear(2, 2)
        model(*text(2, 0)).backward()
        with pytest.raises(CallError, match=r"got 'adapter.weight', 'adapter.bias', which came later"):
            rt.step()
        if rt.rank == 0:
            del model.adapter
        model(*text(2, 0)).backward()
        assert rt.step().updated


# -- gradients -------------------------------------------------------------------------------------------------------


def doubling():
    model = GPT()
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
    model.removed = model.head.weight.register_hook(lambda gradient: gradient * 100)
    return model


def test_hooks_on_tensors_are_carried_over(group):
    plain = make_wide(doubling)
    plain.removed.remove()
    expected = train_plain(plain, 4, kind=torch.optim.SGD, lr=0.1)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as rt:
        model = make_wide(doubling)
        model = zt.shard(model, rt)
        model.removed.remove()  # handles go on to work
        assert_same(train_sharded(model, rt, 4), expected)


def test_hooks_on_tensors_are_made_in_a_gathered_block(rt):
    model, seen = zt.shard(make(GPT), rt), []
    with zt.gathered(model.head):
        handle = model.head.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    for _ in range(2):
        model(*text(2, 0)).backward()
        rt.step()
    handle.remove()
    model(*text(2, 0)).backward()
    assert seen == [(VOCAB, WIDTH)] * 2


def test_hooks_behind_the_gradient_are_refused(rt):
    model = make(GPT)
    model.head.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(CallError, match=r"'head.weight' without post-accumulate-grad hooks.*register_hook"):
        zt.shard(model, rt)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model.zero_grad(),
        lambda model: model.head.weight.grad,
    ],
    ids=["clip_grad_norm_", "zero_grad", "grad"],
)
def test_reading_gradients_between_backward_and_step_warns(rt, read):
    model = zt.shard(make(GPT), rt)
    read(model)
    for _ in range(2):
        model(*text(2, 0)).backward()
        with pytest.warns(RuntimeWarning, match=r"clip_norm=.*grad_norm.*rt.discard_gradients\(\)"):
            read(model)
        rt.step()
        read(model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_over_sharded_parameters_is_refused_when_it_is_made(rt, kind):
    model = zt.shard(make(GPT), rt)
    groups = [{"params": list(model.head.parameters()), "lr": 0.1}]
    for parameters in (model.parameters(), groups):
        with pytest.raises(CallError, match=rf"updated by rt.step\(\), got {kind.__name__} over 'tokens|head.weight'"):
            kind(parameters, lr=0.1)
    free = kind(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(CallError, match=r"updated by rt.step\(\)"):
        free.add_param_group({"params": [model.head.weight]})


@pytest.mark.parametrize("recompute", [None, False])
def test_a_step_before_all_of_its_micro_steps_is_refused(group, recompute):
    with zr.open(plan=zr.Plan.zero(3), group=group, micro_steps=4) as rt:
        model = zt.shard(make(lambda: GPT(recompute=recompute)), rt)
        for done in range(1, 4):
            for step in range(done):
                model(*text(2, step)).backward()
            with pytest.raises(UnitStateError, match=rf"Expected 4 backward\(\) before step\(\), got {done}"):
                rt.step()
        for step in range(4):
            model(*text(2, step)).backward()
        assert rt.step().updated
        model(*text(2, 0)).backward()
        rt.discard_gradients()


# -- units without elements ------------------------------------------------------------------------------------------


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return x + self.none.sum()


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty, self.body = Empty(), nn.Linear(4, 4)

    def forward(self, x, y):
        return (self.empty(self.body(x)) - y).square().mean()


def points(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(samples, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


NVME = zr.Tier.NVME
PLANS = {
    "replicated": zr.Plan.zero(0),
    "sharded": zr.Plan.zero(3),
    "state on nvme": zr.Plan.zero(2, state=NVME),
    "nvme": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_unit_of_empty_tensors(group, scratch, plan):
    expected = train_plain(make_wide(WithEmpty), 3, batches=points)
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=1e-2), group=group, scratch=scratch) as rt:
        model = zt.shard(make_wide(WithEmpty), rt, units=(Empty, nn.Linear))
        assert_same(train_sharded(model, rt, 3, batches=points), expected)
        assert model.state_dict()["empty.none"].shape == (0, 3)


# -- transforms of torch.func ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.grad(lambda one: model.blocks[0](one).square().sum())(x),
        lambda model, x: torch.func.vmap(model.blocks[0].up)(x),
        lambda model, x: torch.func.vjp(model.blocks[0], x)[1](torch.ones_like(x))[0],
        lambda model, x: torch.func.jvp(model.blocks[1].up, (x,), (torch.ones_like(x),))[1],
    ],
    ids=["grad", "vmap", "vjp", "jvp"],
)
def test_transforms_over_inputs_compute_as_in_plain_torch(rt, transform):
    """Of inputs: gradients of parameters are autograd's alone, by ``backward()``."""
    x = torch.rand(2, 4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, model = make_wide(GPT), zt.shard(make_wide(GPT), rt)
    torch.testing.assert_close(transform(model, x), transform(plain, x), rtol=1e-12, atol=1e-14)
    model(*text(2, 0)).backward()
    assert rt.step().updated
