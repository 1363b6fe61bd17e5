"""Who is slow: a rank at half speed is named within 20 steps; noise names nobody."""

import os
import socket
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import seams
from numpy.lib.stride_tricks import sliding_window_view

import zerort as zr
from zerort.engine.step.facts.pace import HISTORY, WINDOW, Pace, judge, may_be_slow
from zerort.engine.step.facts.record import Record
from zerort.testing import run_threads
from zerort.trace.ledger import Ledger

STEPS = int(os.environ.get("ZERORT_STEPS", "60000"))  # make straggler-noise: 1,000,000
NOISE = [
    (ranks, jitter, memory) for ranks in (2, 3, 4, 8) for jitter, memory in ((0.03, 0), (0.1, 0), (0.2, 0), (0.04, 0.9))
]


def own_times(rng, *, steps, ranks, jitter, memory=0.0):
    """Return seconds of every step and rank, on machines that differ by 5 % at most.

    Jitter that is lognormal, for itself or with a memory of some steps (a neighbour that comes and goes); one step in a
    hundred 1.5 to 20 times as long; phases in which all are slower; rank 0 saves every 50 steps.
    """
    times = rng.normal(0, jitter * np.sqrt(1 - memory**2), (steps, ranks))
    if memory:
        for step in range(1, steps):
            times[step] += memory * times[step - 1]
    times = np.exp(times + rng.uniform(-0.05, 0.05, ranks))
    times *= np.where(rng.random((steps, ranks)) < 0.01, rng.uniform(1.5, 20, (steps, ranks)), 1)
    times *= np.repeat(rng.uniform(0.5, 2, -(-steps // 500)), 500)[:steps, None]
    times[::50, 0] += 2
    return times


def leads(times):
    who, top = times.argmax(1), times.max(1)
    return who, np.log(top / ((times.sum(1) - top) / (times.shape[1] - 1)))


def verdicts(who, lead):
    """Return the steps after which the slowest rank is named."""
    windows = sliding_window_view(who, WINDOW), sliding_window_view(lead, WINDOW)
    steps = np.flatnonzero(may_be_slow(*windows)) + WINDOW - 1
    return [
        at for at in steps if judge(who[max(0, at + 1 - HISTORY) : at + 1], lead[max(0, at + 1 - HISTORY) : at + 1])
    ]


@pytest.mark.slow
def test_noise_names_nobody():
    rng = np.random.default_rng(7)
    for ranks, jitter, memory in NOISE:
        times = own_times(rng, steps=STEPS // len(NOISE), ranks=ranks, jitter=jitter, memory=memory)
        assert verdicts(*leads(times)) == [], (ranks, jitter, memory)


@pytest.mark.parametrize("jitter", [0.03, 0.1])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("begins", [0, 200])
def test_half_speed_is_named_within_20_steps(ranks, jitter, begins):
    for seed in range(20):
        times = own_times(np.random.default_rng(seed), steps=begins + 20, ranks=ranks, jitter=jitter)
        times[begins:, 1] *= 2
        who, lead = leads(times)
        named = verdicts(who, lead)
        assert named, seed
        assert named[0] >= begins
        assert {who[at] for at in named} == {1}


def test_a_single_spike_names_nobody():
    times = np.ones((100, 4))
    times[50, 2] = 1000.0
    assert verdicts(*leads(times)) == []


def test_own_times_are_kept_in_parts_without_waits():
    """Of 100 in a step: 20 of waiting, 30 of the update before, 5 of its waits, are not computing."""
    now, ledger = [0], Ledger()
    with seams.inside(Pace, time=SimpleNamespace(perf_counter_ns=lambda: now[0])):
        pace = Pace(ledger, rank=0, size=1)
        for _ in range(3):
            pace.add_time(Record())
            pace.begin()
            with pace.updating():
                now[0] += 30_000_000
                ledger.waited_ns += 5_000_000
            pace.end_step(samples=7)
            now[0] += 70_000_000
            ledger.waited_ns += 20_000_000
        assert list(pace.times) == [(pytest.approx(0.05), pytest.approx(0.025), 7)] * 2
        pace.restart()
        assert not pace.times
        now[0] += 40_000_000
        pace.add_time(Record())
        pace.end_step(samples=7)
        assert list(pace.times) == [(pytest.approx(0.04), 0.0, 7)]  # the clock has begun anew, after the update


@pytest.mark.slow
def test_a_slow_rank_is_named_in_the_report_the_trace_and_once_as_a_warning():
    """Rank 1's samples take longer, from the 20th step to the 40th."""

    def body(group):
        with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group) as rt:
            line = rt.register("line", {"w": np.zeros(3, np.float32)})
            reports = []
            for step in range(65):
                time.sleep(0.045 if group.rank == 1 and 20 <= step < 40 else 0.015)  # its computing
                line.reduce({"w": np.ones(3, np.float32)})
                reports.append(rt.step())
                if step == 39:
                    waits = rt.waits()
            return reports, waits

    zr.trace.reset()
    zr.trace.enable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (reports, waits), *others = run_threads(3, body)
    finally:
        zr.trace.disable()
    named = [step for step, report in enumerate(reports) if report.straggler]
    assert 20 <= named[0] < 40
    assert reports[39].straggler == f"rank 1 on {socket.gethostname()} (host)"
    assert named[-1] < 64  # it has recovered
    assert reports[0].slowest is None
    assert reports[39].slowest.rank == 1
    assert reports[39].slowest.seconds > 1.5 * reports[39].slowest.others_seconds
    assert all([one.straggler for one in other] == [one.straggler for one in reports] for other, _ in others)
    assert waits[1]["own"] > 1.5 * waits[0]["own"]
    assert waits[0]["step"] + waits[0].get("reduce", 0.0) > waits[1]["step"]
    told = [str(one.message) for one in caught if "ranks of about one speed" in str(one.message)]
    assert len(told) == 1
    assert f"rank 1 on {socket.gethostname()}" in told[0]
    assert any(span.name.startswith("slow: rank 1 on ") for span in zr.trace.spans())
