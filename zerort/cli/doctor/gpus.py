"""What the doctor finds about GPUs, their driver, CuPy, NCCL and pinned memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from zerort.cli.doctor.finding import Finding, ok, warn
from zerort.cli.doctor.probe import answer_of
from zerort.cli.ranks import run_here
from zerort.config import format_bytes

__all__ = ["check_gpus", "judge_gpus"]


def check_gpus() -> Iterator[Finding]:
    """Yield what is found; one line where there is no CuPy."""
    if importlib.util.find_spec("cupy") is None:
        yield ok("gpu", "no CuPy: none, host only")
        return
    # In another process: a driver that aborts or hangs must not take the doctor along.
    found = run_here(["-m", "zerort.cli.doctor.probe", "gpu"], timeout=120)
    answer = answer_of(found.out)
    if answer is None:
        why = (found.errors.strip().splitlines() or ["no answer"])[-1]
        yield warn(
            "gpu",
            f"CuPy is installed, but does not work: {why}",
            cure="Install the CuPy of your CUDA (pip install 'cupy-cuda12x[ctk]', or cupy-cuda13x) and its driver.",
        )
        return
    yield from judge_gpus(answer)


def judge_gpus(facts: dict[str, Any]) -> Iterator[Finding]:
    """Yield the findings about what `zerort.device.cuda.report.describe_gpus` returned."""
    about = f"CuPy {facts['cupy']}, driver for CUDA {facts['driver']}"
    gpus = facts["gpus"]
    if not gpus:
        yield warn("gpu", f"{about}, but no GPU", cure="Check nvidia-smi and CUDA_VISIBLE_DEVICES.")
        return
    kinds = {f"{gpu['name']} ({format_bytes(gpu['nbytes'])}, sm {gpu['sm']})" for gpu in gpus}
    text = f"{about}; {len(gpus)} x {', '.join(sorted(kinds))}"
    if len(kinds) > 1:
        yield warn("gpu", text, cure="GPUs that differ run at the slowest one's speed: give the slower ones less.")
    else:
        yield ok("gpu", text)
    yield from _judge_releases(facts)
    yield _judge_nccl(facts)
    yield _judge_peers(facts)
    yield _judge_pinning(facts)


def _judge_releases(facts: dict[str, Any]) -> Iterator[Finding]:
    wheels, places = facts["nccl_wheels"]
    if len(wheels) > places:
        yield warn(
            "nccl wheels",
            f"{' and '.join(wheels)} install the same file: the second has overwritten the first's",
            cure="Keep one: pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13, then install that of your CUDA.",
        )
    ours, torchs = facts["runtime"].split(".")[0], facts["torch_cuda"].split(".")[0]
    if torchs and ours != torchs:
        yield warn(
            "cuda releases",
            f"torch is built for CUDA {facts['torch_cuda']}, CuPy for CUDA {facts['runtime']}: each brings libraries, "
            "NCCL's under one name",
            cure=f"Take that of torch's CUDA: pip uninstall cupy-cuda{ours}x, pip install 'cupy-cuda{torchs}x[ctk]'.",
        )


def _judge_nccl(facts: dict[str, Any]) -> Finding:
    if facts["nccl"] is None:
        told, _, cure = facts["nccl_error"].rpartition(". ")
        return warn("nccl", told, cure=cure)
    text = f"{facts['nccl']}, loaded from {', '.join(facts['nccl_loaded']) or 'CuPy itself'}"
    if len(facts["nccl_loaded"]) > 1:
        return warn("nccl", text, cure="Two NCCLs in one process break each other: uninstall one of them.")
    if facts["nccl_others"]:
        return warn(
            "nccl",
            f"{text}; another one is installed: {', '.join(facts['nccl_others'])}",
            cure="Beside torch, import torch before zerort opens a group, so that both take torch's.",
        )
    return ok("nccl", text)


def _judge_peers(facts: dict[str, Any]) -> Finding:
    count, without = len(facts["gpus"]), facts["without_peer"]
    if count == 1:
        return ok("peer access", "one GPU: none needed")
    if without:
        pairs = ", ".join(f"{one}→{other}" for one, other in without)
        return warn(
            "peer access",
            f"not between {pairs}: what they send goes through the host",
            cure="Look at nvidia-smi topo -m; in a virtual machine, pass GPUs through together and turn ACS off.",
        )
    return ok("peer access", f"between all {count} GPUs")


def _judge_pinning(facts: dict[str, Any]) -> Finding:
    if facts["pin_error"]:
        told, _, cure = facts["pin_error"].partition(". ")
        return warn("pinned memory", told, cure=cure)
    return ok("pinned memory", f"can be had; tried with {format_bytes(facts['to_pin'])}")
