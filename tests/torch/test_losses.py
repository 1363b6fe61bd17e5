"""A sharded run has the losses of one process over the same global batch, under every plan."""

import functools

import pytest
import torch
from models import CNN, GPT, Block, Branching, images, llama, lora_gpt, text
from mpi4py import MPI
from training import assert_same, losses_of, make, train_plain

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def steps_for(group):
    """Fewer where every message goes through MPI: what differs there shows at once."""
    return 20 if group.one_memory else 4


@functools.cache
def plain(factory, batches, steps=20, clip=None):
    mine = train_plain(make(factory), steps, batches=batches, clip=clip) if WORLD.rank == 0 else None
    return WORLD.bcast(mine)


def plain_text(factory, **more):
    return plain(factory, text, **more)


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
def test_gpt(group, plan):
    steps = (50 if plan == 3 else 20) if group.one_memory else 4
    assert_same(losses_of(GPT, group, steps, plan=plan, clip_norm=0.5), plain_text(GPT, steps=50, clip=0.5))


@pytest.mark.parametrize("units", [Block, (Block, torch.nn.Embedding), lambda name, module: name.endswith("norm1")])
def test_gpt_with_units_of_every_kind(group, units):
    assert_same(losses_of(GPT, group, steps_for(group), units=units), plain_text(GPT))


def evaluating_cnn():
    """A CNN whose BatchNorms use running statistics: those of a part of a batch are not those of the whole."""
    return CNN().eval()


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("factory", "batches"),
    [
        (evaluating_cnn, images),
        (lora_gpt, text),
        (functools.partial(GPT, tied=True), text),
    ],
    ids=["cnn", "lora", "tied"],
)
def test_models_of_every_kind(group, plan, factory, batches):
    assert_same(losses_of(factory, group, steps_for(group), batches=batches, plan=plan), plain(factory, batches))


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
def test_ranks_that_take_different_branches(node, plan):
    """Routed by its first token, each sample is of one branch; ranks see other samples, so they use other experts."""

    def batches(samples, seed):
        x, y = text(samples, seed)
        x[:, 0] = torch.arange(samples) % 12 // (6 - 3 * (seed % 2))  # now two branches, now three; by rank
        return x, y

    assert_same(losses_of(Branching, node, steps_for(node), batches=batches, plan=plan), plain(Branching, batches))


def test_branches_that_all_ranks_take_alike_need_no_shared_memory(group):
    def batches(samples, seed):
        x, y = text(samples, seed)
        x[:, 0] = seed % 3
        return x, y

    assert_same(losses_of(Branching, group, steps_for(group), batches=batches), plain(Branching, batches))


@pytest.mark.parametrize("plan", [0, 3])
def test_hugging_face_llama(group, plan):
    pytest.importorskip("transformers")
    assert_same(losses_of(llama, group, steps_for(group), plan=plan), plain_text(llama))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(group, reentrant):
    factory = functools.partial(GPT, recompute=reentrant)
    assert_same(losses_of(factory, group, steps_for(group)), plain_text(GPT))


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
def test_micro_steps_are_summed_before_they_travel(group, plan):
    assert_same(losses_of(GPT, group, steps_for(group), plan=plan, micro_steps=2), plain_text(GPT))


def test_micro_steps_in_which_branches_differ(node):
    def batches(samples, seed):
        x, y = text(samples, seed)
        x[:, 0] = torch.arange(samples) % 12 // 4
        return x, y

    assert_same(losses_of(Branching, node, steps_for(node), batches=batches, micro_steps=2), plain(Branching, batches))
