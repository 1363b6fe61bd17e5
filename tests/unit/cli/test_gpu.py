"""What the doctor says about GPUs, from facts alone."""

import os

import pytest

from zerort.cli.doctor import places as checkup_places
from zerort.cli.doctor.gpus import judge_gpus
from zerort.cli.doctor.places import judge_places, look_at_place
from zerort.cli.main import main

GPU = {"name": "H100", "nbytes": 80 * 1024**3, "sm": "9.0", "bus": "0000:01:00.0"}
FACTS = {
    "cupy": "14.2.0",
    "driver": "12.9",
    "runtime": "12.9",
    "gpus": [GPU, GPU],
    "without_peer": [],
    "to_pin": 8 * 1024**2,
    "pin_error": "",
    "nccl": "2.27.3",
    "nccl_error": "",
    "nccl_loaded": ["/usr/lib/libnccl.so.2"],
    "nccl_others": [],
    "nccl_wheels": [["nvidia-nccl-cu12 2.27.3"], 1],
    "torch_cuda": "12.8",
}


def judge(**changes):
    return {finding.topic: finding for finding in judge_gpus({**FACTS, **changes})}


def test_good_gpus_are_ok():
    found = judge()
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["gpu"].text == "CuPy 14.2.0, driver for CUDA 12.9; 2 x H100 (80GiB, sm 9.0)"
    assert found["nccl"].text == "2.27.3, loaded from /usr/lib/libnccl.so.2"
    assert found["peer access"].text == "between all 2 GPUs"
    assert found["pinned memory"].text == "can be had; tried with 8MiB"


@pytest.mark.parametrize(
    ("topic", "changes", "text", "cure"),
    [
        ("gpu", {"gpus": []}, "but no GPU", "nvidia-smi"),
        ("gpu", {"gpus": [GPU, {**GPU, "name": "A100"}]}, "A100 (80GiB, sm 9.0), H100", "slowest"),
        (
            "nccl",
            {"nccl": None, "nccl_error": "Expected NCCL, got none. Run pip."},
            "Expected NCCL, got none",
            "Run pip.",
        ),
        ("nccl", {"nccl_loaded": ["/a", "/b"]}, "/a, /b", "uninstall one"),
        ("nccl", {"nccl_others": ["/torch/libnccl.so.2"]}, "another one is installed: /torch", "import torch before"),
        (
            "nccl wheels",
            {"nccl_wheels": [["nvidia-nccl-cu12 2.29.3", "nvidia-nccl-cu13 2.30.7"], 1]},
            "cu12 2.29.3 and nvidia-nccl-cu13 2.30.7 install the same file",
            "uninstall -y",
        ),
        (
            "cuda releases",
            {"torch_cuda": "13.0"},
            "torch is built for CUDA 13.0, CuPy for CUDA 12.9",
            "cupy-cuda13x[ctk]",
        ),
        ("peer access", {"without_peer": [[0, 1], [1, 0]]}, "not between 0→1, 1→0", "topo -m"),
        (
            "pinned memory",
            {"pin_error": "Expected to pin, got: no. Raise it."},
            "Expected to pin, got: no",
            "Raise it.",
        ),
    ],
)
def test_what_is_wrong_has_a_cure(topic, changes, text, cure):
    finding = judge(**changes)[topic]
    assert finding.state == "warn"
    assert text in finding.text
    assert cure in finding.cure


def test_every_rank_with_a_gpu_is_judged_by_its_own_cores():
    good = {"cores": 16, "gpu": "0000:01:00.0", "node": 0, "beside": True}
    few, far = {**good, "cores": 3}, {**good, "node": 1, "beside": False}
    assert [finding.state for finding in judge_places([good, good])] == ["ok"]
    cores, numa = judge_places([good, few, far])
    assert (cores.state, numa.state) == ("warn", "warn")
    assert cores.text.endswith(": rank 1: 3")
    assert numa.text.endswith(": rank 2: node 1")
    assert list(judge_places([{**few, "gpu": None}])) == []


def test_a_place_is_what_the_kernel_says(tmp_path, monkeypatch):
    """A GPU on the second NUMA node, and this process on the cores of the first, or of both."""
    device = tmp_path / "bus/pci/devices/0000:0a:00.0"
    node = tmp_path / "devices/system/node/node1"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(checkup_places, "_gpu_of", lambda local_rank: "0000:0A:00.0")
    mine = sorted(os.sched_getaffinity(0))
    (node / "cpulist").write_text(f"{mine[-1] + 1}-{mine[-1] + 4}\n")
    place = look_at_place(0, sys=tmp_path)
    assert place == {"cores": len(mine), "gpu": "0000:0A:00.0", "node": 1, "beside": False}
    (node / "cpulist").write_text(f"{mine[0]},{mine[-1] + 1}-{mine[-1] + 4}\n")
    assert look_at_place(0, sys=tmp_path)["beside"]
    (device / "numa_node").write_text("-1\n")
    assert look_at_place(0, sys=tmp_path)["beside"]


def test_one_gpu_needs_no_peers():
    assert judge(gpus=[GPU])["peer access"].state == "ok"


@pytest.mark.parametrize("words", [["--kind", "mpi"], ["--compare", "mpi"], ["--arrays", "own"]])
def test_what_only_hosts_can_do_is_refused_on_gpus(words, capfd):
    assert main(["bench", "collectives", "--device", "cuda", *words]) == 2
    assert "--device cuda" in capfd.readouterr().err
