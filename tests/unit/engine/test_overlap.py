"""Disks work while the caller computes and ranks reduce: shown by the order of events in a trace, on slow disks."""

from __future__ import annotations

import time

import numpy as np
import pytest

import zerort as zr
from zerort import trace
from zerort.storage.files.faults import injected
from zerort.testing.threads import run_threads

NVME = zr.Tier.NVME
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2)
NUMEL, UNITS = 5000, 3


@pytest.fixture(autouse=True)
def _tracing():
    trace.reset()
    trace.enable()
    yield
    trace.disable()
    trace.reset()


def opened(group, scratch, plan):
    rt = zr.open(
        plan=plan,
        group=group,
        optimizer=zr.AdamW(lr=0.1),
        prefetch=1,
        scratch=scratch,
        create_scratch=True,
        offload=SMALL,
    )
    for at in range(UNITS):
        rt.register(f"unit{at}", {"w": np.full(NUMEL, at, np.float32)})
    return rt


def forward(rt):
    for unit in rt.units.values():
        with unit.gathered():
            pass


def backward(rt):
    for unit in reversed(rt.units.values()):
        with unit.gathered():
            pass
        unit.reduce({"w": np.ones(NUMEL, np.float32)})


def train(rt):
    forward(rt)
    backward(rt)
    rt.step()


def compute_until(done):
    """Be busy with something else until ``done``."""
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until, "nothing happened while the caller computed"
        time.sleep(0.001)


def spans_of(name):
    return [span for span in trace.spans() if span.name == name]


def test_state_streams_in_while_gradients_are_still_being_reduced(tmp_path):
    def body(group):
        with opened(group, tmp_path, zr.Plan.zero(3, state=NVME)) as rt:
            train(rt)
            rt.context.update_stream.wait_written()
            trace.reset()
            *others, last = reversed(rt.units.values())
            with injected("delay@1:op=read:seconds=0.05:times=all"):
                for unit in others:
                    unit.reduce({"w": np.ones(NUMEL, np.float32)})
                compute_until(lambda: spans_of("read unit0 float32/exp_avg/0"))
                last.reduce({"w": np.ones(NUMEL, np.float32)})
                rt.step()
            (read,) = spans_of("read unit0 float32/exp_avg/0")  # once: the update goes on with what was read ahead
            (reduced,) = spans_of("reduce unit0")
            (updated,) = spans_of("update")
            assert read.end_ns < reduced.begin_ns < updated.begin_ns
            assert read.track != reduced.track

    run_threads(1, body)


def test_an_update_of_other_sections_than_foreseen_is_as_right(tmp_path):
    def body(group, plan):
        with opened(group, tmp_path, plan) as rt:
            train(rt)
            for names in (("unit2",), ("unit0", "unit1", "unit2"), ("unit1",)):
                for unit in rt.units.values():
                    unit.reduce({"w": np.ones(NUMEL, np.float32)} if unit.name in names else {})
                rt.step()
            rt.units["unit0"].reduce({"w": np.ones(NUMEL, np.float32)})
            rt.discard_gradients()
            for unit in rt.units.values():
                unit.reduce({"w": np.ones(NUMEL, np.float32)})
            rt.units["unit0"].assign({"w": np.full(NUMEL, 7, np.float32)})
            rt.step()
            found = []
            for unit in rt.units.values():
                with unit.gathered() as p:
                    found.append(np.array(p["w"]))
            return found

    plans = (zr.Plan.zero(3), zr.Plan.zero(3, state=NVME), zr.Plan.zero(3, parameter=NVME, state=NVME))
    expected, *others = (run_threads(1, lambda group, plan=plan: body(group, plan))[0] for plan in plans)
    for found in others:
        np.testing.assert_array_equal(found, expected)


def test_the_next_units_parameters_are_read_while_this_one_computes(tmp_path):
    def body(group):
        with opened(group, tmp_path, zr.Plan.zero(3, parameter=NVME)) as rt:
            train(rt)
            units = list(rt.units.values())
            order = [*units, *units[::-1]]
            rt.context.update_stream.wait_written()
            trace.reset()
            for unit, follower in zip(order, [*order[1:], None], strict=True):
                with unit.gathered():
                    if follower not in (None, unit):
                        compute_until(lambda one=follower: one.form.fetched is not None and one.form.fetched.done())
            # Forward: 0 1 2, backward: 2 1 0; units 1 and 2 stay where that turns.
            for name, before in (("unit1", "unit0"), ("unit2", "unit1")):
                read, computed = spans_of(f"read {name} float32/parameter/0")[0], spans_of(f"compute {before}")[0]
                assert computed.begin_ns < read.end_ns < computed.end_ns
                assert read.track != computed.track
            assert [len(spans_of(f"read unit{at} float32/parameter/0")) for at in range(UNITS)] == [2, 1, 1]
            read, computed = spans_of("read unit0 float32/parameter/0")[-1], spans_of("compute unit1")[-1]
            assert computed.begin_ns < read.end_ns < computed.end_ns

    run_threads(1, body)


