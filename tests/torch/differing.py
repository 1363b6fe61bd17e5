"""Models and batches with which ranks use different parameters, and ranks that share no memory.

The runtimes over such ranks are fixtures, `rt` and `rt_anywhere` (conftest.py).
"""

import contextlib

import pytest
import torch
from models import VOCAB, WIDTH, Branching, Expert, text
from mpi4py import MPI
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import LR, SAMPLES, make_wide, part, train_plain

import zerort as zr
import zerort_torch as zt
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport

WORLD, STEPS = MPI.COMM_WORLD, 3

PLACES = {"nvme": "mpi", "nvme in one memory": "node", "nvme on hosts": "hierarchical"}
"""Ranks with parameters on NVMe, by the kind of their group; others by the kind itself."""

MARKS = [
    pytest.mark.mpi,
    pytest.mark.skipif(not 2 <= MPI.COMM_WORLD.size <= 3, reason="ranks that differ: two and three"),
]


def open_apart(kind, options):
    """Return ranks that share no memory, or not all of them."""
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    return Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))


@contextlib.contextmanager
def open_place(place, options, scratch):
    """Open a runtime over ranks that share no memory, or some of it, or all with parameters on NVMe."""
    on_disk = {"parameter": zr.Tier.NVME, "state": zr.Tier.NVME} if place in PLACES else {}
    with (
        open_apart(PLACES.get(place, place), options) as group,
        zr.open(
            plan=zr.Plan.zero(3, **on_disk),
            optimizer=zr.AdamW(lr=LR),
            group=group,
            scratch=WORLD.bcast(str(scratch)) if on_disk else None,
        ) as found,
    ):
        yield found
    WORLD.Barrier()


def shard_with_losses(rt, factory, **settings):
    """Return a sharded model, of which ranks use different parts, and the losses of the same steps without zerort."""
    parts = {} if factory is Branching else {"parts": rt.size}
    expected = train_plain(make_wide(factory), STEPS, batches=branches_apart, **parts)
    return zt.shard(make_wide(factory), rt, units=(Expert, torch.nn.Embedding), **settings), expected


def expect_the_same_where_ranks_sit_out(options, accumulate, **settings):
    """Train with micro-steps in which a rank makes no backward pass, or no forward either: as in one memory."""

    def weights(kind, **settings):
        with (
            open_apart(kind, options) as group,
            zr.open(
                plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, micro_steps=3, accumulate=accumulate
            ) as rt,
        ):
            model = zt.shard(make_wide(Branching), rt, units=Expert, **settings)
            for step in range(3):
                for at in range(3):
                    idle = step == 1 and rt.rank == 1
                    if idle and kind == "mpi":
                        continue
                    loss = model(*part(branches_apart(SAMPLES, step + at), rt.rank, rt.size))
                    if rt.rank == 0 or ((rt.rank + at + step) % 3 and not idle):
                        loss.backward()
                rt.step()
            return zt.full_state_dict(model, root=None)

    expect_close(weights("mpi", **settings), weights("node"))


def expect_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def branches_apart(samples, seed):
    """Return token batches of three experts, one after the other: two ranks share one of them, three ranks none."""
    x, y = text(samples, seed)
    x[:, 0] = (torch.arange(samples) * 3 // samples + seed) % 3
    return x, y


class Towers(torch.nn.Module):
    """Two towers of which a batch uses one or both, one checkpointed or not; tied to each other and to the head."""

    def __init__(self, *, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.towers = torch.nn.ModuleDict({name: torch.nn.ModuleList([Expert(), Expert()]) for name in "ab"})
        self.scales = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(WIDTH)) for name in "ab"})
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.towers["b"][1].up.weight = self.towers["a"][0].up.weight

    def forward(self, x, y):
        h, used = self.tokens(x), "a" if (x[0, 0] % 3 == 0) else "b" if (x[0, 0] % 3 == 1) else "ab"
        for name in used:
            for block in self.towers[name]:
                recompute = name == "b" and self.recompute
                h = h + (checkpoint(block, h, use_reentrant=False) if recompute else block(h)) * self.scales[name]
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def towers_again():
    return Towers(recompute=True)


class Segments(torch.nn.Module):
    """Twice two towers of which a batch uses one; each is computed again as a whole, units in forward's order."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.towers = torch.nn.ModuleList(torch.nn.Sequential(Expert(), Expert(), Expert()) for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        h = self.tokens(x)
        for first in (0, 2):
            h = h + checkpoint(self.towers[first + int(x[0, 0] % 2)], h, use_reentrant=False)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
