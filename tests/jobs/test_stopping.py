"""A signal that asks a run to stop is told to all ranks by the next step; a loop then saves, and ends."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zerort.checkpoint import read_manifest, verify
from zerort.comm.bootstrap.environment import find_launcher, without_launcher

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_signal_to_one_rank_is_told_to_all_after_the_same_update(job, tmp_path):
    code = """
def own_handler(number, frame): pass
path = sys.argv[1]
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=30.0))
signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
before = [signal.getsignal(one) for one in signals]
for number in signals:
    with zr.open(optimizer=zr.SGD(lr=0.1), group=group) as rt:
        unit = rt.register("unit", {"w": np.zeros(100, np.float32)})
        for step in range(10):
            unit.reduce({"w": np.ones(100, np.float32)})
            if step == 2 and rt.rank == 1:
                os.kill(os.getpid(), number)
            report = rt.step()
            if report.stop:
                break
        say("rank", rt.rank, number.name, "after update", report.update)
        rt.save(path)
        unit.reduce({"w": np.ones(100, np.float32)})
        try:
            rt.step()
        except StopRequested as error:
            say("rank", rt.rank, "refused:", error)
        say("rank", rt.rank, "at update", rt.updates)
assert [signal.getsignal(one) for one in signals] == before
signal.signal(signal.SIGTERM, own_handler)
with zr.open(group=group) as rt:
    assert signal.getsignal(signal.SIGTERM) is own_handler
    if rt.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            say("rank 0 interrupted at once")
try:
    with zr.open(group=group) as rt:
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    say("rank", group.rank, "interrupted at the end")
group.barrier().wait()
"""
    # Without a dump of stacks, which has a handler for SIGUSR1.
    result = job(3, code, args=[tmp_path / "c"], env={"ZERORT_STACKS": ""})
    assert result.code == 0, result.output
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        assert re.findall(rf"rank (\d) {name} after update (\d)", result.output).count(("0", "3")) == 1, result.output
        assert len(re.findall(rf"rank \d {name} after update 3", result.output)) == 3, result.output
        assert result.output.count("got another step. Nothing was updated. Save") == 9, result.output
        assert result.output.count(f"report.stop ({name} on rank 1)") == 3, result.output
    assert result.output.count("at update 3") == 9
    assert "rank 0 interrupted at once" in result.output
    assert result.output.count("interrupted at the end") == 3, result.output
    assert verify(tmp_path / "c") == []


@pytest.fixture
def training(tmp_path):
    """A run of examples/train.py that is under way, and the number of its first step shown."""
    words = ["--steps", "100000", "--width", "32", "--layers", "1", "--batch", "4", "--save", tmp_path / "checkpoint"]
    command = [*find_launcher().command(2), sys.executable, EXAMPLES / "train.py", *words]
    with subprocess.Popen(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=without_launcher(),
        cwd=tmp_path,
    ) as process:
        limit = threading.Timer(90, process.kill)  # its end is what ends the reading
        limit.start()
        try:
            assert any(re.search(r"step\s+\d+", line) for line in process.stdout)
            limit.cancel()
            yield process
        finally:
            limit.cancel()
            process.kill()


def test_an_example_that_is_told_to_stop_saves_and_ends(training, tmp_path):
    forwarded = signal.SIGTERM if find_launcher().vendor == "MPICH" else signal.SIGUSR1  # Open MPI ends all at SIGTERM
    training.send_signal(forwarded)
    output, _ = training.communicate(timeout=280)
    assert training.returncode == 0, output
    assert "checkpoint: " in output
    assert verify(tmp_path / "checkpoint") == []
    assert read_manifest(tmp_path / "checkpoint").progress[0]["position"] < 100000


def test_a_launcher_that_hangs_up_takes_its_ranks_along(training):
    training.send_signal(signal.SIGHUP)
    training.communicate(timeout=280)  # until no rank holds its output open
    assert training.returncode != 0
