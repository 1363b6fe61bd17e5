"""Where parameters lie, how many bytes a rank holds, and that nothing is left behind."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from models import GPT, lora_gpt, text
from training import make, part, train_sharded

import zerort as zr
import zerort_torch as zt

pytestmark = pytest.mark.mpi


def numel(model, *, trainable=False):
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_are_the_runtimes_own_memory(node, plan, dtype):
    with zr.open(plan=zr.Plan.zero(plan), group=node) as rt:
        model = zt.shard(make(GPT).to(dtype), rt)
        found = {}
        for unit in rt.units.values():
            for section in unit.sections:
                for extent in section.layout.extents:
                    found[extent.name] = section.parameters.whole[extent.slice].ctypes.data
        with zt.gathered(model):
            assert {name: p.data_ptr() for name, p in model.named_parameters()} == found
            assert all(p.dtype is dtype and type(p) is torch.nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
def test_bytes_at_rest_are_those_of_the_plan(node, plan):
    with zr.open(plan=zr.Plan.zero(plan), group=node) as rt:
        plain = make(GPT)
        count = numel(plain)
        zt.shard(plain, rt)
        held = rt.memory()
        total = rt.group.all_reduce(np.array([held.parameter, held.gradient, held.state])).wait() / 4
        copies = [rt.size if whole else 1 for whole in (plan < 3, plan < 2, plan < 1)]
        slack = 1.02 * rt.size + 0.1  # padding of small tensors, once per copy
        assert all(
            n * copy * count <= got <= n * copy * count * slack
            for got, copy, n in zip(total, copies, (1, 1, 2), strict=True)
        )


def test_a_frozen_base_has_neither_gradient_nor_state(node):
    with zr.open(plan=zr.Plan.zero(3), group=node) as rt:
        plain = make(lora_gpt)
        few, all_of_them = numel(plain, trainable=True), numel(plain)
        zt.shard(plain, rt)
        held = rt.memory()
        gradient, state = rt.group.all_reduce(np.array([held.gradient, held.state])).wait() / 4
        assert few < 0.2 * all_of_them
        assert few <= gradient <= 1.5 * few
        assert 2 * few <= state <= 3 * few


@pytest.mark.parametrize("plan", [2, 3])
def test_gradients_have_memory_from_backward_to_the_step_only(group, plan):
    with zr.open(plan=zr.Plan.zero(plan), group=group) as rt:
        wide = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        model = zt.shard(make(lambda: wide), rt, units=torch.nn.Linear, broadcast=True)

        def backward():
            model(torch.ones(1, 512)).sum().backward()

        backward()
        rt.step()  # the first one makes what lasts
        shards = rt.memory().gradient
        tracemalloc.start()
        try:
            backward()
            rt.units.wait_for_reductions()
            during = tracemalloc.get_traced_memory()[0]  # NumPy's arrays are traced
            rt.step()
            after = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert shards >= 4 * 512 * 512 * 4 / rt.size
        assert during >= shards
        assert after < 0.1 * shards


def flat_nbytes():
    """Return the bytes of what may be a gathered unit."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() == 1 and t.nbytes > 30000)


def test_gathered_units_come_and_go_where_memory_is_not_shared(group):
    if group.one_memory:
        pytest.skip("a gather takes no memory where ranks share it")
    before = flat_nbytes()
    with zr.open(plan=zr.Plan.zero(3), group=group) as rt:
        model = zt.shard(make(GPT), rt)
        whole = sum(unit.nbytes for unit in rt.units.values())
        train_sharded(model, rt, 2)
        assert 0 < rt.memory().gathered_peak < 0.8 * whole
        loss = model(*text(4, 0))
        assert flat_nbytes() == before  # the graph keeps names, not weights
        loss.backward()
        assert flat_nbytes() - before < 0.8 * whole
        rt.step()
        assert flat_nbytes() == before


def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_nothing_leaks_from_step_to_step(group):
    """A leak grows in every window of steps; the allocators of torch and libc grow in some of them."""
    with zr.open(plan=zr.Plan.zero(3), group=group) as rt:
        model = zt.shard(make(lambda: GPT(layers=2)), rt)

        def steps(count):
            for step in range(count):
                model(*part(text(rt.size, step), rt.rank, rt.size)).backward()
                rt.step()
            gc.collect()
            return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()), rss()

        count = 50 if group.one_memory else 10
        windows = [steps(count) for _ in range(6)]
        tensors, resident = zip(*windows[1:], strict=True)
        assert len(set(tensors)) == 1
        assert min(np.diff(resident)) < count * 8 * 2**10


def test_a_closed_runtime_lets_the_model_go(node):
    with zr.open(plan=zr.Plan.zero(3), group=node) as rt:
        model = zt.shard(make(GPT), rt)
    with pytest.raises(zr.errors.ClosedError, match="Expected an open runtime"):
        model(*text(2, 0))
