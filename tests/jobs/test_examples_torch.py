"""The torch examples run, at a small size, and do what they say."""

import os
import re
from pathlib import Path

import pytest

from zerort.testing import run_job

pytest.importorskip("torch")
pytest.importorskip("zerort_torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--width", "32", "--layers", "1", "--batch", "16", "--sample", "8")


def train(ranks, *words, script="train_torch.py", steps=40, **options):
    """Run an example on some ranks and return what it wrote."""
    result = run_job(ranks, [EXAMPLES / script, "--steps", str(steps), *SMALL, *words], timeout=400, **options)
    assert result.code == 0, result.output
    return result.output


def losses(output):
    """What the loss was at first and at last, in bits per byte."""
    return tuple(map(float, re.search(r"loss: from ([\d.]+) to ([\d.]+) bits per byte", output).groups()))


@pytest.fixture(scope="module")
def alone():
    """The losses of one process that holds everything; in float64, for float32 over 40 steps depends on the CPU."""
    return losses(train(1, "--plan", "zero0", "--dtype", "float64"))


@pytest.mark.parametrize(("plan", "ranks"), [("zero0", 2), ("zero3", 3)])
def test_train_learns_the_same_with_every_plan(plan, ranks, alone):
    output = train(ranks, "--plan", plan, "--dtype", "float64")
    first, last = losses(output)
    assert first > 7.5
    assert last < 5.0
    assert (first, last) == pytest.approx(alone, abs=0.011)  # to the last digit that is shown
    assert f"{plan}: parameter " in output
    assert "it writes: '    def " in output


def test_train_resumes_on_other_ranks_with_another_plan(tmp_path):
    where = ("--resume", tmp_path / "checkpoint")
    assert "resumed" not in train(3, "--plan", "zero3", *where)
    after = train(2, "--plan", "zero1", *where, steps=60)
    assert f"resumed from {tmp_path / 'checkpoint'} at step 40" in after
    assert max(losses(after)) < 5.5  # from its first step on


def test_train_in_sixteen_bits():
    assert losses(train(2, "--dtype", "bfloat16"))[1] < 5.0


def test_train_refuses_nonsense(tmp_path):
    result = run_job(1, [EXAMPLES / "train_torch.py", "--width", "30"], timeout=400, cwd=tmp_path)
    assert result.code not in (0, 124)
    assert "argument --width: expected a multiple of the 4 heads, got 30" in result.output


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"] if os.environ.get("ZERORT_EVERY") else ["gpt2"])
def test_hugging_face_learns(model):
    """`make test-torch` has all of them; what `zt.shard` does to each is in tests/torch, too."""
    pytest.importorskip("transformers")
    first, last = losses(train(2, "--model", model, script="train_hf.py"))
    assert last < first - 1.0


def test_hugging_face_tells_two_classes_apart():
    pytest.importorskip("transformers")
    words = ("--model", "bert", "--width", "64", "--layers", "2")
    output = train(2, *words, script="train_hf.py", steps=150)
    assert "BertForSequenceClassification" in output
    right = re.search(r"it is right about ([\d.]+)% of 128 new rows", output)
    assert float(right.group(1)) > 85  # 50 if it had learned nothing


def test_hugging_face_missing_is_said_at_once(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['transformers'] = None")
    result = run_job(2, [EXAMPLES / "train_hf.py"], timeout=400, env={"PYTHONPATH": str(tmp_path)})
    assert result.code not in (0, 124)
    assert "train_hf.py needs transformers, which is not installed: pip install transformers" in result.output
