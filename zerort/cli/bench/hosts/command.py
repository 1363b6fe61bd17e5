"""``zerort bench hosts``: makes hosts, starts the ranks on them, and joins what they found.

this process     for each number of hosts: make them → ranks measure, print, leave their figures → remove them
the ranks        `HostsSweep`: the same under a launcher that the user started, on the hosts that there are
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from zerort import trace
from zerort.cli.bench.hosts.namespaces import Hosts, expect_hosts
from zerort.cli.bench.hosts.step import measure_step
from zerort.cli.bench.hosts.sweep import HostsSweep, write_results
from zerort.cli.bench.pictures import check_plot
from zerort.cli.bench.step.command import BLAS, check_step_options
from zerort.cli.ranks import ending_as_exit, run_command
from zerort.cli.screen import Screen
from zerort.cli.world import World
from zerort.comm import open_group
from zerort.comm.bootstrap.environment import launched_size, load_mpi
from zerort.errors import BootstrapError

__all__ = ["run_hosts"]


def run_hosts(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark on hosts that are made here, or on those where a launcher has put the ranks."""
    check_plot(options.plot)
    check_step_options(options)
    if launched_size() is None:
        return _run_on_namespaces(options, words)
    world = World(load_mpi())
    if world.mpi is None:
        raise BootstrapError("Expected an MPI library, to compare with, got none. Install one: pip install mpich.")
    if options.trace is not None or options.step:
        trace.enable()
    with open_group() as group:
        step = (lambda: measure_step(options, group, world)) if options.step else None
        return HostsSweep(options, group, world, step=step).run()


def _run_on_namespaces(options: argparse.Namespace, words: list[str]) -> int:
    with ending_as_exit():
        expect_hosts(rate=options.rate, delay=options.delay)
        codes, parts = [], []
        for count in options.hosts:
            with tempfile.TemporaryDirectory(prefix="zerort-hosts-") as directory:
                part = Path(directory, "part.json")
                with Hosts(count, rate=options.rate, delay=options.delay) as hosts:
                    more = ["--part", str(part), "--hosts", str(count), *Screen.words()]
                    command = hosts.command(options.ranks_per_host, ["-m", "zerort", *words, *more])
                    codes.append(run_command(command, env={BLAS: "1", **os.environ}).code)
                if part.exists():
                    parts.append(json.loads(part.read_text()))
    write_results(options, parts)
    return next((code if code == 2 else 1 for code in codes if code), 0)
