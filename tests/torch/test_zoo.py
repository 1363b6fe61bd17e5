"""Every model and module of the zoo trains sharded as it does plain, or is refused with the cure.

A covering part: each case at two ranks, in one of the places that take turns. All cases in all places, at 2 and 3
ranks, and a first step in float32: ``make test-zoo``.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from mpi4py import MPI
from zoo import CASES, DOCS, written

import zerort as zr
import zerort_torch as zt
from zerort.comm import open_group
from zerort.errors import ZerortError
from zerort.testing.tolerance import OVER_STEPS, rounding

WORLD = MPI.COMM_WORLD
WHOLE = bool(os.environ.get("ZERORT_ZOO"))
ROWS, STEPS, LR = 6, 5, 1e-3

pytestmark = [
    pytest.mark.skipif(WORLD.size not in ((2, 3) if WHOLE else (2,)), reason="at 2 ranks; make test-zoo: at 3, too"),
    pytest.mark.filterwarnings("ignore"),  # of models, not of ours: what we refuse is an error
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters are, and how ranks reach each other."""

    group: str
    plan: zr.Plan

    def __str__(self) -> str:
        stage = 1 if self.plan == zr.Plan.zero(1) else 3
        return f"{self.group}-ZeRO-{stage}{'-NVMe' * (self.plan.parameter.tier is zr.Tier.NVME)}"


PLACES = [
    Place(group, plan)
    for group in ("node", "mpi")
    for plan in (zr.Plan.zero(3), zr.Plan.zero(3, parameter=zr.Tier.NVME, state=zr.Tier.NVME), zr.Plan.zero(1))
]
RUNS = [
    (case, place) for index, case in enumerate(CASES) for place in (PLACES if WHOLE else [PLACES[index % len(PLACES)]])
]


@pytest.fixture(scope="module")
def groups(options):
    """Ranks that share memory, and ranks that do not."""
    with open_group(kind="node", options=options) as node, open_group(kind="mpi", options=options) as mpi:
        yield {"node": node, "mpi": mpi}


@pytest.fixture
def scratch(tmp_path):
    """A directory that all ranks have."""
    return WORLD.bcast(str(tmp_path))


def build(case, dtype):
    torch.manual_seed(3)
    model = case.build()
    return model.to(dtype) if not case.refused else model


def batch(case, step, part, parts, dtype):
    """Return the arguments of one part of a step's batch."""
    whole = case.batch(ROWS, torch.Generator().manual_seed(step))
    size = ROWS // parts
    found = {}
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            value = value[part * size : (part + 1) * size]
            value = value.to(dtype) if value.is_floating_point() else value
        found[name] = value
    return found


def loss_of(model, arguments):
    found = model(**arguments)
    return found if isinstance(found, torch.Tensor) else found.loss


def put(model, buffers):
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)


def train_plain(model, case, steps, parts, dtype):
    """Return the losses of one process that computes all ranks' parts.

    Each part begins with the same buffers, and the first one's are kept, as rank 0's are.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        start = kept = [buffer.clone() for buffer in model.buffers()]
        for part in range(parts):
            put(model, start)
            loss = loss_of(model, batch(case, step, part, parts, dtype))
            loss.backward()  # as a rank does: what models compute in float32 must not see another scale
            total += loss.item() / parts
            if part == 0:
                kept = [buffer.clone() for buffer in model.buffers()]
        put(model, kept)
        for one in trained:
            if one.grad is not None:
                one.grad /= parts
        optimizer.step()
        losses.append(total)
    return np.array(losses)


def train_sharded(model, rt, case, steps, dtype):
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(case, step, rt.rank, rt.size, dtype))
        loss.backward()
        rt.step()
        losses.append(rt.group.all_reduce(np.array([loss.item()])).wait()[0] / rt.size)
    return np.array(losses)


def generated(model):
    model.eval()
    prompt = torch.arange(5, 11)[None]
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


def compare(name, found, expected, tolerance, *, scale=0.0):
    """Compare arrays, relative to the largest expected value, or to ``scale`` if that is more."""
    apart = np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), scale)
    assert apart <= tolerance, f"{name}: {apart:.2e}, {found} against {expected}"


@pytest.mark.parametrize(("case", "place"), RUNS, ids=[f"{case}-{place}" for case, place in RUNS])
def test_the_zoo(case, place, groups, scratch):
    if case.missing:
        pytest.skip(f"{case.missing} is not installed")
    settings = {"plan": place.plan, "optimizer": zr.AdamW(lr=LR, weight_decay=0.01), "group": groups[place.group]}
    with zr.open(scratch=scratch, **settings) as rt:
        if case.refused:
            with pytest.raises(ZerortError, match=case.refused):
                train_sharded(zt.shard(build(case, None), rt), rt, case, 1, torch.float32)
            return
        plain = build(case, torch.float64).train()
        model = zt.shard(build(case, torch.float64).train(), rt)
        expected = train_plain(plain, case, STEPS, rt.size, torch.float64)
        compare("losses", train_sharded(model, rt, case, STEPS, torch.float64), expected, OVER_STEPS)
        weights = zt.full_state_dict(model, root=None)
        assert weights.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            if value.numel():
                # scale: AdamW makes steps of up to 1e-11 of gradients that are nothing but rounding
                compare(name, weights[name].double().numpy(), value.double().numpy(), OVER_STEPS, scale=1.0)
        if case.generates:
            assert torch.equal(generated(model), generated(plain))
    if WHOLE:
        with zr.open(scratch=scratch, **settings) as rt:
            expected = train_plain(build(case, torch.float32), case, 1, rt.size, torch.float32)
            model = zt.shard(build(case, torch.float32), rt)
            compare("first loss", train_sharded(model, rt, case, 1, torch.float32), expected, rounding("float32", 3000))


def test_the_table_in_the_docs_is_that_of_the_zoo():
    assert DOCS.read_text() == written(), "write it anew: python tests/torch/zoo.py"


def test_the_zoo_is_as_large_as_it_says():
    architectures = [case for case in CASES if case.needs == "transformers"]
    assert len(architectures) >= 20
    assert len({case.kind for case in architectures}) >= 8
    assert sum(case.kind == "module" for case in CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
