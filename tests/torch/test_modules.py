"""Modules that treat their parameters in ways of their own, and how units are found among them."""

import pytest
import torch
from models import GPT, LENGTH, VOCAB, WIDTH, Branching, Expert, branches, text
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from training import LR, assert_same, losses_of, make, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.testing.tolerance import OVER_STEPS
from zerort_torch.model.finding import find_units

pytestmark = pytest.mark.mpi


class Ordinary(nn.Module):
    """Embeds, hands on to a body of one's choice, and predicts with a head that its parent uses without calling it."""

    def __init__(self, body):
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(VOCAB, WIDTH), body, nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        h = self.body(self.tokens(x))
        h = h[0] if isinstance(h, tuple) else h
        return F.cross_entropy(F.linear(h, self.head.weight, self.head.bias).flatten(0, 1), y.flatten())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(
            WIDTH, 2, batch_first=True
        )  # uses its projection's weight without calling it

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / 6, "b": torch.randn(())})

    def forward(self, x):
        return x @ self.named["a"] * self.named["b"] + sum(self.several)


class Twice(nn.Module):
    """One module under two names, and called twice under each."""

    def __init__(self):
        super().__init__()
        self.first = self.second = Expert()

    def forward(self, x):
        return self.second(self.first(x)) + self.first(x)


BODIES = {
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
    "attention": Attention,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    "lists": Lists,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "twice": Twice,
}


@pytest.mark.parametrize("body", BODIES)
def test_ordinary_modules_train_as_they_are(group, body):
    def factory():
        return Ordinary(BODIES[body]())

    assert_same(losses_of(factory, group, 4), train_plain(make_wide(factory), 4))
    assert_same(losses_of(factory, group, 2, units=(nn.Embedding, Ordinary)), train_plain(make_wide(factory), 2))


def names(model, units=None):
    return {unit.name: len(unit.parameters) for unit in find_units(model, units)}


def test_blocks_are_found_by_repetition():
    assert names(make(GPT)) == {"": 5, "blocks.0": 12, "blocks.1": 12, "blocks.2": 12}
    assert names(make(Branching)) == {"": 3, "head": 2, **{f"experts.{i}": 4 for i in range(4)}}  # a large leaf
    wide = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 8))
    assert names(wide) == {"": 2, "0": 2, "2": 2}


def test_a_tied_parameter_belongs_to_the_first_unit_that_has_it():
    model = GPT(tied=True)
    found = {unit.name: unit for unit in find_units(model, (nn.Embedding, nn.Linear))}
    assert found["head"].parameters == []
    assert found["head"].borrows == {"tokens"}
    assert [p.full for p in found["tokens"].parameters] == ["tokens.weight"]
    assert found["tokens"].parameters[0].places == [(model.tokens, "weight"), (model.head, "weight")]


def test_tied_across_units(group):
    def factory():
        return GPT(tied=True)

    got = losses_of(factory, group, 4, units=(nn.Embedding, nn.Linear))
    assert_same(got, train_plain(make_wide(factory), 4))


def test_copies_of_a_model_on_groups_of_ranks(node):
    if node.size != 4:
        pytest.skip("needs 4 ranks")
    mesh = zr.mesh(shard=2, replicate=2, group=node)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), mesh=mesh) as rt:
        model, plain = zt.shard(make_wide(GPT), rt), make_wide(GPT)
        x, y = text(4, 0)
        model(x[rt.rank :][:1], y[rt.rank :][:1]).backward()
        rt.step()
        plain(x, y).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        with zt.gathered(model):
            for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(mine, other, rtol=0, atol=OVER_STEPS), name
        assert x.shape[1] == LENGTH


def test_copies_of_a_model_take_other_branches(node):
    """No copy waits for another's sum of an expert that it has not used: reductions have one order on all ranks."""
    shard = 2 if node.size == 4 else 1
    mesh = zr.mesh(shard=shard, replicate=node.size // shard, group=node)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), mesh=mesh) as rt:
        got = train_sharded(zt.shard(make_wide(Branching), rt), rt, 6, batches=branches)
    assert_same(got, train_plain(make_wide(Branching), 6, batches=branches))
