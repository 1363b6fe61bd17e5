"""`torch.compile` of sharded models: the same losses, breaks at our hooks alone, one graph for all blocks.

A covering part of the cases; all of them, inductor's among them, with ``make test-zoo``.
"""

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import GPT, text
from mpi4py import MPI
from training import LR, assert_same, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt

STEPS = 4

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="compilers take their time: at 2 ranks"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of torch's own code, where inductor comes in
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),  # Dynamo looks there
]


def whole_before(model, rt, backend):
    return zt.shard(torch.compile(model, backend=backend), rt)


def whole_after(model, rt, backend):
    return torch.compile(zt.shard(model, rt), backend=backend)


def module_compile(model, rt, backend):
    model = zt.shard(model, rt)
    model.compile(backend=backend)
    return model


def blocks_before(model, rt, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return zt.shard(model, rt)


def blocks_after(model, rt, backend):
    for block in zt.shard(model, rt).blocks:
        block.compile(backend=backend)
    return model


WAYS = [whole_before, whole_after, module_compile, blocks_before, blocks_after]


PLANS = {
    "ZeRO-1": zr.Plan.zero(1),
    "ZeRO-2": zr.Plan.zero(2),
    "ZeRO-3": zr.Plan.zero(3),
    "NVMe": zr.Plan.zero(3, parameter=zr.Tier.NVME),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is compiled, by what, and where parameters are."""

    way: Callable[..., torch.nn.Module]
    plan: str = "ZeRO-3"
    backend: str = "aot_eager"

    def __str__(self) -> str:
        return f"{self.way.__name__}-{self.plan}-{self.backend}"


COVERING = [
    *(Case(way) for way in WAYS),
    Case(whole_after, "ZeRO-1"),
    Case(whole_after, "NVMe"),
    Case(blocks_before, "NVMe"),
    Case(whole_before, backend="eager"),
]
OVER_MPI = [Case(whole_after), Case(blocks_after), Case(whole_after, "NVMe"), Case(blocks_before, "NVMe")]
EVERY = [Case(way, plan, backend) for way in WAYS for plan in PLANS for backend in ("eager", "aot_eager", "inductor")]
WHOLE = bool(os.environ.get("ZERORT_ZOO"))
CASES = EVERY if WHOLE else COVERING


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self, backend):
        self.backend = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self.backend(graph, inputs)


@pytest.fixture(autouse=True)
def fresh():
    """Nothing that an earlier test compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def expected():
    """The losses of plain torch."""
    return train_plain(make_wide(GPT), STEPS)


@pytest.fixture
def scratch(tmp_path):
    """A directory that all ranks have."""
    return MPI.COMM_WORLD.bcast(str(tmp_path))


def losses_of(case, group, backend, scratch):
    with zr.open(plan=PLANS[case.plan], optimizer=zr.AdamW(lr=LR), group=group, scratch=scratch) as rt:
        model = case.way(make_wide(GPT), rt, backend)
        losses = [*train_sharded(model, rt, 2)]
        torch.compiler.set_stance("fail_on_recompile")  # by the third step, everything is compiled
        return np.array([*losses, *train_sharded(model, rt, STEPS - 2, first=2)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_models_train_as_plain_ones(case, group, expected, scratch):
    if not (WHOLE or group.one_memory or case in OVER_MPI):
        pytest.skip("with shared memory; make test-zoo: without, too")
    backend = Counting(case.backend)
    assert_same(losses_of(case, group, backend, scratch), expected)
    breaks = [why for why in torch._dynamo.utils.counters["graph_break"] if "zerort gathers or releases" not in why]
    assert not breaks
    assert len(make_wide(GPT).blocks) > 1
    of_blocks = case.way in (blocks_before, blocks_after)
    # One graph for all blocks; of the rest, what is before, between and after them.
    assert 1 <= backend.graphs <= (1 if of_blocks else 6), backend.graphs


def test_names_are_those_of_a_model_that_was_not_compiled(group, scratch):
    plain = make_wide(GPT)
    names = list(plain.state_dict())
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = blocks_before(make_wide(GPT), rt, "eager")
        whole = torch.compile(model, backend="eager")
        weights = model.state_dict()
        assert list(weights) == names
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value)
        assert list(zt.full_state_dict(model, root=None)) == names
        changed = {name: value + 1 for name, value in weights.items()}
        model.load_state_dict(changed)
        assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
        wrapped = {re.sub(r"^(blocks\.\d+)\.", r"\1._orig_mod.", name): value for name, value in weights.items()}
        assert wrapped.keys() != weights.keys()
        model.load_state_dict(wrapped)  # as torch itself would have named them
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        del whole
        train_sharded(model, rt, 1)
        rt.save(f"{scratch}/saved")
        after = copy.deepcopy(zt.full_state_dict(model, root=None))
    with zr.open(plan=zr.Plan.zero(1), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(torch.compile(make_wide(GPT), backend="eager"), rt)
        rt.load(f"{scratch}/saved")
        assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_a_compiled_model_evaluates(group):
    """Without gradients, and with others that follow: modes have graphs of their own, the second time none."""
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        counting = Counting("aot_eager")
        model = whole_after(make_wide(GPT), rt, counting)
        plain = make_wide(GPT)
        graphs = []
        for step in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(*text(2, step)), plain(*text(2, step)), rtol=1e-12, atol=0)
            graphs.append(counting.graphs)
        assert graphs[0] == graphs[1]
