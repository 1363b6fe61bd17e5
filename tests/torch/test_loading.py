"""An order under torch's DataLoader: workers ahead of the loop, workers that stay, empty parts, a run that goes on."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import zerort as zr
import zerort_torch as zt
from zerort.errors import CallError

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

ORDER = zr.data.Order(length=53, batch=6, seed=3)  # 9 batches, the last of 5
SHORT = zr.data.Order(length=9, batch=8, seed=3)  # its last batch has one sample: empty on all ranks but one


class Squares(Dataset):
    """Samples that say which they are."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        return {"index": index, "x": torch.full((3,), float(index) ** 2)}


@pytest.fixture
def path():
    directory = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield Path(directory) / "c"
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(directory)


def opened(group):
    torch.manual_seed(0)
    rt = zr.open(plan=zr.Plan.zero(2), optimizer=zr.SGD(lr=0.1), group=group)
    return rt, zt.shard(torch.nn.Linear(3, 1), rt)


def loader_of(sampler, workers):
    return DataLoader(
        Squares(),
        batch_sampler=sampler,
        collate_fn=zt.Collate(Squares()),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def train(rt, model, loader, *, steps=None):
    """Return the samples of each step over all ranks."""
    batches = []
    for batch in loader:
        assert batch["x"].shape == (len(batch["index"]), 3)
        mine = batch["index"].numpy()
        counts = rt.group.all_gather(np.array([mine.size])).wait().tolist()
        batches.append(rt.group.all_gather(mine, counts=counts).wait().tolist())
        model(batch["x"] * 1e-6).sum().backward()
        rt.step()
        if len(batches) == steps:
            break
    return batches


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_over_a_loader_give_the_order_epoch_by_epoch(node, workers):
    rt, model = opened(node)
    with rt:
        sampler = zt.OrderSampler(rt, ORDER)
        loader, found = loader_of(sampler, workers), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert (sampler.epoch, len(loader)) == (epoch, 9)
            found += train(rt, model, loader)
        with pytest.raises(CallError, match="set_epoch"):
            iter(loader)
        assert found == [batch.tolist() for batch in ORDER.batches(epochs=2)]


def test_batches_that_wait_in_workers_do_not_count(node, path):
    """Two workers have four batches ready when the run stops: the next one begins with the first of them."""
    rt, model = opened(node)
    with rt:
        first = train(rt, model, loader_of(zt.OrderSampler(rt, ORDER), 2), steps=2)
        rt.save(path)
    rt, model = opened(node)
    with rt:
        rt.load(path)
        loader = loader_of(zt.OrderSampler(rt, ORDER), 2)
        assert len(loader) == 7
        ahead = iter(loader)
        rt.load(path)
        with pytest.raises(CallError, match="another loop was begun, or a checkpoint loaded"):
            list(ahead)
        second = train(rt, model, loader)
    assert first + second == [batch.tolist() for batch in ORDER.batches()]


def test_a_rank_without_samples_takes_part(node):
    rt, model = opened(node)
    with rt:
        loader = loader_of(zt.OrderSampler(rt, SHORT), 0)
        assert train(rt, model, loader) == [batch.tolist() for batch in SHORT.batches()]
        assert rt.updates == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_one_micro_batch_at_a_time(node, workers):
    """Three of them are a batch of the order and a step, which is what counts as used."""
    torch.manual_seed(0)
    with zr.open(plan=zr.Plan.zero(2), optimizer=zr.SGD(lr=0.1), group=node, micro_steps=3) as rt:
        model = zt.shard(torch.nn.Linear(3, 1), rt)
        sampler = zt.OrderSampler(rt, ORDER, micro_batches=True)
        assert len(sampler) == 3 * 9
        seen, mine = [], []
        for batch in loader_of(sampler, workers):
            mine.append(batch["index"].tolist())
            model(batch["x"] * 1e-6).sum().backward()
            if len(mine) == 3:
                rt.step()
                seen.append(mine)
                mine = []
                if len(seen) == 4:
                    break
        assert len(sampler) == 3 * 5
        again = zr.data.Order(length=ORDER.length, batch=ORDER.batch, seed=ORDER.seed, name="again")
        parts = [np.array_split(indices, 3) for indices, _ in zip(rt.take(again), range(4), strict=False)]
        assert seen == [[part.tolist() for part in step] for step in parts]
