"""``zerort bench collectives`` starts its ranks, checks their data and writes what it found; nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerort.testing import run_job

QUICK = ("--seconds", "0.005")
SIDE = {"time_us", "min_us", "max_us", "algbw", "busbw", "wrong", "iterations", "error"}


def bench(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerort", "bench", "collectives", *QUICK, *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def test_two_ranks_against_mpi(tmp_path: Path) -> None:
    path, plot, trace = tmp_path / "r.json", tmp_path / "r.png", tmp_path / "t.json"
    pytest.importorskip("matplotlib")
    words = ["--sizes", "1000,64K", "--dtypes", "float32,bfloat16", "--compare", "mpi"]
    answer = bench(*words, "--json", path, "--plot", plot, "--trace", trace)
    assert answer.returncode == 0, answer.stderr
    document = json.loads(path.read_text())
    assert document["bench"] == "collectives"
    assert document["machine"]["ranks"] == 2
    rows = {(row["op"], row["dtype"], row["nbytes"]): row for row in document["rows"]}
    moving = ("all_gather", "all_gather shared", "broadcast", "all_to_all")
    reducing = ("reduce_scatter", "all_reduce", "reduce")
    sums_bfloat16 = document["machine"]["mpi"].startswith("MPICH 5.")
    assert ("cannot sum" in answer.stdout) != sums_bfloat16
    kinds = [(dtype, nbytes) for dtype in ("float32", "bfloat16") for nbytes in (1000, 65536)]
    assert rows.keys() == {(op, *kind) for op in moving + reducing for kind in kinds} | {("barrier", "none", 0)}
    for (op, dtype, nbytes), row in rows.items():
        ours, theirs = (row["out_of_place"], row["in_place"]), (row["mpi"], row["mpi_in_place"])
        assert [side["wrong"] for side in ours + theirs if side is not None].count(0) >= 1
        assert all(side["wrong"] == 0 and side.keys() == SIDE for side in ours + theirs if side is not None), row
        assert (ours[0] is None) == (op == "all_gather shared")
        assert (ours[1] is None) == (op in ("all_to_all", "barrier"))
        assert (row["ratio"] is None) == (op in reducing and dtype == "bfloat16" and not sums_bfloat16), row
        assert (row["fraction"] is None) == (op in ("all_gather shared", "barrier"))
        assert row["count"] == nbytes // (4 if dtype == "float32" else 2) // (1 if op in _WHOLE else 2)
    memory = document["memory"]
    assert memory["shared_nbytes"] == pytest.approx(memory["nbytes"], rel=0.1)  # once per node
    assert memory["copied_nbytes"] == pytest.approx(2 * memory["nbytes"], rel=0.1)  # once per rank
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "wrong elements: 0" in answer.stdout
    assert answer.stderr == ""
    assert sorted(os.listdir(tmp_path)) == ["r.json", "r.png", "t.json"]


def test_sums_of_sixteen_bits_stand_beside_mpis_with_their_errors(tmp_path: Path) -> None:
    words = ["--sizes", "64K", "--dtypes", "float16,bfloat16", "--ops", "reduce_scatter,all_reduce,reduce"]
    answer = bench("--ranks", "3", *words, "--compare", "mpi", "--json", tmp_path / "r.json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads((tmp_path / "r.json").read_text())
    assert "wrong elements: 0" in answer.stdout
    assert "units of the last place" in answer.stdout
    found = {(row["op"], row["dtype"]): row for row in document["rows"]}
    assert len(found) == 6
    for row in found.values():
        assert 0 < row["out_of_place"]["error"] <= 0.5  # rounded once
        assert 0 < row["in_place"]["error"] <= 0.5
    if document["machine"]["mpi"].startswith("MPICH 5."):  # sums both, and rounds at every hop
        for row in found.values():
            assert 0.5 < row["mpi"]["error"] <= 1.5
            assert row["mpi"]["wrong"] == row["mpi_in_place"]["wrong"] == 0  # small whole numbers need no rounding
            assert row["ratio"] > 0
    else:
        assert all(found[op, "bfloat16"]["ratio"] is None for op in ("reduce_scatter", "all_reduce", "reduce"))
        assert "# n/a: this MPI library has no bfloat16" in answer.stdout


_WHOLE = ("all_reduce", "broadcast", "reduce", "barrier")


@pytest.mark.parametrize("words", [("--arrays", "own"), ("--kind", "mpi")], ids=["own", "over-mpi"])
def test_other_arrays_and_kinds_are_right_too(words: tuple[str, ...]) -> None:
    answer = bench("--ranks", "3", "--sizes", "10000", *words, "--ops", "all_gather,reduce_scatter,all_reduce")
    assert answer.returncode == 0, answer.stderr
    assert "wrong elements: 0" in answer.stdout
    assert f"Group('world', {'mpi' if 'mpi' in words else 'node'}," in answer.stdout


def test_sums_that_hosts_round_on_the_wire_are_right(job) -> None:
    """Two hosts, of nine ranks and of one: the sums of nine may have no room in bfloat16, and are sent rounded."""
    code = """
