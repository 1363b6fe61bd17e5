"""The command, on GPUs."""

import json
import os
import subprocess
import sys

import hardware
import pytest

pytest.importorskip("cupy")


def zerort(*words, path=(), **settings):
    """Run the command; Python finds modules and packages in the folders of ``path`` first."""
    env = hardware.environment(**{"devices": 2, **settings})
    env["PYTHONPATH"] = os.pathsep.join([*map(str, path), env.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "zerort", *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def second_nccl(tmp_path):
    """A wheel that pip brought along with torch, say: its name and its files are all that is looked at."""
    wheel = tmp_path / "nvidia_nccl_cu12-2.99.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.99.0\n")
    (wheel / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
    return tmp_path / "nvidia/nccl/lib/libnccl.so.2"


def test_the_doctor_sees_gpus_nccl_peers_and_pinned_memory(tmp_path, second_nccl):
    done = zerort("doctor", tmp_path, "--json", path=[tmp_path], pinned_mb=1, mem_mb=128)
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "2 x " in found["gpu"]["text"], found
    assert "128MiB" in found["gpu"]["text"]
    loaded, _, other = found["nccl"]["text"].partition("; another one is installed: ")
    assert loaded.startswith("2.")
    assert "libnccl.so" in loaded
    assert other == str(second_nccl.resolve())
    assert found["nccl"]["state"] == "warn"
    assert found["nccl"]["cure"].startswith("Beside torch, import torch before zerort opens a group")
    assert found["peer access"]["text"] == "between all 2 GPUs"
    assert found["pinned memory"]["state"] == "warn"
    assert "Expected to pin 67,108,864 bytes" in found["pinned memory"]["text"]
    assert found["pinned memory"]["cure"].startswith("Ask for less")


def test_the_doctor_looks_at_every_ranks_place(job):
    """Rank 1 alone is bound to one core; both have a GPU."""
    result = job(
        2,
        """
        from zerort.cli.doctor import places
        from zerort.cli.main import main
        places.ENOUGH_CORES = 2
        if rank == 1:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        main(["doctor", os.getcwd(), "--json"])
        """,
    )
    found = {one["topic"]: one["text"] for one in json.loads(result.output[result.output.index("{") :])["findings"]}
    assert found["cores per rank"].endswith("rank 1: 1"), found


def test_copies_are_measured_and_right(tmp_path):
    out = tmp_path / "copies.json"
    done = zerort("bench", "copies", "--sizes", "4K,1M", "--parameters", "10K", "--seconds", "0.01", "--json", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    rows, updates = document["rows"], document["updates"]
    assert len(rows) == 12
    assert {row["way"].partition(",")[0] for row in rows} == {"in", "out", "both ways", "within"}
    assert all(row["wrong"] == 0 and row["gbs"] > 0 for row in rows)
    assert {row["way"] for row in updates} == {
        f"{way} on the {side}" for way in ("streamed", "copies alone,", "compute alone,") for side in ("device", "host")
    }
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in updates)
    assert "faster here: zr.OffloadOptions(update_on=" in done.stdout


def test_a_gpu_that_is_not_there_is_refused():
    done = zerort("bench", "copies", "--gpu", "7")
    assert done.returncode == 1
    assert "Expected the number of one of 2 GPUs, got 7" in done.stderr


def test_collectives_are_measured_and_right(tmp_path):
    out = tmp_path / "collectives.json"
    words = ["--device", "cuda", "--ranks", "2", "--sizes", "4K,300M", "--seconds", "0.01", "--json", out]
    done = zerort("bench", "collectives", *words, "--ops", "all_gather,reduce_scatter,all_to_all,barrier", mem_mb=128)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert [row["op"] for row in document["rows"]] == ["all_gather", "reduce_scatter", "all_to_all", "barrier"]
    assert all(row["wrong"] == 0 for row in document["rows"])
    assert document["skipped"][0]["why"].startswith("Expected 314,572,800 bytes on GPU 0")
    assert "busbw" in done.stdout
