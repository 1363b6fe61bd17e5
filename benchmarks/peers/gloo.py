"""torch.distributed under mpirun: torch ships no MPI backend, so its gloo is told who is who from MPI's environment."""

from __future__ import annotations

import os

from torch import distributed as dist

from peers.work import Work


def set_environment(work: Work) -> None:
    """Set what torchrun would have set. The port is the benchmark's choice, and the same on all ranks."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    os.environ |= {"RANK": str(work.rank), "LOCAL_RANK": str(work.rank)}
    os.environ |= {"WORLD_SIZE": str(work.ranks), "LOCAL_WORLD_SIZE": str(work.ranks), "LOCAL_SIZE": str(work.ranks)}


def open_gloo(work: Work) -> None:
    """Open the default process group."""
    set_environment(work)
    dist.init_process_group("gloo")
