"""Training a model plain in one process and sharded on ranks, over the same global batch.

What is compared over steps is made in float64 (`make_wide`): float32 shows how a CPU sums; see
`zerort.testing.tolerance`.
"""

import numpy as np
import torch
from models import text

import zerort as zr
import zerort_torch as zt
from zerort.testing.tolerance import OVER_STEPS

SAMPLES = 24  # of a global batch: 1, 2, 3 and 4 ranks get alike parts, for two micro-steps, too
LR = 1e-2


def make(factory, seed=7):
    """Return a model with the same values wherever it is made."""
    torch.manual_seed(seed)
    return factory()


def make_wide(factory, seed=7):
    """Return the same in float64."""
    return make(factory, seed).double()


def part(batch, rank, size):
    """Return a rank's part of a batch."""
    return [one[rank * len(one) // size : (rank + 1) * len(one) // size] for one in batch]


def train_plain(model, steps, *, batches=text, lr=LR, clip=None, parts=1, kind=torch.optim.AdamW, **settings):
    """Return the losses over whole batches, of one process.

    Args:
        model: What is trained.
        steps: How many steps.
        batches: Gives a step's batch.
        lr: The learning rate.
        clip: Largest norm of the gradients.
        parts: How many parts a batch is computed in, one after the other, whose gradients are averaged: for models that
            compute with the statistics of what they see at once. The first part's buffers are kept.
        kind: The optimizer.
        **settings: The optimizer's.
    """
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=lr, **settings)
    losses = []
    for step in range(steps):
        batch = batches(SAMPLES, step)
        optimizer.zero_grad()
        total = 0.0
        for index in range(parts):
            before = [buffer.clone() for buffer in model.buffers()]
            loss = model(*part(batch, index, parts)) / parts
            loss.backward()
            total += loss.item()
            if index:
                for buffer, old in zip(model.buffers(), before, strict=True):
                    buffer.copy_(old)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return np.array(losses)


def train_sharded(model, rt, steps, *, batches=text, first=0):
    """Return the same losses, each the mean over ranks and micro-steps."""
    losses = []
    for step in range(first, first + steps):
        mine = []
        for shard in rt.micro_batches:
            loss = model(*part(batches(SAMPLES, step), shard, rt.micro_batch_count)) * rt.loss_scale
            loss.backward()
            mine.append(loss.item() / rt.loss_scale)
        rt.step()
        losses.append(rt.mean(mine))
    return np.array(losses)


def losses_of(factory, group, steps, *, batches=text, plan=3, units=None, optimizer=None, make=make_wide, **options):
    """Return the losses of a sharded run."""
    optimizer = optimizer or zr.AdamW(lr=LR)
    with zr.open(plan=zr.Plan.zero(plan), optimizer=optimizer, group=group, **options) as rt:
        return train_sharded(zt.shard(make(factory), rt, units=units), rt, steps, batches=batches)


def assert_same(got, expected, tolerance=OVER_STEPS):
    """Compare losses, relative to the expected ones, as far as there are any."""
    expected = expected[: len(got)]
    worst = np.max(np.abs(got - expected) / np.abs(expected))
    assert worst <= tolerance, f"{worst:.2e}: {got} against {expected}"
