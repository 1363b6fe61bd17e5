"""Precision, groups, evaluation, several models, modules used twice or in another order; and torch's own optimizers."""

import functools

import numpy as np
import pytest
import torch
from models import GPT, VOCAB, WIDTH, Branching, Expert, Loss, text
from torch import nn
from torch.nn import functional as F  # noqa: N812
from training import LR, SAMPLES, assert_same, losses_of, make, make_wide, part, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError
from zerort.testing.tolerance import rounding

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT()

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x, y)


def assert_same_before_an_update(got, factory, group):
    """Compare the first loss with one process's, which computes the ranks' parts one after the other.

    What is in 16 bits has the same weights, shapes and kernels there. From the logits on it is float32: a mean over 288
    tokens. The losses that follow are compared widely, to see that it trains: an update passes differences on.
    """
    assert_same(got[:1], train_plain(make(factory), 1, parts=group.size), tolerance=rounding("float32", 288))


def test_autocast(group):
    got = losses_of(Autocast, group, 6, make=make)
    assert_same_before_an_update(got, Autocast, group)
    assert_same(got, train_plain(make(Autocast), 6), tolerance=5e-3)


def test_bf16_parameters_have_float32_master_weights(group):
    """bf16 parameters without stand still where an update is too small to be seen; these move on."""

    def factory():
        return GPT().to(torch.bfloat16)

    got = losses_of(factory, group, 10, make=make)
    assert_same_before_an_update(got, factory, group)
    assert_same(got, train_plain(make_wide(GPT), 10), tolerance=1e-2)
    plain, small = make(factory), 1e-4
    before = plain.head.weight.detach().clone()
    large = before.abs() > 0.1  # numbers there are at least 5e-4 apart
    train_plain(plain, 10, lr=small)
    assert torch.equal(plain.head.weight[large], before[large])
    with zr.open(optimizer=zr.AdamW(lr=small), group=group) as rt:
        model = zt.shard(make(factory), rt)
        train_sharded(model, rt, 10)
        after = zt.full_state_dict(model, root=None)["head.weight"]
    assert (after[large] != before[large]).double().mean() > 0.05


@pytest.mark.parametrize("plan", [1, 3])
def test_inference_mode_and_a_forward_that_fails(group, plan):
    with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model, plain = zt.shard(make_wide(GPT), rt), make_wide(GPT)
        with torch.inference_mode():
            assert torch.equal(model(*text(2, 0)), plain(*text(2, 0)))
        with pytest.raises(IndexError):
            model(torch.full((2, 3), VOCAB), torch.zeros(2, 3, dtype=torch.long))
        with pytest.raises(zr.errors.StaleViewError):  # everything rests again
            model.blocks[0].up.weight.sum()
        assert_same(train_sharded(model, rt, 2), train_plain(plain, 2))


def test_settings_of_their_own_by_torchs_names(node):
    plain = make_wide(GPT)
    cold = [p for name, p in plain.named_parameters() if name.endswith("bias") or "norm" in name]
    warm = [p for name, p in plain.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    optimizer = torch.optim.AdamW([{"params": cold, "weight_decay": 0.0}, {"params": warm, "lr": LR / 2}], lr=LR)
    expected = []
    for step in range(5):
        loss = plain(*text(SAMPLES, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    groups = [
        zr.ParameterGroup(("*.bias", "*norm*"), weight_decay=0.0),
        zr.ParameterGroup(("blocks.*.weight", "tokens.weight", "positions.weight", "head.weight"), lr=LR / 2),
    ]
    assert_same(losses_of(GPT, node, 5, param_groups=groups), np.array(expected))


def test_evaluation_and_generation_between_steps(group):
    """Looking in between changes nothing, and what is seen is what a plain model would say."""
    expected = train_plain(make_wide(GPT), 4)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(make_wide(GPT), rt)
        got = []
        for step in range(4):
            got.append(train_sharded(model, rt, 1, first=step)[0])
            plain = GPT().double()
            plain.load_state_dict(zt.full_state_dict(model, root=None))
            with torch.no_grad():
                for length in (2, 3, 5):
                    x, y = (one[:, :length] for one in text(2, 50))
                    assert torch.equal(model(x, y), plain(x, y))
        assert_same(np.array(got), expected)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, z):
        return self.layers(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def duel(generator, critic, step_generator, step_critic, batch, discard):
    """Do a step of a GAN; the generator's loss reaches the critic, whose gradients are dropped."""
    z, real = batch
    loss = F.softplus(critic(generator(z).detach())).mean() + F.softplus(-critic(real)).mean()
    loss.backward()
    step_critic()
    other = F.softplus(-critic(generator(z))).mean()
    other.backward()
    step_generator()
    discard()
    return [loss.item(), other.item()]


def test_two_models_with_a_runtime_each(node):
    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 8)]

    plain = make_wide(Generator), make_wide(Critic)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=LR) for one in plain]

    def step(optimizer):
        optimizer.step()
        optimizer.zero_grad()

    expected = [
        duel(*plain, *(functools.partial(step, one) for one in optimizers), batch(i), optimizers[1].zero_grad)
        for i in range(6)
    ]
    open_one = functools.partial(zr.open, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR))
    with open_one(group=node) as one, open_one(group=node) as two:
        models = zt.shard(make_wide(Generator), one), zt.shard(make_wide(Critic), two)
        got = [
            duel(*models, one.step, two.step, part(batch(i), one.rank, one.size), two.discard_gradients)
            for i in range(6)
        ]
    mean = node.all_reduce(np.array(got)).wait() / node.size
    assert_same(mean, np.array(expected))


