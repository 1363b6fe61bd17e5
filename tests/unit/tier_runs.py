"""Small runs with values on a disk, for tests of the engine: units of one tensor, steps with gradients by number."""

from __future__ import annotations

import contextlib

import numpy as np

import zerort as zr
from zerort.storage.files.faults import injected
from zerort.testing.threads import run_threads

NVME = zr.Tier.NVME
STATE = zr.Plan.zero(3, state=NVME)
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)
NUMEL = 9000


def open_runtime(group, scratch, plan=STATE, **options):
    return zr.open(
        plan=plan,
        group=group,
        optimizer=zr.AdamW(lr=0.1),
        scratch=scratch,
        create_scratch=True,
        offload=SMALL,
        **options,
    )


def values(at):
    return {"w": np.random.default_rng(at).standard_normal(NUMEL).astype(np.float32)}


def steps(rt, numbers):
    for number in numbers:
        for at, unit in enumerate(rt.units.values()):
            unit.reduce({"w": np.random.default_rng((number, at, rt.rank)).standard_normal(NUMEL).astype(np.float32)})
        report = rt.step()
    return report


def weights(rt):
    found = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found[unit.name] = np.array(p["w"])
    return found


@contextlib.contextmanager
def faults(group, text):
    """Faults of the whole process, put in place by rank 0 while the others wait."""
    group.barrier().wait()  # what they have under way is not meant
    with contextlib.ExitStack() as stack:
        if group.rank == 0:
            stack.enter_context(injected(text))
        group.barrier().wait()
        yield
        group.barrier().wait()
    group.barrier().wait()


def assert_as_in_memory(found, count, *, ranks=2):
    """Compare the weights of two units after ``count`` steps with those of a run in memory."""

    def in_memory(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(count))
            return weights(rt)

    expected = run_threads(ranks, in_memory)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
