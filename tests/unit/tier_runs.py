"""Small runs with values on a disk, for tests of the engine: units of one tensor, steps with gradients by number."""

from __future__ import annotations

import numpy as np

import zerort as zr
from zerort.testing.threads import run_threads

NVME = zr.Tier.NVME
STATE = zr.Plan.zero(3, state=NVME)
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)
NUMEL = 9000


def open_runtime(group, scratch, plan=STATE, **options):
    return zr.open(plan=plan, group=group, optimizer=zr.AdamW(lr=0.1), scratch=scratch, offload=SMALL, **options)


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


def assert_as_in_memory(found, count):
    """Compare the weights of two units after ``count`` steps on two ranks with those of a run in memory."""

    def in_memory(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(count))
            return weights(rt)

    expected = run_threads(2, in_memory)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