@pytest.mark.slow
def test_write_back_overlaps_the_next_forward_and_a_gather_waits_for_its_own_only(tmp_path):
    # The last chunk of the last unit: those before need its slot no more.
    slow = "unit2%20float32%2Fparameter%2F2"

    def body(group):
        with opened(group, tmp_path, zr.Plan.zero(3, parameter=NVME, state=NVME)) as rt:
            train(rt)
            backward(rt)
            rt.context.update_stream.wait_written()
            trace.reset()
            with injected(f"delay@1:op=write:seconds=1:file={slow}"):
                rt.step()
                with rt.units["unit0"].gathered() as p:
                    assert (p["w"] != 0).all()
                with rt.units["unit2"].gathered() as p:
                    new = np.array(p["w"])
            (written,) = spans_of("write unit2 float32/parameter/2")
            (first,), (second,) = spans_of("compute unit0"), spans_of("compute unit2")
            (updated,) = spans_of("update")
            assert updated.end_ns < first.begin_ns < written.end_ns < second.begin_ns
            return new

    def in_memory(group):
        with opened(group, tmp_path, zr.Plan.zero(3)) as rt:
            for _ in range(2):
                train(rt)
            with rt.units["unit2"].gathered() as p:
                return np.array(p["w"])

    np.testing.assert_array_equal(run_threads(1, body), run_threads(1, in_memory))


def test_what_fails_after_a_step_is_told_before_anything_builds_on_it(tmp_path):
    """A write-back that fails while the next forward computes: no gather, step or save goes on; a load does."""

    def body(group):
        with opened(group, tmp_path / "scratch", zr.Plan.zero(3, parameter=NVME, state=NVME)) as rt:
            train(rt)
            rt.save(tmp_path / "checkpoint")
            backward(rt)
            rt.context.update_stream.wait_written()
            full = "unit2%20float32%2Fparameter%2F1"
            with injected(f"delay@1:op=write:seconds=0.2:file={full},enospc@1:op=write:file={full}"):
                rt.step()
                rt.context.update_stream.wait_written()
            for verb in (lambda: forward(rt), lambda: rt.save(tmp_path / "checkpoint"), lambda: forward(rt)):
                with pytest.raises(zr.errors.StorageError, match=r"unit2.*parameter%2F1.* got .*No space left"):
                    verb()
            rt.units["unit0"].reduce({"w": np.ones(NUMEL, np.float32)})
            with pytest.raises(zr.errors.StorageError, match="No space left"):
                rt.step()
            rt.load(tmp_path / "checkpoint")
            assert rt.updates == 1
            train(rt)

    run_threads(1, body)


def test_what_stays_is_what_was_assigned(tmp_path):
    """A tied unit's gather holds its owner's values: after an assignment they do not stay."""

    def body(group):
        plan = zr.Plan.zero(3, parameter=NVME)
        with zr.open(plan, zr.SGD(lr=1.0), group=group, prefetch=1, scratch=tmp_path, offload=SMALL) as rt:
            owner, between = (rt.register(name, {"w": np.zeros(NUMEL, np.float32)}) for name in ("owner", "between"))
            head = rt.register("head", {"b": np.zeros(3, np.float32)}, ties={"w": (owner, "w")})
            for step in range(3):
                for unit in (owner, between, head):
                    with unit.gathered():
                        if (step, unit) == (2, head):
                            owner.assign({"w": np.full(NUMEL, 7, np.float32)})
                for unit in (head, between, owner):
                    with unit.gathered() as p:
                        if step == 2 and unit is not between:
                            assert (p["w"] == 7).all()
                for unit in (owner, between, head):
                    unit.reduce({})
                rt.step()

    run_threads(1, body)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_tied_unit_stays_with_what_it_is_tied_to(tmp_path, prefetch):
    def body(group):
        plan = zr.Plan.zero(3, parameter=NVME)
        with zr.open(plan, zr.SGD(lr=1.0), group=group, prefetch=prefetch, scratch=tmp_path, offload=SMALL) as rt:
            units = [rt.register(name, {"w": np.zeros(NUMEL, np.float32)}) for name in ("owner", "b0", "b1")]
            units.append(rt.register("head", {"b": np.zeros(3, np.float32)}, ties={"w": (units[0], "w")}))
            for _ in range(3):
                trace.reset()
                for unit in (*units, *reversed(units)):
                    with unit.gathered():
                        pass
                for unit in units:
                    unit.reduce({})
                rt.step()
            return [len(spans_of(f"read {name} float32/parameter/0")) for name in ("owner", "b0", "b1", "head")]

    (reads,) = run_threads(1, body)
    assert reads[3] == 1  # what the turn needs first is dropped last
    assert reads[0] <= 3
    assert max(reads[1:3]) <= 2
