"""A model four times larger than the memory it may use trains with a disk, and says so when it cannot do without."""

import re
from pathlib import Path

import pytest

from zerort.testing import run_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_oversize.py"


def run(ranks, scratch, *words, **options):
    return run_job(ranks, [EXAMPLE, "--steps", "2", "--scratch", scratch, *words], timeout=400, **options)


@pytest.mark.parametrize(
    ("ranks", "parameters", "memory", "micro_steps"), [(1, "42M", "162MiB", "1"), (2, "84M", "322MiB", "2")]
)
def test_it_trains_within_a_quarter_of_what_it_needs(ranks, parameters, memory, micro_steps, tmp_path):
    words = ("--layers", "48", "--rows", "1", "--micro-steps", micro_steps)
    result = run(ranks, tmp_path, "--parameters", parameters, "--memory", memory, *words)
    assert result.code == 0, result.output
    assert float(re.search(r"of memory: ([\d.]+) times as much", result.output)[1]) >= 4
    assert re.search(
        r"^step   2  loss [\d.]+ bits/byte .* disk: read [\d.]+ GB/s, written", result.output, re.MULTILINE
    )
    used = re.search(r"memory: ([\d.]+)MiB of all ranks after a step, at most ([\d.]+)MiB on one rank", result.output)
    assert max(map(float, used.groups())) <= int(memory[:-3])
    assert re.search(r"disk: \S+ read and \S+ written per step; a step took [\d.]+ s, the disk alone", result.output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_offload_the_same_limit_stops_it(ranks, tmp_path):
    words = ("--parameters", "38M", "--memory", f"{144 * ranks}MiB", "--rows", "1", "--no-offload")
    result = run(ranks, tmp_path, *words)
    assert result.code == 1, result.output
    expected = (
        rf"^Does not fit without offload: .* take \S+, and all ranks together may use {144 * ranks}MiB\. Leave --no"
    )
    assert re.search(expected, result.output, re.MULTILINE), result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_refused_before_anything_is_trained(tmp_path):
    result = run(1, tmp_path, "--parameters", "38M", "--memory", "90MiB")
    assert result.code == 1, result.output
    assert "Does not fit even with offload:" in result.output
    assert "Traceback" not in result.output


def test_it_draws_a_live_table_on_a_terminal(tmp_path):
    words = ("--parameters", "1M", "--memory", "256MiB", "--rows", "2")
    result = run(1, tmp_path, *words, env={"FORCE_COLOR": "1"})
    assert result.code == 0, result.output
    assert "step 2 of 2" in result.output
    assert "░" in result.output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--parameters", "many"], "expected a number of parameters such as 40M or 1B, got 'many'"),
        (["--memory", "all"], "argument --memory: expected a size such as 256MiB, got 'all'"),
    ],
)
def test_nonsense_is_refused(words, complaint, tmp_path):
    result = run(1, tmp_path, *words)
    assert result.code == 2
    assert complaint in result.output
