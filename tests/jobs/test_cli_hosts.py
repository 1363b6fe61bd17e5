"""``zerort bench hosts`` makes hosts, measures between them, and leaves none behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hosts as network

from zerort.cli.bench.hosts.namespaces import Hosts, sweep_namespaces

WHY_NOT = network.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

BENCH = [sys.executable, "-m", "zerort", "bench", "hosts"]
MODEL = ("--width", "8", "--layers", "1", "--context", "4", "--rows", "1", "--steps", "1")
ENDS_WITHIN = 600  # seconds: nothing here is timed, and on a busy machine a benchmark takes minutes


def namespaces() -> set[str]:
    """Names of the hosts that are there, whoever made them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("zrt")}


def owned_by(pid: int) -> set[str]:
    """Names of the hosts that a process has made."""
    paths = Path("/run/zerort-hosts").glob("zrt*")
    return {path.name for path in paths if path.read_text().split()[0] == str(pid)} & namespaces()


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + ENDS_WITHIN
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def bench(*words: str | Path, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *words], capture_output=True, text=True, check=False, timeout=ENDS_WITHIN, **more)


def test_a_step_on_a_slow_link_is_measured_uncoded_and_coded(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "r.json", tmp_path / "r.png"
    words = ("--numel", "10K", "--seconds", "0.001", "--step", "--rates", "500mbit", "--rounds", "1")
    model = ("--width", "32", "--layers", "1", "--context", "8", "--rows", "2", "--steps", "1")
    command = [sys.executable, "-m", "zerort", "bench", "wire", *words, *model, "--json", path, "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_WITHIN, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    free, slow = json.loads(path.read_text())["links"]
    assert (free["rate"], slow["rate"]) == (None, "500mbit")
    # Gathered in forward and backward as int8, summed once as int4: 0.254, 0.254 and 0.129 of float32's bytes.
    assert 0.15 < slow["coded_nbytes"] / slow["uncoded_nbytes"] < 0.3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_collectives_and_a_step_are_measured_and_no_host_stays(tmp_path: Path) -> None:
    path, plot = tmp_path / "r.json", tmp_path / "r.png"
    pytest.importorskip("matplotlib")
    words = ("--hosts", "2,3", "--ranks-per-host", "2", "--rate", "1gbit", "--sizes", "8,64K", "--rounds", "1")
    ops = ("--ops", "all_gather,reduce_scatter,all_reduce,barrier", "--seconds", "0.001", "--step", *MODEL)
    process = subprocess.Popen(
        [*BENCH, *words, *ops, "--json", path, "--plot", plot],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    wait_until(lambda: owned_by(process.pid) or process.poll() is not None, "hosts of the benchmark")
    made = owned_by(process.pid)
    out, errors = process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == 0, out + errors
    assert made, "no host was seen"
    assert not made & namespaces()
    assert not any((Path("/etc/netns") / name).exists() for name in made)
    document = json.loads(path.read_text())
    assert document["bench"] == "hosts"
    assert [part["machine"]["ranks_of_hosts"] for part in document["parts"]] == [[2, 2], [2, 2, 2]]
    for part in document["parts"]:
        rows = {(row["op"], row["nbytes"]): row for row in part["rows"]}
        moving = ("all_gather", "all_gather shared", "reduce_scatter", "all_reduce")
        assert {op for op, _ in rows} == {*moving, "barrier"}
        for (op, nbytes), row in rows.items():
            assert row["wrong"] == 0
            assert row["mpi"]["time_us"] > 0
            if op != "barrier":
                hosts = len(part["machine"]["ranks_of_hosts"])
                crosses = nbytes * (hosts - 1) / hosts * (2 if op == "all_reduce" else 1)
                assert row["wire_us"] == pytest.approx(8 * crosses / 1e3, abs=0.01)
                assert row["sockets"]["time_us"] > 0
        steps = {row["plan"]: row for row in part["step"]}
        assert steps.keys() == {"hosts", "one host", "floor"}
        assert steps["hosts"]["loss"] == pytest.approx(steps["one host"]["loss"], rel=1e-5)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "wrong elements: 0" in out
    assert errors == ""
    assert sorted(os.listdir(tmp_path)) == ["r.json", "r.png"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_no_host_and_no_rank(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen([*BENCH, "--sizes", "64M", "--rate", "1gbit"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "zerort" in process.stdout.readline()  # a rank's: they have begun
    made = owned_by(process.pid)
    assert len(made) == 3
    process.send_signal(number)
    process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == 128 + number
    assert not made & namespaces()


def test_hosts_of_a_killed_owner_are_swept_with_all_that_runs_there() -> None:
    process = subprocess.Popen([*BENCH, "--sizes", "64M", "--rate", "1gbit"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "zerort" in process.stdout.readline()
    made = owned_by(process.pid)
    first = min(made - {min(made)})  # a host: the shortest name is the bridge's
    ranks = subprocess.run(["ip", "netns", "pids", first], capture_output=True, text=True, check=True).stdout.split()
    assert ranks
    process.kill()
    process.wait()
    with Hosts(1) as hosts:
        assert not made & namespaces()
        assert not any(os.path.exists(f"/tmp/zerort-ssh-{name}") for name in made)
        wait_until(lambda: not any(_runs(pid) for pid in ranks), "the end of the ranks")
        assert sweep_namespaces() == []  # those of a living owner stay
        assert set(hosts.names) <= namespaces()
    process.communicate(timeout=ENDS_WITHIN)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    answer = bench(env={**os.environ, "PATH": str(tmp_path)})
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "Expected the command ip" in answer.stderr
    assert "apt-get install iproute2" in answer.stderr
    answer = bench("--rate", "fast")
    assert answer.returncode == 2
    assert "Expected a rate such as 1gbit or 500mbit, got 'fast'." in answer.stderr


def test_a_link_that_cannot_be_shaped_is_told_before_ranks_start() -> None:
    answer = bench("--delay", "1ms", "--sizes", "8", "--ops", "barrier", "--rounds", "1", "--seconds", "0.001")
    if "qdisc kind" in answer.stderr:  # this kernel has no netem
        assert answer.returncode == 1
        assert "--delay: Expected tc to shape a link by netem" in answer.stderr
        assert answer.stdout == ""
    else:
        assert answer.returncode == 0, answer.stderr
        assert "delay 1ms" in answer.stdout
