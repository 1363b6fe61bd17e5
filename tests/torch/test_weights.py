"""Weights in and out: state_dict, checkpoints of other numbers of ranks, gathered blocks, the meta device."""

import tempfile
import weakref

import numpy as np
import pytest
import torch
from models import CNN, GPT, images, lora_gpt, text
from mpi4py import MPI
from training import LR, assert_same, make, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.comm import open_group
from zerort.engine.persist import snapshot

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi


def tied():
    return GPT(tied=True)


def opened(group, plan=3, **more):
    return zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=LR), group=group, **more)


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory() as mine:
        yield WORLD.bcast(mine)
        WORLD.Barrier()


def same(found, expected):
    assert list(found) == list(expected)
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("plan", [0, 3])
@pytest.mark.parametrize("factory", [GPT, tied, lora_gpt, CNN])
def test_a_sharded_model_has_the_state_dict_of_the_plain_one(group, plan, factory):
    plain = make(factory).state_dict()
    with opened(group, plan) as rt:
        model = zt.shard(make(factory), rt)
        assert same(model.state_dict(), plain)
        root = zt.full_state_dict(model)
        assert same(root, plain) if rt.rank == 0 else not any(name in root for name, _ in model.named_parameters())
        assert same(zt.full_state_dict(model, root=None), plain)


@pytest.mark.parametrize("plan", [1, 3])
def test_trained_weights_load_into_the_plain_model_and_back(group, plan):
    with opened(group, plan) as rt:
        model = zt.shard(make_wide(GPT), rt)
        train_sharded(model, rt, 3)
        weights = zt.full_state_dict(model, root=None)
        plain = make_wide(GPT, seed=1)
        plain.load_state_dict(weights)
        batch = text(4, 99)
        with torch.no_grad():
            assert torch.equal(model(*batch), plain(*batch))
        other = make_wide(GPT, seed=3)
        assert model.load_state_dict(other.state_dict()).missing_keys == []
        with torch.no_grad():
            assert torch.equal(model(*batch), other(*batch))
        assert_same(train_sharded(model, rt, 1)[:1], train_plain(other, 1))


def test_loading_what_differs_between_ranks_is_refused(node):
    if node.size == 1:
        pytest.skip("needs another rank")
    with opened(node) as rt:
        model = zt.shard(make(GPT), rt)
        with pytest.raises(zr.errors.CallError, match=r"Expected the same .*values of the root unit"):
            model.load_state_dict(make(GPT, seed=rt.rank).state_dict())


def fewer(node):
    """Return a group of all ranks but the last, which gets one of its own."""
    return node.split(int(node.rank == node.size - 1 and node.size > 1))


OTHER_RANKS = {
    "each alone": lambda node: open_group(kind="solo"),
    "over MPI": lambda node: open_group(kind="mpi"),
    "one fewer": fewer,
}


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_saved_on_some_ranks_and_loaded_on_others(node, directory, ranks):
    """Saved on all ranks; loaded by each alone, by all over MPI, by one fewer; training goes on as it would have."""
    expected = train_plain(make_wide(GPT), 6)
    with opened(node) as rt:
        model = zt.shard(make_wide(GPT), rt)
        assert_same(train_sharded(model, rt, 3), expected[:3])
        rt.save(f"{directory}/checkpoint")
    with OTHER_RANKS[ranks](node) as group, opened(group, plan=2) as rt:
        model = zt.shard(make_wide(GPT, seed=2), rt)
        assert rt.load(f"{directory}/checkpoint").updates == 3
        assert_same(train_sharded(model, rt, 3, first=3), expected[3:])
        plain = make_wide(GPT, seed=1)
        plain.load_state_dict(zt.full_state_dict(model, root=None))
        with torch.no_grad():
            assert torch.equal(model(*text(4, 99)), plain(*text(4, 99)))


class Buffered(torch.nn.Module):
    """Has buffers of all kinds: running statistics, a count, flags, and one that is not kept."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3).to(torch.bfloat16)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(2, 2, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.flags[1], self.count = True, self.count + 0.5
        self.passing += 1
        return self.linear(self.norm(x).to(torch.bfloat16)).float().square().mean()


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_buffers_are_those_of_rank_0_and_go_into_checkpoints(node, directory, ranks):
    def batch(rank, step):
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * rank + step))

    first = make(Buffered)  # what rank 0 sees, in one process
    for step in range(2):
        first(batch(0, step))
    expected = dict(first.named_buffers())
    with opened(node) as rt:
        model = zt.shard(make(Buffered), rt, name="net")
        for step in range(2):
            model(batch(rt.rank, step)).backward()
            rt.step()
        assert same(dict(model.named_buffers()), expected)
        rt.save(f"{directory}/checkpoint")
        weights = zt.full_state_dict(model, root=None)
    with OTHER_RANKS[ranks](node) as group, opened(group, plan=1) as rt:
        model = zt.shard(make(Buffered, seed=2), rt, name="net")
        rt.load(f"{directory}/checkpoint")
        assert same(model.state_dict(), weights)
        assert not model.passing.any()


class Renewing(torch.nn.Module):
    """Makes a new buffer with every forward, in the memory of the one before the last, as an allocator may."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.memory = [np.zeros(1000, np.float32) for _ in range(2)]
        self.register_buffer("seen", torch.from_numpy(self.memory[0]))

    def forward(self, x):
        self.memory.reverse()
        np.add(self.memory[1], float(x.sum()), out=self.memory[0])
        self.seen = torch.from_numpy(self.memory[0])
        return self.linear(x).square().mean()


