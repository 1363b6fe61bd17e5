"""Small runs that several suites share: offloaded units, steps with gradients by number, all weights, hosts of ranks.

open_offloaded      a runtime whose values lie on a disk, as a plan says
values  steps       units of one tensor; steps whose gradients depend on the step's number and the rank
weights             all parameters, whole, on the host
assert_same         two of those are equal to the bit
open_hosts          the ranks of this machine as several hosts
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zerort as zr
from zerort.comm.bootstrap.opening import best_transport
from zerort.config import GroupOptions
from zerort.engine.residence.host_memory import HostMemory
from zerort.storage.files.faults import injected
from zerort.storage.session import StorageSession
from zerort.testing.threads import run_threads
from zerort.typing import Array

NVME = zr.Tier.NVME
STATE = zr.Plan.zero(3, state=NVME)
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)
NUMEL = 9000


def open_session(group: zr.Group, scratch: Path | str) -> StorageSession:
    """Open the store of a rank without a runtime."""
    return StorageSession(group, scratch=scratch, options=SMALL, traffic=Counter(), host=HostMemory(group))


def open_offloaded(group: zr.Group, scratch: Path | str, plan: zr.Plan = STATE, **options: Any) -> zr.Runtime:
    return zr.open(
        plan=plan,
        group=group,
        optimizer=zr.AdamW(lr=0.1),
        scratch=scratch,
        create_scratch=True,
        offload=SMALL,
        **options,
    )


def values(at: int) -> dict[str, Array]:
    return {"w": np.random.default_rng(at).standard_normal(NUMEL).astype(np.float32)}


def steps(rt: zr.Runtime, numbers: Iterable[int]) -> zr.StepReport:
    for number in numbers:
        for at, unit in enumerate(rt.units.values()):
            unit.reduce({"w": np.random.default_rng((number, at, rt.rank)).standard_normal(NUMEL).astype(np.float32)})
        report = rt.step()
    return report


def weights(rt: zr.Runtime) -> dict[str, Array]:
    """Return all parameters as ``unit.tensor``, whole, on the host. Every rank calls this."""
    found: dict[str, Array] = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found |= {f"{unit.name}.{name}": np.array(rt.device.fetch(value)) for name, value in p.items()}
    return found


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """Compare weights bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        np.testing.assert_array_equal(
            np.ravel(found[name]).view(np.uint8), np.ravel(value).view(np.uint8), err_msg=name
        )


def open_hosts(options: GroupOptions, *, ranks: int = 2, kind: Any = "hierarchical") -> zr.Group:
    """Open a group in which every ``ranks`` ranks are a host of their own: only they share memory."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    machine: Any = world.Split(world.rank // ranks, world.rank)
    return zr.Group(best_transport(world, name="hosts", options=options, kind=kind, machine=machine))


@contextlib.contextmanager
def faults(group: zr.Group, text: str) -> Iterator[None]:
    """Faults of the whole process, put in place by rank 0 while the others wait."""
    group.barrier().wait()  # what they have under way is not meant
    with contextlib.ExitStack() as stack:
        if group.rank == 0:
            stack.enter_context(injected(text))
        group.barrier().wait()
        yield
        group.barrier().wait()
    group.barrier().wait()


def assert_as_in_memory(found: dict[str, Array], count: int, *, ranks: int = 2) -> None:
    """Compare the weights of two units after ``count`` steps with those of a run in memory."""

    def in_memory(group: zr.Group) -> dict[str, Array]:
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(count))
            return weights(rt)

    assert_same(found, run_threads(ranks, in_memory)[0])
