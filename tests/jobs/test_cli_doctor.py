"""``zerort doctor`` on the machine that the tests run on, alone and inside a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from zerort.testing import run_job

TOPICS = {"python", "platform", "numpy", "kernels", "environment", "gpu", "mpi library", "thread level", "launcher"}
TOPICS |= {"test job", "shared memory", "leftovers", "disk", "O_DIRECT", "disk speed"}


def doctor(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("ZERORT_")}
    return subprocess.run(
        [sys.executable, "-m", "zerort", "doctor", *words],
        env=clean | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def test_a_machine_that_runs_these_tests_is_not_bad(tmp_path: Path) -> None:
    answer = doctor(tmp_path, "--json")
    document = json.loads(answer.stdout)
    found = {finding["topic"]: finding for finding in document["findings"]}
    assert found.keys() >= TOPICS
    assert found["test job"]["state"] == "ok", found["test job"]
    assert "2 ranks" in found["test job"]["text"]
    assert (answer.returncode, document["bad"]) == (0, 0), answer.stdout
    for finding in document["findings"]:
        assert bool(finding["cure"]) == (finding["state"] != "ok")
    assert os.listdir(tmp_path) == []


def test_bad_shared_memory_and_a_bad_directory_fail_the_doctor(tmp_path: Path) -> None:
    answer = doctor(tmp_path / "none", ZERORT_SHM_DIR=str(tmp_path / "nowhere"), ZERORT_TIMEUOT="3")
    assert answer.returncode == 1
    lines = answer.stdout.splitlines()
    assert any(line.startswith("bad  shared memory") for line in lines), answer.stdout
    assert any(line.startswith("bad  test job") for line in lines), answer.stdout
    assert any(line.startswith("bad  disk") for line in lines), answer.stdout
    assert any("Did you mean ZERORT_TIMEOUT?" in line for line in lines), answer.stdout
    assert lines[-1].endswith("3 bad")
    assert answer.stderr == ""


def test_inside_a_job_one_rank_speaks_for_all(tmp_path: Path) -> None:
    result = run_job(3, ["-m", "zerort", "doctor", tmp_path, "--json"])
    assert result.code == 0, result.output
    document = json.loads(result.output[result.output.index("{") : result.output.rindex("}") + 1])
    found = {finding["topic"]: finding["text"] for finding in document["findings"]}
    assert found["this job"].startswith("3 ranks: Group('world', node")
    assert "their sum is right" in found["this job"]
    assert ": 3;" in found["ranks per node"]
    assert result.output.count('"topic": "python"') == 1
