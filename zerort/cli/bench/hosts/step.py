"""A ZeRO-3 step between hosts, in turn with the same ranks over one host's shared memory, and without the runtime.

hosts       the group that is measured, over the links
one host    the same processes over shared memory: the namespaces are on one machine
floor       the same computing, nothing sent or updated
"""

from __future__ import annotations

import argparse

from zerort.cli.bench.harness import Result
from zerort.cli.bench.step.command import PlanOption, StepBenchmark
from zerort.cli.bench.step.rows import FLOOR
from zerort.cli.world import World
from zerort.comm import Group
from zerort.comm.bootstrap.opening import best_transport
from zerort.config import GroupOptions

__all__ = ["measure_step"]

_HOSTS, _ONE = "hosts", "one host"


def measure_step(options: argparse.Namespace, group: Group, world: World) -> Result:
    """Time ZeRO-3 steps over ``group``; in namespaces also over shared memory. Every rank calls this."""
    if options.part is None:
        return StepBenchmark(options, {_HOSTS: PlanOption(3, group)}, world, base=FLOOR).measure()
    transport = best_transport(
        world.comm, name="one host", options=GroupOptions.from_environment(), kind="node", machine=world.comm
    )
    with Group(transport) as one:
        return StepBenchmark(
            options, {_HOSTS: PlanOption(3, group), _ONE: PlanOption(3, one)}, world, base=_ONE
        ).measure()
