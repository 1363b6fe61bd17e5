"""Models and batches with which ranks use different parameters, and ranks that share no memory."""

import torch
from models import VOCAB, WIDTH, Expert, text
from mpi4py import MPI
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport

WORLD = MPI.COMM_WORLD


def open_apart(kind, options):
    """Return ranks that share no memory, or not all of them."""
    if kind != "hierarchical":
        return open_group(kind=kind, options=options)
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    return Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))


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
