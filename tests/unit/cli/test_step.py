"""What ``zerort bench step`` makes of its samples, and the timing of a row of steps on one rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import pytest

from zerort import engine, trace
from zerort.cli.bench import harness
from zerort.cli.bench.step.contenders import PARTS, FloorSteps, PlanSteps, Sample, TimedModel, time_block
from zerort.cli.bench.step.rows import FLOOR, make_rows, parts_table, steps_table
from zerort.cli.main import main
from zerort.comm import open_group
from zerort.config import Plan
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk


def sample(step: float, compute: float, **parts: float) -> Sample:
    return Sample(step, compute, cpu=compute, runtime_cpu=0.1, parts={**dict.fromkeys(PARTS, 0.0), **parts})


def test_exposed_is_what_the_longest_computing_rank_did_beside() -> None:
    ranks = [sample(1.0, 0.6, update=0.1), sample(1.0, 0.9, update=0.04)]  # the first waited for the second
    floor = [sample(0.8, 0.8), sample(0.8, 0.7)]
    plans = {"zero0": ranks, "zero3": [sample(1.2, 0.9), sample(1.2, 0.8)], FLOOR: floor}
    rows = {row.plan: row for row in make_rows([plans], at_rest={"zero0": 8}, moved={}, losses={"zero0": 2.0})}
    zero0 = rows["zero0"]
    assert zero0.step_ms == pytest.approx(1000)
    assert zero0.exposed_ms == pytest.approx(100)
    assert zero0.exposed == pytest.approx(0.1)
    assert zero0.exposed_worst_ms == pytest.approx(400)
    assert zero0.parts_ms["update"] == pytest.approx(40)
    assert sum(zero0.parts_ms.values()) == pytest.approx(100)
    assert (zero0.at_rest_nbytes, zero0.loss, rows[FLOOR].loss) == (8, 2.0, None)
    assert rows["zero3"].ratio == pytest.approx(1.2)
    assert rows["zero3"].floor_ratio == pytest.approx(1.5)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was twice as slow in the second round; the plans' ratio was not touched by that."""
    rounds = [{"zero0": [sample(t, t)], "zero3": [sample(1.1 * t, t)], FLOOR: [sample(t, t)]} for t in (1.0, 2.0, 1.0)]
    rows = make_rows(rounds, at_rest={}, moved={}, losses={})
    assert rows[1].ratio == pytest.approx(1.1)
    assert rows[1].min_ms == pytest.approx(1100)
    assert rows[1].rounds_ms == pytest.approx((1100, 2200, 1100))


def test_without_zero0_there_is_no_ratio_to_it() -> None:
    rows = make_rows([{"zero3": [sample(1, 1)], FLOOR: [sample(1, 1)]}], at_rest={}, moved={}, losses={})
    assert [row.ratio for row in rows] == [None, None]
    assert steps_table("t", rows).row_count == parts_table(rows).row_count == 2


@pytest.fixture
def tracing() -> Iterator[None]:
    trace.enable()
    yield
    trace.disable()
    trace.reset()


@pytest.mark.usefixtures("tracing")
def test_a_block_of_steps_is_timed_and_taken_apart() -> None:
    model, text = TimedModel(width=16, layers=1, context=8, heads=4), ByteText(rows=4, context=8, limit=10_000)
    with open_group(kind="solo") as group, engine.open(plan=Plan.zero(3), group=group) as rt:
        steps = PlanSteps(Walk(rt, model, text))
        first = time_block(steps, model, steps=2, meet=lambda: None, name="zero3")
        second = time_block(steps, model, steps=1, meet=lambda: None, name="zero3")
        assert rt.updates == 3
        assert steps.at_rest_nbytes == rt.memory().at_rest
        assert np.isfinite(steps.loss)
    for found in (first, second):
        assert found.parts.keys() == PARTS.keys()
        assert all(found.parts[part] > 0 for part in ("pack", "fire", "norm", "update"))
        assert 0 < found.compute < found.step
        assert sum(found.parts.values()) < found.exposed
        assert 0 < found.runtime_cpu < found.cpu


def test_the_floor_computes_what_the_walk_does_and_keeps_its_parameters() -> None:
    model, text = TimedModel(width=16, layers=1, context=8, heads=4), ByteText(rows=4, context=8, limit=10_000)
    floor = FloorSteps(model, text, dtype="float32", shards=range(2, 4), of=4)
    seen = []
    text.batch = lambda step, shard, *, of: seen.append((step, shard, of)) or ByteText.batch(text, step, shard, of=of)  # type: ignore[method-assign, func-returns-value]
    floor.run(2)
    assert seen == [(0, 2, 4), (0, 3, 4), (1, 2, 4), (1, 3, 4)]
    assert model.computed_ns > 0


def test_more_micro_steps_than_rows_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--rows", "2", "--micro-steps", "3"]) == 2
    assert capsys.readouterr().err == (
        "zerort: --micro-steps: Expected at most one for each of 2 rows, got 3. Use more --rows.\n"
    )


def test_ranks_get_one_blas_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run_ranks(ranks: int, words: list[str], *, env: dict[str, str]) -> argparse.Namespace:
        started.append((ranks, env))
        return argparse.Namespace(code=0)

    monkeypatch.setattr(harness, "launched_size", lambda: None)
    monkeypatch.setattr(harness, "run_ranks", run_ranks)
    assert main(["bench", "step"]) == 0
    assert started == [(2, {"OPENBLAS_NUM_THREADS": "1"})]
