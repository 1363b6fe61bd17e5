"""``zerort bench step`` starts its ranks, trains under every plan, and writes what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerort.testing import run_job
from zerort.testing.tolerance import OVER_STEPS

TINY = ("--width", "16", "--layers", "2", "--context", "16", "--rows", "3", "--steps", "1", "--rounds", "2")


def bench(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerort", "bench", "step", *TINY, *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_two_ranks_under_every_plan(tmp_path: Path) -> None:
    path, trace = tmp_path / "r.json", tmp_path / "t.json"
    answer = bench("--json", path, "--trace", trace, "--dtype", "float64")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    document = json.loads(path.read_text())
    assert document["bench"] == "step"
    assert document["machine"]["ranks"] == 2
    assert document["machine"]["blas_threads"] == os.environ.get("OPENBLAS_NUM_THREADS", "1")
    rows = {row["plan"]: row for row in document["rows"]}
    assert list(rows) == ["zero0", "zero1", "zero2", "zero3", "floor"]
    for plan, row in rows.items():
        assert len(row["rounds_ms"]) == 2
        assert row["min_ms"] == min(row["rounds_ms"])
        assert row["compute_ms"] > 0
        assert row["exposed_ms"] <= row["exposed_worst_ms"]
        assert sum(row["parts_ms"].values()) > 0
        assert (row["loss"] is None) == (plan == "floor")
    assert rows["zero0"]["ratio"] == rows["floor"]["floor_ratio"] == 1
    assert rows["zero3"]["loss"] == pytest.approx(rows["zero0"]["loss"], rel=OVER_STEPS)
    at_rest = [rows[f"zero{stage}"]["at_rest_nbytes"] for stage in range(4)]
    assert at_rest == sorted(at_rest, reverse=True)
    assert at_rest[3] == pytest.approx(at_rest[0] / 2, rel=0.05)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"zero0", "zero3", "floor", "pack block1", "reduce block1", "compute block0", "update"} <= names
    assert sorted(os.listdir(tmp_path)) == ["r.json", "t.json"]
    assert "THE PLANS DO NOT AGREE" not in answer.stdout
    assert "where the exposed time goes" in answer.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "1", "--plans", "zero3"),
        ("--ranks", "3", "--plans", "zero0,zero3", "--dtype", "bfloat16", "--prefetch", "0"),
        ("--ranks", "2", "--plans", "zero2", "--dtype", "float16", "--micro-steps", "3"),
    ],
    ids=["one rank", "bfloat16", "float16"],
)
def test_other_ranks_and_dtypes(words: tuple[str, ...]) -> None:
    answer = bench(*words)
    assert answer.returncode == 0, answer.stderr
    assert "# last losses: zero" in answer.stdout
    assert ("zero2-local" in answer.stdout) == ("--micro-steps" in words)  # both ways to accumulate, side by side


def test_plans_that_learn_something_else_fail_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "spoiled.py"
    script.write_text(
        f"""
import sys
from zerort.cli.main import main
from zerort.engine.step.state import OptimizerState
right = OptimizerState.update_chunk_

def spoiled(self, at, param, grad, state, **options):
    right(self, at, param, grad, state, **options)
    if self.owned.first == 0 and self.owned.stop == self.layout.numel:  # zero0
        param += 1

OptimizerState.update_chunk_ = spoiled
sys.exit(main(["bench", "step", *{TINY!r}, "--plans", "zero0,zero3"]))
"""
    )
    result = run_job(2, [script])
    assert result.code not in (0, 124), result.output
    assert "THE PLANS DO NOT AGREE" in result.output


def test_under_mpirun_it_says_that_blas_has_all_cores() -> None:
    environment = {"OPENBLAS_NUM_THREADS": ""}
    result = run_job(2, ["-m", "zerort", "bench", "step", *TINY, "--plans", "zero3"], env=environment)
    assert result.code == 0, result.output
    assert "every rank may use all cores: set OPENBLAS_NUM_THREADS=1 before mpirun" in result.output


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--rows", "1", "--micro-steps", "2"), 2, "zerort: --micro-steps: Expected at most one for each of 1 rows"),
        (("--width", "400000"), 1, "zerort: Expected "),
    ],
    ids=["micro-steps", "memory"],
)
def test_what_cannot_run_says_why_once(words: tuple[str, ...], code: int, line: str) -> None:
    answer = bench(*words)
    assert answer.returncode == code
    assert answer.stderr.count("zerort:") == 1, answer.stderr
    assert answer.stderr.startswith(line), answer.stderr


def test_ranks_that_do_not_fit_the_job_are_a_usage_error() -> None:
    result = run_job(2, ["-m", "zerort", "bench", "step", "--ranks", "3"])
    assert "zerort: --ranks: Expected the 2 ranks that the launcher started, got 3." in result.output
    assert result.code == 2
