"""Gradients that rest on a disk are not in memory: what was put away before the step is gone from it."""

from __future__ import annotations

import tracemalloc

import numpy as np

import zerort as zr
from zerort.comm import open_group

UNITS, NUMEL = 20, 100_000


def test_a_gradient_that_was_put_away_takes_no_memory(tmp_path):
    plan = zr.Plan.zero(3, gradient=zr.Tier.NVME, state=zr.Tier.NVME)
    gradient = np.ones(NUMEL, np.float32)
    with open_group(kind="solo") as group, zr.open(plan=plan, group=group, scratch=tmp_path) as rt:
        units = [rt.register(f"unit{at}", {"w": zr.TensorSpec((NUMEL,))}) for at in range(UNITS)]
        for _ in range(2):
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for unit in units:
                    unit.reduce({"w": gradient})
                rt.units.wait_for_reductions()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            rt.step()
        slots = rt.memory().buckets
        assert slots < UNITS * gradient.nbytes / 2
        assert after - before < slots + UNITS * gradient.nbytes / 2
