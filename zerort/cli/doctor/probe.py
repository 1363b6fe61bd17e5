"""Small jobs that the doctor runs in other processes, so that a library that aborts or hangs does not take it along.

    python -m zerort.cli.doctor.probe library       what MPI library is here
    mpirun -n 2 python -m zerort.cli.doctor.probe job       does it join ranks, and is what they compute right
    python -m zerort.cli.doctor.probe gpu           what CuPy sees

Each prints one line of JSON, from rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from zerort.cli.doctor.places import look_at_place
from zerort.cli.machine import library_title
from zerort.cli.world import World
from zerort.comm import open_group
from zerort.comm.bootstrap.environment import library_vendor, load_mpi

__all__ = ["PROBES", "answer_of", "look_at_job"]


def look_at_library() -> dict[str, Any]:
    """Return whose MPI library mpi4py uses, and what it can do."""
    import mpi4py
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    return {
        "mpi4py": mpi4py.__version__,
        "library": library_title(MPI),
        "vendor": library_vendor(MPI),
        "thread_level": levels.get(MPI.Query_thread(), "MULTIPLE"),
    }


def look_at_job() -> dict[str, Any]:
    """Open the group of all ranks, let it sum something, and return what came of it. Collective."""
    import os

    world = World(load_mpi())
    with open_group() as group:
        mine = np.arange(100_000, dtype=np.float32) % 251 + group.rank
        total = group.all_reduce(mine).wait()
        expected = (np.arange(100_000, dtype=np.float32) % 251) * group.size + sum(range(group.size))
        hosts = world.all(os.uname().nodename)
        return {
            "ranks": group.size,
            "group": repr(group),
            "kind": group.kind,
            "right": all(world.all(bool(np.array_equal(total, expected)))),
            "places": world.all(look_at_place(hosts[: group.rank].count(hosts[group.rank]))),
            "ranks_per_node": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        }


def look_at_gpus() -> dict[str, Any]:
    """Return what CuPy sees. Only called where it is installed."""
    from zerort.device.cuda.report import describe_gpus

    return describe_gpus()


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "library": look_at_library,
    "job": look_at_job,
    "gpu": look_at_gpus,
}
"""What this module can be asked for."""


def answer_of(out: str) -> dict[str, Any] | None:
    """Find the answer in what a probe printed, among whatever libraries print; None if there is none."""
    for line in reversed(out.splitlines()):
        if line.startswith('{"'):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return None


def main() -> None:
    """Run the probe that the command line names."""
    from zerort.comm.bootstrap.environment import launched_rank

    answer = PROBES[sys.argv[1]]()
    if not launched_rank():
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
