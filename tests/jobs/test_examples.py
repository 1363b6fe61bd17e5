"""Every example runs, at a small size, and does what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerort.comm.bootstrap.environment import without_launcher
from zerort.testing import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--width", "32", "--layers", "1", "--batch", "16", "--sample", "8")


def train(ranks, *words, steps=40, small=SMALL, **options):
    """Run examples/train.py on some ranks and return what it wrote."""
    result = run_job(ranks, [EXAMPLES / "train.py", "--steps", str(steps), *small, *words], timeout=400, **options)
    assert result.code == 0, result.output
    return result.output


def losses(output):
    """What the loss was at first and at last, in bits per byte."""
    return tuple(map(float, re.search(r"loss: from ([\d.]+) to ([\d.]+) bits per byte", output).groups()))


def test_classify_learns_the_same_with_and_without_mpirun():
    alone = subprocess.run(
        [sys.executable, EXAMPLES / "classify.py"],
        env=without_launcher(),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    ).stdout
    found = [re.findall(r"step +(\d+): ([\d.]+)%", output) for output in (alone, train_classes(3))]
    assert [[step for step, _ in one] for one in found] == [["0", "50", "100", "150", "200"]] * 2
    rights = [[float(right) for _, right in one] for one in found]
    assert rights[0][0] == rights[1][0] < 60  # before the first update: the same points, whoever has them
    assert min(one[-1] for one in rights) > 98  # after 200 in float32, each as its CPU sums


def train_classes(ranks):
    """Run examples/classify.py on some ranks and return what it wrote."""
    result = run_job(ranks, [EXAMPLES / "classify.py"], timeout=400)
    assert result.code == 0, result.output
    assert f"of 2000 points right, ranks: {ranks}" in result.output
    return result.output


@pytest.fixture(scope="module")
def alone():
    """The losses of one process that holds everything; in float64, for float32 over 40 steps depends on the CPU."""
    return losses(train(1, "--plan", "zero0", "--dtype", "float64"))


@pytest.mark.parametrize(("plan", "ranks"), [("zero0", 2), ("zero1", 3), ("zero2", 4), ("zero3", 3), ("zero3", 8)])
def test_train_learns_the_same_with_every_plan(plan, ranks, alone):
    output = train(ranks, "--plan", plan, "--dtype", "float64")
    first, last = losses(output)
    assert first > 7.5
    assert last < 5.0
    assert (first, last) == pytest.approx(alone, abs=0.011)  # to the last digit that is shown
    assert f"{plan}: parameter " in output
    assert re.search(r"at rest on this rank: parameter \S+, gradient \S+, state \S+", output)
    assert " in memory | gradient " in output  # there is one memory on a host
    assert "it writes: '    def " in output


def test_train_resumes_on_other_ranks_with_another_plan(tmp_path):
    where = ("--resume", tmp_path / "checkpoint")
    before = train(3, "--plan", "zero3", *where)
    assert "resumed" not in before
    after = train(2, "--plan", "zero1", *where, steps=60)
    assert f"resumed from {tmp_path / 'checkpoint'} at step 40" in after
    assert losses(before)[0] > 7.5
    assert max(losses(after)) < 5.5  # from its first step on
    assert "nothing to do: the checkpoint is at step 60" in train(1, *where, steps=60)


def test_train_is_deterministic_on_any_number_of_ranks():
    outputs = [
        train(ranks, "--deterministic", "--plan", plan, steps=12) for ranks, plan in ((1, "zero0"), (4, "zero3"))
    ]
    digests = [re.search(r"digest of the parameters: (\w+)", output).group(1) for output in outputs]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_train_in_sixteen_bits(dtype):
    assert losses(train(2, "--dtype", dtype))[1] < 5.0


def test_train_draws_and_traces(tmp_path):
    output = train(3, "--plot", tmp_path / "loss.png", "--trace", tmp_path / "trace.json", steps=10)
    assert f"plot: {tmp_path / 'loss.png'}" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2}
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"compute embed", "compute block0", "compute head"} <= names
    assert any(name.startswith("reduce_scatter") for name in names)


def test_train_shows_a_bar_on_a_terminal():
    output = train(2, steps=10, env={"FORCE_COLOR": "1"})
    assert "━" in output
    assert "10/10" in output
    assert not re.search(r"^step ", output, re.MULTILINE)  # no lines beside the bar


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "0"], "argument --steps: expected a whole number of at least 1, got '0'"),
        (["--batch", "many"], "argument --batch: expected a whole number of at least 1, got 'many'"),
        (["--lr", "3"], "argument --lr: expected a number between 0 and 1, got 3.0"),
        (["--width", "30"], "argument --width: expected a multiple of the 4 heads, got 30"),
        (["--plan", "zero4"], "argument --plan: invalid choice: 'zero4'"),
        (["--plot", "/nowhere/loss.png"], "argument --plot: there is no directory /nowhere"),
        (["--plot", "loss.txt"], "argument --plot: expected a file that ends in .png, .svg or .pdf, got loss.txt"),
    ],
)
def test_train_refuses_nonsense(words, complaint, tmp_path):
    result = run_job(1, [EXAMPLES / "train.py", *words], timeout=280, cwd=tmp_path)
    assert result.code not in (0, 124)
    assert complaint in result.output


def test_train_says_early_that_matplotlib_is_missing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None")
    words = [EXAMPLES / "train.py", "--plot", tmp_path / "loss.png"]
    result = run_job(2, words, timeout=280, env={"PYTHONPATH": str(tmp_path)})
    assert result.code not in (0, 124)
    assert "--plot: needs matplotlib" in result.output


@pytest.mark.parametrize("example", ["train_torch.py", "train_hf.py"])
def test_a_torch_example_says_that_torch_is_missing(example, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    result = run_job(1, [EXAMPLES / example], timeout=280, env={"PYTHONPATH": str(tmp_path)})
    assert result.code not in (0, 124)
    assert f"{example} needs torch, which is not installed: pip install torch" in result.output
    assert "Traceback" not in result.output


def test_a_server_takes_the_versions_of_a_trainer(tmp_path):
    words = [sys.executable, EXAMPLES / "serve_reader.py", "serve", tmp_path / "feed", "--until", "4"]
    with subprocess.Popen(words, env=without_launcher(), stdout=subprocess.PIPE, text=True) as server:
        trained = run_job(2, [EXAMPLES / "serve_reader.py", "train", tmp_path / "feed", "--steps", "80"], timeout=400)
        assert trained.code == 0, trained.output
        assert "step  20: version 1, whole" in trained.output
        served, _ = server.communicate(timeout=400)
    found = re.findall(r"version (\d+) \(update (\d+)\): ([\d.]+)% of 500 points right", served)
    assert [int(update) for _, update, _ in found] == [20 * int(version) for version, _, _ in found]
    assert found[-1][0] == "4"
    assert float(found[-1][2]) > 75


def test_a_slow_rank_is_named_and_given_less(tmp_path):
    """Within 20 steps; then steps take at most 1.10 times what is ideal for those speeds. Every token counts once.

    On a clock that sleeping alone moves, so that no other load of the machine makes a rank slow.
    """
    script = [
        Path(__file__).parent / "own_clock.py",
        EXAMPLES / "train_uneven.py",
        "--documents",
        "700",
        "--epochs",
        "4",
        "--milliseconds",
        "2",
        "--since",
        "24",
        "--plot",
        tmp_path / "steps.png",
    ]
    result = run_job(3, script, timeout=400)
    assert result.code == 0, result.output
    named = re.findall(r"step (\d+): rank (\d) on \S+ \(host\) is slow; shards alike, shares ", result.output)
    assert [rank for _, rank in named] == ["1"], result.output
    relieved = int(named[0][0])
    assert 24 < relieved <= 24 + 20
    seconds = [float(one) for one in re.search(r"steps: ([\d. ]+)", result.output)[1].split()]
    assert (max(seconds[:24]), max(seconds[24:relieved])) == (0.040, 0.080)  # 20 documents of 2 ms, then at half speed
    assert max(seconds[relieved:]) <= 1.10 * 60 * 0.002 / (1 + 1 / 2 + 1)
    steps, tokens, expected = re.search(r"(\d+) steps, (\d+) of (\d+) tokens", result.output).groups()
    assert tokens == expected
    assert int(steps) == 48
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_rows_learn_what_whole_tables_do():
    """On other ranks, too: pairs right before the first update, and after 50; for a tenth of the bytes."""
    small = ("--users", "20000", "--items", "4000", "--batch", "512", "--steps", "50")
    found = []
    for ranks, words in ((2, ()), (3, ("--dense",))):
        result = run_job(ranks, [EXAMPLES / "recommend.py", *small, *words], timeout=400)
        assert result.code == 0, result.output
        rights = re.findall(r"step +\d+: ([\d.]+)% of 512 pairs right", result.output)
        (moved, unit) = re.search(r"([\d.]+)(KiB|MiB) through collectives", result.output).groups()
        found.append(([float(right) for right in rights], float(moved) * (1024 if unit == "MiB" else 1)))
    (rows, few), (dense, all_of_them) = found
    assert rows[0] == dense[0] < 55
    assert abs(rows[1] - dense[1]) < 1.0  # after 50 updates in float32, each as its CPU sums
    assert rows[1] > 58
    assert few < 0.1 * all_of_them


def test_fewer_bytes_with_the_same_losses():
    words = ("--exact", "--over", "all", "--steps", "2", "--width", "32", "--layers", "1", "--lr", "1e-5")
    result = run_job(2, [EXAMPLES / "train_slow_link.py", *words], timeout=400)
    assert result.code == 0, result.output
    assert len(set(re.findall(r"loss ([\d.]+) after", result.output))) == 1, result.output
    shape = r"gather delta \(lossless\): .*, ([\d.]+)KiB through collectives \(uncoded: ([\d.]+)KiB\)"
    moved, uncoded = map(float, re.search(shape, result.output).groups())
    assert moved < 0.75 * uncoded
    assert "as they are, gathered once: " in result.output


def test_codes_move_less_than_a_quarter():
    words = ("--over", "all", "--steps", "2", "--width", "32", "--layers", "1")
    result = run_job(2, [EXAMPLES / "train_slow_link.py", *words], timeout=400)
    assert result.code == 0, result.output
    shape = (
        r"gather int8, reduce int4, feedback; .*, ([\d.]+)KiB through collectives \(uncoded: ([\d.]+)KiB\), loss [\d.]+"
    )
    moved, uncoded = map(float, re.search(shape, result.output).groups())
    assert moved < 0.25 * uncoded