def test_buffers_that_are_made_anew_several_times_in_a_step_are_those_of_rank_0(node):
    with opened(node, micro_steps=2) as rt:
        model = zt.shard(make(Renewing), rt)
        for _ in range(3):
            for _ in range(2):
                model(torch.full((2, 5), rt.rank + 1.0)).backward()
            rt.step()
        assert torch.equal(model.seen, torch.full((1000,), 60.0))


def test_a_save_keeps_no_copy_of_the_buffers(node):
    with opened(node) as rt:
        zt.shard(make(Buffered), rt)
        values = snapshot.values_of(rt.context, rt.units)
        copies = [weakref.ref(value.mine) for value in values if value.kind == "buffer"]
        assert len(copies) == 4  # of as many dtypes
        assert not any(copy() is not None for copy in copies)


def test_parameters_are_read_and_written_in_a_gathered_block(group):
    with opened(group) as rt:
        model = zt.shard(make(GPT), rt)
        expected = make(GPT)
        with zt.gathered(model.blocks[1]):
            assert torch.equal(model.blocks[1].up.weight, expected.blocks[1].up.weight)
        with zt.gathered(model.blocks[1].up, write=True), torch.no_grad():
            model.blocks[1].up.weight.fill_(rt.rank + 0.5)
        with zt.gathered(model):
            assert bool((model.blocks[1].up.weight == 0.5).all())  # rank 0's
            assert torch.equal(model.blocks[1].down.weight, expected.blocks[1].down.weight)


def test_what_is_written_reaches_master_weights(node):
    with opened(node) as rt:
        model = zt.shard(make(GPT).to(torch.bfloat16), rt)
        with zt.gathered(model.head, write=True), torch.no_grad():
            model.head.weight.fill_(2.0)
        model(*text(4, 0)).backward()
        rt.step()
        with zt.gathered(model):
            moved = (model.head.weight.float() - 2.0).abs().max().item()
            assert 0 < moved < 10 * LR


@pytest.mark.parametrize("plan", [0, 3])
def test_a_model_of_the_meta_device_gets_its_values_unit_by_unit(group, plan):
    with torch.device("meta"):
        empty = GPT(tied=True)
    torch.manual_seed(rt_seed := 11 + group.rank)  # others' values do not count
    assert rt_seed
    with opened(group, plan) as rt:
        model = zt.shard(empty, rt)
        assert not any(p.is_meta for p in model.parameters())
        assert 3.0 < train_sharded(model, rt, 2)[0] < 60.0
        weights = zt.full_state_dict(model, root=None)
        assert weights["tokens.weight"].equal(weights["head.weight"])
        digest = np.array([sum(float(w.double().sum()) for w in weights.values())])
        assert np.ptp(rt.group.all_gather(digest).wait()) == 0


def test_a_meta_module_that_cannot_reset_itself_wants_init(node):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(4))

        def forward(self, x):
            return (self.scale * x).sum()

    with opened(node) as rt:
        with torch.device("meta"):
            first, second = Scale(), Scale()
        with pytest.raises(zr.errors.CallError, match=r"Expected Scale, which owns 'scale'.*init="):
            zt.shard(first, rt)
        model = zt.shard(second, rt, init=lambda module: torch.nn.init.ones_(module.scale))
        assert model(torch.ones(4)).item() == 4


def test_readers_have_parameters_and_buffers(group, directory):
    """In bfloat16 the floats, as they are the counts of batch norm; at a whole version and at a delta."""
    reader = zr.Reader(directory)
    with opened(group) as rt:
        model = zt.shard(make(CNN), rt)
        feed = rt.publish(directory)
        for _ in range(2):
            feed.push().wait()
            wanted = zt.full_state_dict(model, root=None)
            if rt.rank == 0:
                found = reader.update()
                assert set(found) == set(wanted)
                for name, tensor in wanted.items():
                    expected = tensor.bfloat16().view(torch.int16) if tensor.is_floating_point() else tensor
                    assert found[name].tobytes() == expected.numpy().tobytes(), name
            rt.group.barrier().wait()
            train_sharded(model, rt, 1, batches=images)
