"""What the doctor says about GPUs, from facts alone."""

import pytest

from zerort.cli.checkup_gpu import judge_gpus
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


def test_one_gpu_needs_no_peers():
    assert judge(gpus=[GPU])["peer access"].state == "ok"


@pytest.mark.parametrize("words", [["--kind", "mpi"], ["--compare", "mpi"], ["--arrays", "own"]])
def test_what_only_hosts_can_do_is_refused_on_gpus(words, capfd):
    assert main(["bench", "collectives", "--device", "cuda", *words]) == 2
    assert "--device cuda" in capfd.readouterr().err
