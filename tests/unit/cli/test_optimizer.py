"""``zerort bench optimizer`` on a few elements: rows, JSON, and what it says without torch or memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from zerort.cli.bench.optimizer import command as bench_optimizer
from zerort.cli.bench.optimizer.contenders import NBYTES_PER_ELEMENT, Arrays, numpy_steps, our_steps, torch_steps
from zerort.cli.main import main

TINY = ["bench", "optimizer", "--numel", "10K", "--seconds", "0.01"]


def test_every_step_is_a_row_with_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main([*TINY, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert set(document) == {"bench", "machine", "rows"}
    assert [(row["step"], row["nbytes_per_element"]) for row in document["rows"]] == list(NBYTES_PER_ELEMENT.items())
    for row in document["rows"]:
        assert row["numel"] == 10_000
        assert row["native_ms"] > 0
        assert row["gbs"] == pytest.approx(10_000 * row["nbytes_per_element"] / row["native_ms"] / 1e6)
        assert row["fraction"] == pytest.approx(row["gbs"] / row["limit_gbs"])
    out = capsys.readouterr().out
    assert all(step in out for step in NBYTES_PER_ELEMENT)


def test_without_torch_the_comparison_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([*TINY, "--compare", "torch"]) == 0
    out = capsys.readouterr().out
    assert "pip install torch" in out
    assert "n/a" in out


def test_too_many_elements_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_optimizer, "available_nbytes", lambda: 1000)
    assert main(TINY) == 1
    assert "--numel: Expected 195.31KiB of memory, got 1000B available" in capsys.readouterr().err


def test_the_steps_do_the_same_work() -> None:
    """A figure is worth nothing if one side does less."""
    for step in NBYTES_PER_ELEMENT:
        ours, theirs = Arrays.make(1000), Arrays.make(1000)
        before = ours.param.copy()
        our_steps(ours)[step]()
        numpy_steps(theirs)[step]()
        assert not np.array_equal(ours.param, before)
        np.testing.assert_array_equal(ours.param, theirs.param)


@pytest.mark.slow
def test_torch_updates_the_same_parameters() -> None:
    pytest.importorskip("torch")
    arrays = Arrays.make(1000)
    for step in torch_steps(arrays).values():
        before = arrays.param.copy()
        step()
        assert not np.array_equal(arrays.param, before)
