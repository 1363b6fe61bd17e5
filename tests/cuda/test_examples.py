"""examples/train.py --device cuda, on GPUs."""

import re
from pathlib import Path

import hardware
import pytest

from zerort.testing import run_job

pytest.importorskip("cupy")

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
WIDE = ("--dtype", "float64")  # compared over steps
SMALL = ("--steps", "3", "--width", "8", "--layers", "1", "--batch", "3", "--sample", "2")


def losses(output):
    """Of every step, in bits per byte."""
    return [float(found) for found in re.findall(r"loss ([\d.]+) bits/byte", output)]


def test_train_learns_on_gpus_what_it_learns_on_hosts(tmp_path):
    settings = hardware.environment(devices=2, seed=5, delay_us=200, report=tmp_path)
    there = run_job(2, [TRAIN, *SMALL, *WIDE, "--device", "cuda"], timeout=300, env=settings)
    assert there.code == 0, there.output
    assert "zero3 on 2 ranks (nccl)" in there.output
    assert hardware.findings_in(tmp_path) == []
    here = run_job(2, [TRAIN, *SMALL, *WIDE, "--device", "host"])
    assert len(losses(here.output)) >= 2
    assert losses(there.output) == pytest.approx(losses(here.output), abs=1.1e-3)  # the last digit that is shown
    assert "it writes: '    def " in there.output


def test_train_says_which_gpus_are_missing():
    done = run_job(2, [TRAIN, *SMALL, "--device", "cuda"], env=hardware.environment(devices=1))
    assert done.code == 1
    assert done.output.count("argument --device: Expected ") == 1, done.output
    assert "Traceback" not in done.output
