"""The whole model stays on each host between gathers: backward finds what forward has gathered."""

import pytest
import torch
from models import GPT
from training import LR, make, train_sharded

import zerort as zr
import zerort_torch as zt

pytestmark = pytest.mark.mpi


def half():
    return GPT(layers=2, tied=True).to(torch.bfloat16)


SECONDARY = zr.Plan.zero(3, secondary="host")


def trained(group, **options):
    """Return losses, final weights, and the bytes that a step has gathered."""
    plan = options.pop("plan", zr.Plan.zero(3))
    with zr.open(plan, zr.AdamW(lr=LR), group=group, virtual_shards=4, **options) as rt:
        model = zt.shard(make(half), rt)
        losses = train_sharded(model, rt, 2).tolist()
        report = train_report(model, rt)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 0.5 for name, value in weights.items()})
        losses += train_sharded(model, rt, 1, first=2).tolist()
        return losses, report, weights


def train_report(model, rt):
    """Take one more step and return its report."""
    reports = []
    step = rt.step
    rt.step = lambda *args, **options: reports.append(step(*args, **options))
    try:
        train_sharded(model, rt, 1, first=9)
    finally:
        del rt.step
    return reports[0]


def test_gathers_find_what_was_gathered_since_the_last_step(group):
    """A second copy, and deltas into one: the bits of plain ZeRO-3, after weights were loaded, too."""
    losses, plain, weights = trained(group)
    for options in ({"plan": SECONDARY}, {"wire": zr.Wire(gather="delta", over="all")}):
        found, report, got = trained(group, **options)
        assert found == losses
        assert report.digest == plain.digest
        for name, value in weights.items():
            assert torch.equal(got[name], value), name
        if group.size > 1 and not group.one_memory:  # once instead of in forward and in backward
            assert 2 * report.bytes_moved["all_gather"] <= 1.01 * plain.bytes_moved["all_gather"]


def test_differences_in_int4_have_the_bits_of_one_rank(group):
    """What is gathered is made of codes, once per update, and the same on any number of ranks."""
    losses, plain, _ = trained(group)
    wire = zr.Wire(gather="int4", feedback=True, over="all")
    found, report, weights = trained(group, wire=wire)
    assert report.wire == "gather int4, feedback"
    assert found != losses
    assert found == pytest.approx(losses, rel=0.05)
    with zr.open_group(kind="solo") as solo:
        alone, one, got = trained(solo, wire=wire)
    assert (alone, one.digest) == (found, report.digest)
    for name, value in weights.items():
        assert torch.equal(got[name], value), name
    if group.size > 1 and not group.one_memory:  # a quarter of bfloat16, and once instead of in forward and in backward
        assert 7 * report.bytes_moved["all_gather"] <= plain.bytes_moved["all_gather"]
