"""``zerort bench checkpoint`` starts its ranks, checks what it loads, writes what it found, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerort.testing import run_job


def test_it_measures_and_cleans_up(tmp_path: Path) -> None:
    words = ["--nbytes", "8MiB", "--ranks", "3", "--dir", tmp_path, "--rounds", "2", "--json", tmp_path / "r.json"]
    answer = subprocess.run(
        [sys.executable, "-m", "zerort", "bench", "checkpoint", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert answer.returncode == 0, answer.stderr
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["gbs"].keys() == {"raw write", "save", "replace", "raw read", "load"}
    assert document["ratios"].keys() == {"save", "replace", "load"}
    assert all(ratio > 0 for ratio in document["ratios"].values())
    assert document["machine"]["ranks"] == 3
    assert document["nbytes"] == pytest.approx(8 * 2**20, rel=0.01)
    assert len(document["rounds"]) == 2
    assert "wrong values: 0" in answer.stdout
    assert answer.stderr == ""
    assert os.listdir(tmp_path) == ["r.json"]


def test_under_a_launcher_it_uses_its_ranks(tmp_path: Path) -> None:
    words = ["-m", "zerort", "bench", "checkpoint", "--nbytes", "2MiB", "--rounds", "1", "--dir", tmp_path]
    result = run_job(2, words)
    assert result.code == 0, result.output
    assert result.output.count("wrong values: 0") == 1
    result = run_job(2, [*words, "--ranks", "3"])
    assert "zerort: --ranks: Expected the 2 ranks that the launcher started, got 3." in result.output
    assert os.listdir(tmp_path) == []


def test_no_room_is_one_line(tmp_path: Path) -> None:
    words = ["--nbytes", "100TiB", "--dir", tmp_path]
    answer = subprocess.run(
        [sys.executable, "-m", "zerort", "bench", "checkpoint", *words], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert answer.stderr.count("zerort: Expected 300TiB") == 1, answer.stderr
    assert os.listdir(tmp_path) == []
