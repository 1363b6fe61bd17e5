"""A training step on a slow link: two hosts of one rank, values as they are and as codes, in turn.

    this process     for no limit, then each rate: make two hosts → ranks measure and leave their figures → remove them
    the ranks        `LinkBenchmark`: `bench step` with two contenders that differ in their wire alone

Jobs for different rates follow one another, so the machine may be in another mood: each has a floor of its own, which
the table shows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from zerort import trace
from zerort.cli.bench.harness import Result
from zerort.cli.bench.hosts.namespaces import Hosts, expect_hosts
from zerort.cli.bench.step.command import BLAS, PlanOption, StepBenchmark, check_step_options
from zerort.cli.bench.wire.link_rows import CODED, UNCODED, LinkRow, draw_links, link_legend, link_rows, link_table
from zerort.cli.ranks import ending_as_exit, run_command
from zerort.cli.screen import Screen
from zerort.cli.world import World
from zerort.comm import open_group
from zerort.comm.bootstrap.environment import load_mpi
from zerort.config import Wire
from zerort.errors import BootstrapError
from zerort.trace.files import write_json

__all__ = ["measure_links", "run_link_ranks"]

_WIRE = Wire(gather="int8", reduce="int4", feedback=True, over="hosts")


class LinkBenchmark(StepBenchmark):
    """Steps uncoded and coded, on the hosts that the ranks are on."""

    name = "wire"

    def save(self, machine: dict[str, Any], result: Result) -> None:
        """Leave the figures for the process that made the hosts, or write what was asked for."""
        path = self.options.part or self.options.json
        if path is not None and self.world.rank == 0:
            write_json(path, {"bench": self.name, "machine": machine, **result.figures})
        if self.options.part is None and self.options.plot is not None and self.world.rank == 0:
            draw_links(self.options.plot, link_rows([(None, result.figures["rows"])]))


def run_link_ranks(options: argparse.Namespace) -> int:
    """Run the benchmark on the ranks that a launcher has started."""
    check_step_options(options)
    world = World(load_mpi())
    trace.enable()  # says what the exposed time is spent on
    with open_group() as group:
        plans = {UNCODED: PlanOption(3, group), CODED: PlanOption(3, group, wire=_WIRE)}
        return LinkBenchmark(options, plans, world, base=UNCODED).run()


def measure_links(options: argparse.Namespace, words: list[str]) -> Result:
    """Run the benchmark on two hosts that are made here, once without a limit and once for each rate."""
    check_step_options(options)
    found: list[tuple[str | None, list[dict[str, Any]]]] = []
    with ending_as_exit():
        expect_hosts(rate=options.rates[0])
        for rate in (None, *options.rates):
            with tempfile.TemporaryDirectory(prefix="zerort-wire-") as directory:
                part = Path(directory, "part.json")
                with Hosts(2, rate=rate) as hosts:
                    command = hosts.command(1, ["-m", "zerort", *words, "--part", part, *Screen.words()])
                    code = run_command(command, env={BLAS: "1", **os.environ}).code
                if code or not part.exists():
                    raise BootstrapError(
                        f"Expected steps on two hosts over {rate or 'an unlimited link'}, got exit code {code} from "
                        "their ranks. What they said stands above."
                    )
                found.append((rate, json.loads(part.read_text())["rows"]))
    rows: list[LinkRow] = link_rows(found)
    if options.plot is not None:
        draw_links(options.plot, rows)
    return Result(
        tables=[link_table(rows)],
        legend=link_legend(rounds=options.rounds, steps=options.steps),
        figures={"links": [row.as_json() for row in rows]},
        failed=False,
    )