class Student(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.head(self.inner.norm(self.inner.tokens(x)))


def test_two_models_in_one_runtime(node):
    """A frozen teacher and a student; the student's parts are called on their own."""
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=node) as rt:
        teacher = zt.shard(make(GPT).requires_grad_(False), rt, name="teacher")
        student = zt.shard(Student(make(GPT, seed=2)), rt, name="student")
        assert {"teacher.blocks.0", "student.inner.blocks.2"} <= rt.units.keys()
        x, y = text(4, 0)
        losses = []
        for _ in range(4):
            loss = F.cross_entropy(student(x).flatten(0, 1), y.flatten()) + 0 * teacher(x, y)
            loss.backward()
            report = rt.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert any(name.startswith("student.inner.blocks") for name in report.without_gradient)
        assert not any(name.startswith("teacher") for name in report.without_gradient)


class Turning(nn.Module):
    """Experts that are used twice, or not at all, in an order that changes from step to step."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x, y):
        h = self.tokens(x)
        first = int(x[0, 0]) % 4
        for index in (first, (first + 1) % 4, first):
            h = h + self.experts[index](h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("plan", [1, 3])
@pytest.mark.parametrize("room", [{}, {"buckets": 1, "prefetch": 0}, {"buckets": 3, "prefetch": 2}])
def test_an_order_that_changes_from_step_to_step(group, plan, room):
    def batches(samples, seed):
        x, y = text(samples, seed)
        x[:, 0] = (seed * 7) % 5
        return x, y

    assert_same(
        losses_of(Turning, group, 8, batches=batches, plan=plan, **room),
        train_plain(make_wide(Turning), 8, batches=batches),
    )


def test_a_unit_that_no_rank_used_is_not_reduced(node):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=node) as rt:
        model = zt.shard(make(Branching), rt, units=(Expert, nn.Linear))
        moved = []
        for step in range(3):
            x, y = text(4, step)
            x[:, 0] = 0
            model(x, y).backward()
            report = rt.step()
            moved.append(report.bytes_moved.get("reduce_scatter", 0))
            assert {name.split(".")[0] for name in report.without_gradient} == {"experts", "unused"}
        assert moved[2] == moved[1]
        if rt.size > 1:
            assert moved[1] < 0.5 * moved[0]  # the first step does not know yet


def test_loss_scale_and_fp16(node):
    def factory():
        return GPT().to(torch.float16)

    got = losses_of(factory, node, 5, loss_scale=256.0, make=make)
    assert_same_before_an_update(got, factory, node)
    assert_same(got, train_plain(make_wide(GPT), 5), tolerance=1e-2)


# -- torch's optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["AdamW", "RAdam", "NAdam", "Adagrad", "RMSprop", "Adamax", "Adadelta", "SGD", "ASGD", "Rprop"]
)
@pytest.mark.parametrize("plan", [0, 3])
def test_torchs_optimizers_on_shards(node, kind, plan):
    made = getattr(torch.optim, kind)
    settings = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5, "centered": True}}.get(kind, {})
    factory = functools.partial(GPT, layers=1)
    got = losses_of(factory, node, 5, plan=plan, optimizer=zt.optimizer(made, lr=LR, **settings))
    assert_same(got, train_plain(make_wide(factory), 5, kind=made, **settings))


def test_torchs_optimizers_take_schedules_groups_and_bf16(node):
    optimizer = zt.optimizer(torch.optim.Adam, lr=zr.warmup_linear(LR, warmup=2, total=9))
    groups = [zr.ParameterGroup("*bias", weight_decay=0.1)]
    got = losses_of(lambda: GPT().to(torch.bfloat16), node, 3, make=make, optimizer=optimizer, param_groups=groups)
    assert np.isfinite(got).all()
    assert optimizer.describe()["kind"] == "torch.Adam"


def test_what_is_no_elementwise_optimizer_is_refused():
    for kind, settings in [
        (torch.optim.LBFGS, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.SparseAdam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "beta": 3}),
        (int, {}),
    ]:
        with pytest.raises(CallError, match=r"Expected (an optimizer that updates each|settings of|a class such)"):
            zt.optimizer(kind, **settings)


# -- Hugging Face --------------------------------------------------------------------------------------------------


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return Loss(transformers.GPT2LMHeadModel(config))


def t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    return Seq2Seq(transformers.T5ForConditionalGeneration(config))


class Seq2Seq(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        logits = self.inner(input_ids=x, decoder_input_ids=x).logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_hugging_face_models_with_tied_weights(node):
    """T5 computes its norms in float32, whatever it is in, so one step of it is compared: losses before and after."""
    pytest.importorskip("transformers")
    assert_same(losses_of(gpt2, node, 5), train_plain(make_wide(gpt2), 5))
    got = losses_of(t5, node, 2, make=make, optimizer=zr.SGD(lr=LR))
    assert_same(got, train_plain(make(t5), 2, kind=torch.optim.SGD), tolerance=rounding("float32", 5000))
