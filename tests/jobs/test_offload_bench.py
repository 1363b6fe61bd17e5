"""``zerort bench nvme`` and ``zerort bench offload`` measure, check what they read, and leave nothing."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zerort.testing import run_job


def bench(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zerort", "bench", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize("more", [[], ["--unchecked"]])
def test_nvme(tmp_path: Path, more: list[str]) -> None:
    json_file = tmp_path / "r.json"
    answer = bench("nvme", "--dir", tmp_path, "--nbytes", "40MiB", "--rounds", 2, "--json", json_file, *more)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    assert "wrong bytes: 0" in answer.stdout
    document = json.loads(json_file.read_text())
    assert {"plain write", "store write", "plain read", "store read"} <= document["gbs"].keys()
    assert document["ratios"].keys() == {"store write", "store read"}
    assert document["nbytes"] == 32 * 2**20
    assert document["checksum"] == (not more)
    assert os.listdir(tmp_path) == ["r.json"]


def test_nvme_with_fio(tmp_path: Path) -> None:
    """What fio says is part of the comparison; what it cannot say is one line."""
    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    path = {"PATH": f"{fio.parent}:{os.environ['PATH']}"}
    for said, code in (('{"jobs": [{"read": {"bw_bytes": 5e12}, "write": {"bw_bytes": 5e12}}]}', 0), ("boom", 1)):
        fio.write_text(f"#!/bin/sh\necho '{said}'\n")
        fio.chmod(fio.stat().st_mode | stat.S_IXUSR)
        answer = bench("nvme", "--dir", tmp_path, "--nbytes", "16MiB", "--rounds", 1, env=path)
        assert answer.returncode == code, answer.stdout + answer.stderr
        assert bool(re.search(r"fio write +5000\.00", answer.stdout)) == (code == 0)
        assert ("got 'boom'" in answer.stderr) == (code == 1)
    assert os.listdir(tmp_path) == ["bin"]


def test_offload(tmp_path: Path) -> None:
    json_file, trace_file = tmp_path / "r.json", tmp_path / "t.json"
    words = ["--dir", tmp_path, "--numel", "2.5M", "--chunk", "1MiB", "--rounds", 2]
    answer = bench("offload", *words, "--json", json_file, "--trace", trace_file)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    assert "wrong elements: 0" in answer.stdout
    document = json.loads(json_file.read_text())
    assert document["seconds"].keys() == {"read + write", "compute", "streamed", "serial"}
    assert document["ratios"].keys() == {"streamed", "serial"}
    assert document["slots_nbytes"] == 3 * 3 * 2**20
    events = json.loads(trace_file.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"offload compute", "nvme read 0", "nvme write 0"} <= tracks
    assert sorted(os.listdir(tmp_path)) == ["r.json", "t.json"]


def test_offload_on_two_ranks(tmp_path: Path) -> None:
    words = ["--dir", tmp_path, "--numel", "1M", "--chunk", "1MiB", "--rounds", 1, "--depth", 4]
    answer = bench("offload", *words, "--ranks", 2)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("wrong elements: 0") == 1
    assert "on 2 ranks" in answer.stdout
    result = run_job(2, ["-m", "zerort", "bench", "offload", *words, "--ranks", "3"])
    assert "zerort: --ranks: Expected the 2 ranks that the launcher started, got 3." in result.output
    assert os.listdir(tmp_path) == []


def test_no_room_is_one_line(tmp_path: Path) -> None:
    for words in (["nvme", "--nbytes", "100TiB"], ["offload", "--numel", "9000000G"]):
        answer = bench(*words, "--dir", tmp_path)
        assert answer.returncode == 1
        assert answer.stderr.count("zerort: Expected") == 1, answer.stderr
        assert "for the benchmark at" in answer.stderr
    assert os.listdir(tmp_path) == []


def test_damage_ends_it_with_the_name_of_the_file(tmp_path: Path) -> None:
    words = ["--dir", tmp_path, "--numel", "2M", "--chunk", "1MiB", "--rounds", 1]
    answer = bench("offload", *words, env={"ZERORT_FAULT": "flip@9:op=write"})
    assert answer.returncode == 1
    assert "crc32c" in answer.stderr
    assert ".chunk ('" in answer.stderr
    assert os.listdir(tmp_path) == []
