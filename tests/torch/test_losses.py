"""A sharded run has the losses of one process over the same global batch, under every plan."""

import functools

import numpy as np
import pytest
import torch
from models import CNN, GPT, Block, Branching, branches, images, llama, lora_gpt, one_branch, text
from mpi4py import MPI
from training import LR, assert_same, losses_of, make, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.testing.tolerance import OVER_STEPS, rounding

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PLANS = [0, 1, 2, 3]


def steps_for(group):
    """Fewer where every message goes through MPI: what differs there shows at once."""
    return 20 if group.one_memory else 4


@functools.cache
def plain(factory, batches, *, steps=20, lr=LR, clip=None, parts=1, make=make_wide, kind=torch.optim.AdamW):
    """Return the losses and the buffers of one process; rank 0 computes them for all, once."""
    if WORLD.rank:
        return WORLD.bcast(None)
    model = make(factory)
    losses = train_plain(model, steps, batches=batches, lr=lr, clip=clip, parts=parts, kind=kind)
    return WORLD.bcast((losses, {name: buffer.numpy() for name, buffer in model.named_buffers()}))


def plain_text(factory, **more):
    return plain(factory, text, **more)[0]


# -- twenty steps of every kind of model, under every plan ---------------------------------------------------------

small_gpt = functools.partial(GPT, layers=2)
tied_gpt = functools.partial(GPT, layers=2, tied=True)
small_lora = functools.partial(lora_gpt, layers=2)
KINDS = {
    "gpt": (small_gpt, text),
    "cnn": (CNN, images),
    "branching": (Branching, branches),
    "tied": (tied_gpt, text),
    "lora": (small_lora, text),
    "llama": (llama, text),
}


def parts_for(kind, group):
    """Return the model, its batches, and how many parts one process computes a batch in."""
    if kind == "llama":
        pytest.importorskip("transformers")
    factory, batches = KINDS[kind]
    if kind == "branching" and not group.one_memory:
        batches = one_branch  # ranks that take other branches need shared memory
    return factory, batches, group.size if kind == "cnn" else 1  # BatchNorm's statistics are those of a part


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps(group, kind, plan):
    """The losses are those of one process, and so is what the model has become."""
    factory, batches, parts = parts_for(kind, group)
    clip = 0.5 if kind == "gpt" else None
    expected, buffers = plain(factory, batches, clip=clip, parts=parts)
    with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=LR), group=group, clip_norm=clip) as rt:
        model = zt.shard(make_wide(factory), rt)
        steps = steps_for(group)
        assert_same(train_sharded(model, rt, steps, batches=batches), expected)
        if steps == 20:
            for name, buffer in model.named_buffers():
                np.testing.assert_allclose(buffer, buffers[name], rtol=OVER_STEPS, atol=OVER_STEPS, err_msg=name)
        weights, copy = zt.full_state_dict(model, root=None), make_wide(factory).eval()
        copy.load_state_dict(weights)
        with torch.no_grad():
            assert torch.equal(model.eval()(*batches(4, 99)), copy(*batches(4, 99)))


@pytest.mark.parametrize("plan", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_in_float32(group, kind, plan):
    """The loss before it, and after it: by SGD, for AdamW would make a whole step out of a gradient that is rounding.

    A loss is a mean over 288 tokens of the logarithm of a sum of 64, of products of 32 or 128 in three layers; back the
    same way, and once more with the new weights: not more than 3000 roundings in a row.
    """
    factory, batches, parts = parts_for(kind, group)
    options = {"steps": 2, "parts": parts, "make": make, "kind": torch.optim.SGD}
    expected, _ = plain(factory, batches, **options)
    with zr.open(plan=zr.Plan.zero(plan), optimizer=zr.SGD(lr=LR), group=group) as rt:
        model = zt.shard(make(factory), rt)
        got = train_sharded(model, rt, 2, batches=batches)
    assert_same(got, expected, tolerance=rounding("float32", 3000))


# -- other ways to cut, to recompute, to sum -----------------------------------------------------------------------


@pytest.mark.parametrize("units", [Block, (Block, torch.nn.Embedding), lambda name, module: name.endswith("norm1")])
def test_gpt_with_units_of_every_kind(group, units):
    assert_same(losses_of(GPT, group, steps_for(group), units=units), plain_text(GPT))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(group, reentrant):
    factory = functools.partial(GPT, recompute=reentrant)
    assert_same(losses_of(factory, group, steps_for(group)), plain_text(GPT))


@pytest.mark.parametrize("plan", PLANS)
def test_micro_steps_are_summed_before_they_travel(group, plan):
    assert_same(losses_of(GPT, group, steps_for(group), plan=plan, micro_steps=2), plain_text(GPT))


def three_branches(samples, seed):
    x, y = text(samples, seed)
    x[:, 0] = torch.arange(samples) % 12 // 4
    return x, y


def test_micro_steps_in_which_branches_differ(node):
    got = losses_of(Branching, node, steps_for(node), batches=three_branches, micro_steps=2)
    assert_same(got, plain(Branching, three_branches)[0])
