"""Every example runs, at a small size, and does what it says."""

import json
import re
from pathlib import Path

import pytest

from zerort.testing import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_train_learns(ranks, tmp_path):
    words = [EXAMPLES / "train.py", "--steps", "60", "--bytes", "100000", "--trace", tmp_path / "trace.json"]
    result = run_job(ranks, words, timeout=120)
    assert result.code == 0, result.output
    first, last = map(float, re.search(r"fell from ([\d.]+) to ([\d.]+)", result.output).groups())
    assert first > 7.5
    assert last < 5.0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(ranks))
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"compute", "reduce_scatter gradients", "all_gather parameters", "adamw", "meet", "move"} <= names


def test_train_refuses_nonsense():
    result = run_job(2, [EXAMPLES / "train.py", "--steps", "0"], timeout=60)
    assert result.code not in (0, 124)
    assert "--steps, --batch and --bytes must be at least 1" in result.output
