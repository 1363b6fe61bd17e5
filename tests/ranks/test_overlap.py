"""Communication happens while the caller computes, and never more is gathered than the prefetch says."""

import dataclasses
import functools
import time

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

import zerort as zr
from zerort import trace
from zerort.comm import open_group
from zerort.testing.tolerance import rounding

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

UNITS, NUMEL = 5, 5000


@pytest.fixture(params=["node", "over_mpi", "hosts"])
def group(request, options):
    queued = dataclasses.replace(options, eager_nbytes=0)
    opened = {
        "node": lambda: open_group(kind="node", options=queued),
        "over_mpi": lambda: open_group(kind="mpi", options=queued),
        "hosts": lambda: open_hosts(queued),
    }
    with opened[request.param]() as group:
        yield group


def register(rt):
    return [rt.register(f"unit{at}", {"w": np.full(NUMEL, at, np.float32)}) for at in range(UNITS)]


def compute_until(done):
    """Stay in a block, busy with something else, until ``done``; nothing here helps the communication along."""
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until, "nothing happened while the caller computed"
        time.sleep(0.001)


def spans_of(name):
    return [span for span in trace.spans() if span.name == name]


def test_a_reduction_runs_while_the_next_unit_computes(group):
    """The last rank is late with every reduction until the others say that they compute."""
    last = group.size - 1
    with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)
        order = units[::-1]
        for unit in order:  # so that it is known which comes next
            with unit.gathered():
                pass
            unit.reduce({"w": np.ones(NUMEL, np.float32)})
        rt.step()
        trace.reset()
        trace.enable()
        late = 0 < last == group.rank
        before = None
        for unit in order:
            if late and before is not None:
                for other in range(last):
                    WORLD.recv(source=other, tag=7)
                before.reduce({"w": np.ones(NUMEL, np.float32)})
            with unit.gathered():
                if before is not None and not late:
                    if last:
                        WORLD.send(unit.name, last, tag=7)
                    compute_until(before.sections[0].bucket.reduction.done)
            if not late:
                unit.reduce({"w": np.ones(NUMEL, np.float32)})
            before = unit
        if late:
            before.reduce({"w": np.ones(NUMEL, np.float32)})
        rt.step()
        try:
            for at in range(1, UNITS):
                (reduced,) = spans_of(f"reduce_scatter unit{at} float32")
                (computed,) = spans_of(f"compute unit{at - 1}")
                if last and not late:
                    assert computed.begin_ns < reduced.end_ns < computed.end_ns
                assert reduced.track != computed.track
        finally:
            trace.disable()
            trace.reset()


def test_the_next_unit_is_gathered_while_this_one_computes(group):
    with zr.open(plan=zr.Plan.zero(3), group=group, prefetch=1, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)

        def is_here(unit):
            return unit.form.fetched is not None and unit.form.fetched.done()

        for step in range(3):
            if step == 2:
                trace.reset()
                trace.enable()
            for at, unit in enumerate(units):
                with unit.gathered() as p:
                    np.testing.assert_array_equal(p["w"], np.full(NUMEL, at - step, np.float32))
                    if step and at + 1 < UNITS:
                        compute_until(functools.partial(is_here, units[at + 1]))
            for unit in units:
                unit.reduce({"w": np.ones(NUMEL, np.float32)})
            rt.step()
        try:
            for at in range(2, UNITS):
                gathers = spans_of(f"all_gather unit{at} float32")
                if group.one_memory:
                    assert not gathers  # a gather moves nothing, and needs no meeting
                    continue
                (gathered,) = gathers
                (computed,) = spans_of(f"compute unit{at - 1}")
                (earlier,) = spans_of(f"compute unit{at - 2}")
                assert earlier.end_ns < gathered.begin_ns  # not before there was a slot
                assert gathered.end_ns < computed.end_ns
                assert gathered.track != computed.track
        finally:
            trace.disable()
            trace.reset()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_no_more_is_gathered_than_the_prefetch_says(group, prefetch):
    with zr.open(plan=zr.Plan.zero(3), group=group, prefetch=prefetch, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)
        for step in range(3):
            order = units if step < 2 else [units[at] for at in (3, 0, 4, 4, 1)]  # not as foreseen
            for unit in (*order, *reversed(order)):
                with unit.gathered() as p:
                    assert p["w"][0] == float(unit.name[4:]) - step
            for unit in units:
                unit.reduce({"w": np.ones(NUMEL, np.float32)})
            rt.step()
        one = units[0].form.slot_nbytes
        memory = rt.memory()
        if group.one_memory:
            assert memory.gathered == memory.gathered_peak == 0
        else:
            assert memory.gathered == (prefetch + 1) * one
            assert memory.gathered_peak == min(prefetch + 1, UNITS) * one


def train(rt, units, *, done):
    """Go forward and backward through all units, which have lost 1 in each of the steps that are done."""
    for unit in (*units, *reversed(units)):
        with unit.gathered() as p:
            np.testing.assert_array_equal(p["w"], np.full(NUMEL, float(unit.name[4:]) - done, np.float32))
    for unit in reversed(units):
        unit.reduce({"w": np.ones(NUMEL, np.float32)})
    return rt.step().bytes_moved.get("all_gather", 0)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_what_comes_again_at_once_stays(group, prefetch):
    """The last units of forward are the first of backward: as many as there is room for are gathered once."""
    with zr.open(plan=zr.Plan.zero(3), group=group, prefetch=prefetch, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)
        moved = [train(rt, units, done=step) for step in range(3)]
        if group.one_memory or group.size == 1:
            assert not any(moved)
            return
        once = moved[0] // (2 * UNITS)
        assert moved[0] == 2 * UNITS * once > 0  # in the first step nobody knows what comes
        assert moved[1:] == [(2 * UNITS - min(prefetch + 1, UNITS)) * once] * 2


def test_after_a_step_that_was_given_up_units_are_gathered_as_before(group):
    with zr.open(plan=zr.Plan.zero(3), group=group, prefetch=1, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)
        moved = [train(rt, units, done=0), train(rt, units, done=1)]
        for unit in units[:3]:
            with unit.gathered():
                pass
        rt.discard_gradients()
        moved.append(train(rt, units, done=2))
        once = moved[0] // (2 * UNITS)
        assert moved[2] == moved[1] + 4 * once  # of three units, and of the one that would have come next


def test_too_many_units_at_once_say_the_cure(group):
    if group.one_memory:
        pytest.skip("ranks that share memory gather without slots")
    with zr.open(plan=zr.Plan.zero(3), group=group, prefetch=0) as rt:
        units = register(rt)
        with units[0].gathered(), pytest.raises(zr.errors.UnitStateError, match="a larger prefetch"):
            units[1].gather()


@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_take_turns(group, stage):
    with zr.open(plan=zr.Plan.zero(stage), group=group, buckets=2, optimizer=zr.SGD(lr=1.0)) as rt:
        units = register(rt)
        for _ in range(3):
            for unit in units:
                unit.reduce({"w": np.full(NUMEL, rt.rank, np.float32)})
            rt.step()
        assert rt.memory().buckets == 2 * units[0].sections[0].layout.nbytes
        mean = np.float32((rt.size - 1) / 2)
        for at, unit in enumerate(units):
            with unit.gathered() as p:
                np.testing.assert_allclose(p["w"], at - 3 * mean, rtol=0, atol=3 * rounding("float32", 4) * (mean + 1))
