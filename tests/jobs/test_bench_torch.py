"""`benchmarks/bench_torch_step.py` starts its ranks, lets methods take turns, and holds their losses to one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerort.testing.tolerance import rounding

pytest.importorskip("torch")
pytest.importorskip("zerort_torch")

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_torch_step.py"
TINY = ("--config", "tiny", "--rounds", "2", "--steps", "1", "--check", "2")


def test_methods_take_turns_and_agree(tmp_path):
    path = tmp_path / "r.json"
    words = [*TINY, "--clip", "--methods", "ddp,zero3,zero3-nvme", "--json", path]
    answer = subprocess.run(
        [sys.executable, BENCH, *words], capture_output=True, text=True, check=False, timeout=500, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["single", "ddp", "zero3", "zero3-nvme"]  # the floor is always there
    assert rows["single"]["floor_ratio"] == rows["zero3"]["ours_ratio"] == 1
    for name, row in rows.items():
        assert len(row["rounds_ms"]) == 2
        assert row["pss"] > row["rss"] / 2 > 0
        assert (row["apart"] is None) == (name == "single")
    # Losses before the first update and after it, in float32: an element whose gradient is rounding alone may have gone
    # the other way, but to first order it does not move the loss.
    assert max(row["apart"] or 0.0 for row in rows.values()) < rounding("float32", 3000)
    assert rows["zero3-nvme"]["apart"] == rows["zero3"]["apart"]  # the same bits
    assert list(tmp_path.iterdir()) == [path]
    assert "round 2: single" in answer.stderr


def test_unknown_methods_are_refused():
    words = [sys.executable, BENCH, "--methods", "ddp,horovod"]
    answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert answer.returncode == 2
    assert "argument --methods: expected names out of single, ddp" in answer.stderr