from mpi4py import MPI
from zerort.cli.bench.collectives.operations import OPERATIONS
from zerort.cli.bench.collectives.trials import Pattern, our_trials
from zerort.comm.bootstrap.opening import best_transport
from zerort.native.dtypes import numpy_dtype
world, options = MPI.COMM_WORLD, zr.GroupOptions.from_environment()
machine = world.Split(world.rank // 9, world.rank)
with zr.Group(best_transport(world, name="world", options=options, kind="hierarchical", machine=machine)) as group:
    arrays = [group.zeros(10 * 610, numpy_dtype("bfloat16")) for _ in range(2)]
    for op in ("reduce_scatter", "all_reduce"):
        trials = our_trials(group, OPERATIONS[op], *arrays, Pattern("bfloat16", group.size))
        say(op, [trial.check() for trial in trials.values()])
"""
    result = job(10, code)
    assert result.code == 0, result.output
    assert result.output.count("reduce_scatter [0, 0]\n") == result.output.count("all_reduce [0, 0]\n") == 10, (
        result.output
    )


def test_wrong_data_fails_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "spoiled.py"
    script.write_text(
        """
import sys
from zerort.cli.main import main
from zerort.comm import Group
right = Group.reduce_scatter

def spoiled(self, source, **options):
    ticket = right(self, source, **options)
    if self.rank == 1:
        ticket.wait()[-1] += 1
    return ticket

Group.reduce_scatter = spoiled
sys.exit(main(["bench", "collectives", "--sizes", "4K", "--seconds", "0.005", "--ops", "reduce_scatter"]))
"""
    )
    result = run_job(2, [script])
    assert result.code not in (0, 124), result.output
    assert "wrong elements: 4: THE DATA IS WRONG" in result.output  # one element, two places, before and after


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--sizes", "64T"), 1, "zerort: Expected a size that fits, got none. Expected 320TiB of memory"),
        (("--kind", "solo", "--sizes", "4K"), 2, "zerort: --kind solo: Expected one rank, got 2."),
    ],
)
def test_what_cannot_run_says_why_once(words: tuple[str, ...], code: int, line: str) -> None:
    answer = bench(*words)
    assert answer.returncode == code
    assert answer.stderr.count("zerort:") == 1, answer.stderr
    assert answer.stderr.startswith(line), answer.stderr


def test_a_size_without_room_is_skipped_with_the_reason(tmp_path: Path) -> None:
    answer = bench("--sizes", "4K,64T", "--ops", "all_reduce", "--json", tmp_path / "r.json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads((tmp_path / "r.json").read_text())
    assert [row["nbytes"] for row in document["rows"]] == [4096]
    assert [one["nbytes"] for one in document["skipped"]] == [64 * 1024**4]
    assert "# skipped 64TiB: Expected" in answer.stdout


def test_unusable_shared_memory_is_one_line(tmp_path: Path) -> None:
    answer = bench("--sizes", "4K", ZERORT_SHM_DIR=str(tmp_path / "nowhere"))
    assert answer.returncode == 1
    assert answer.stderr.count("zerort: Expected to make a file in") == 1, answer.stderr


def test_ranks_that_do_not_fit_the_job_are_a_usage_error() -> None:
    result = run_job(2, ["-m", "zerort", "bench", "collectives", "--ranks", "3"])
    assert "zerort: --ranks: Expected the 2 ranks that the launcher started, got 3." in result.output
    assert result.code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_benchmark_leaves_no_ranks(number: signal.Signals, code: int) -> None:
    mark = f"{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "zerort", "bench", "collectives", "--sizes", "1M", "--seconds", "30"],
        env=os.environ | {"TEST_MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert any("memory limit" in line for line in process.stdout)  # the ranks are at work
        assert len(_marked(mark)) >= 3
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(60) == code
    deadline = time.monotonic() + 30
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _marked(mark) == []


def _marked(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found
