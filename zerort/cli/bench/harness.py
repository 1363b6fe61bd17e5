"""`Benchmark`: what all of ``zerort bench`` shares; a benchmark adds its contenders, its tables and its legend.

    run_in_ranks      start the ranks, or join those that a launcher has started
    Benchmark.run     head lines → measure → tables → legend → trace and JSON → exit code
    rounds, time      rounds of contenders in rotating order, each timed on the slowest rank

A ratio of two contenders is taken within a round, where the machine is in one mood; medians over the rounds count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from zerort.cli.arguments import UsageError
from zerort.cli.machine import describe_machine, machine_lines
from zerort.cli.ranks import run_ranks
from zerort.cli.screen import Bar, Screen, new_table
from zerort.cli.world import World
from zerort.comm import Group
from zerort.comm.bootstrap.environment import launched_size, load_mpi
from zerort.trace.files import write_json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Benchmark", "Result", "rounds_table", "run_in_ranks", "wrong_line"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a benchmark, for people and for machines."""

    tables: Sequence[Table]
    """Those that were not printed while it ran."""
    legend: Sequence[str]
    """Lines below the tables."""
    figures: Mapping[str, Any]
    """JSON values, written beside the benchmark's name and the machine."""
    failed: bool
    """Whether data was wrong: the exit code is 1."""


class Benchmark(ABC):
    """One run of a benchmark on one rank.

    Args:
        options: The command line.
        world: All ranks; this process alone if None.
        group: The group that is measured, if there is one; it gathers the traces of all ranks.
    """

    name: ClassVar[str]
    """As on the command line."""

    def __init__(self, options: argparse.Namespace, *, world: World | None = None, group: Group | None = None) -> None:
        self.options = options
        self.world = World(None) if world is None else world
        self.group = group
        self.screen = Screen(getattr(options, "screen", None), shown=self.world.rank == 0)
        self._bar = Bar(None)

    def describe(self) -> dict[str, Any]:
        """Return facts to keep beside the machine's."""
        return {}

    @abstractmethod
    def head(self, machine: dict[str, Any]) -> list[str]:
        """Return the lines that follow the machine's, above the tables."""

    @abstractmethod
    def measure(self) -> Result:
        """Run the contenders. Every rank calls this."""

    def run(self) -> int:
        """Measure, print and write; return the exit code. Every rank calls this."""
        machine = {**describe_machine(), **self.describe()}
        for line in (*machine_lines(machine), *self.head(machine)):
            self.screen.print(line)
        result = self.measure()
        for table in result.tables:
            self.screen.print(table)
        for line in result.legend:
            self.screen.print(line)
        self.save(machine, result)
        return 1 if result.failed else 0

    def save(self, machine: dict[str, Any], result: Result) -> None:
        """Write the files that were asked for. Every rank calls this."""
        if self.group is not None and self.options.trace is not None:
            self.group.save_trace(self.options.trace)
        if self.options.json is not None and self.world.rank == 0:
            write_json(self.options.json, {"bench": self.name, "machine": machine, **result.figures})

    def rounds(self, measure: Callable[[int], T]) -> list[T]:
        """Return what ``measure`` returns for rounds 1, 2, …, ``--rounds``; round 0 warms up and is dropped."""
        found = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self.screen.bar(self.options.rounds + 1) as self._bar:
                for number in range(self.options.rounds + 1):
                    self._bar.step(f"round {number}" if number else "warming up")
                    found.append(measure(number))
                    self._bar.step("", advance=1)
        finally:
            self._bar = Bar(None)
            if collecting:
                gc.enable()
        return found[1:]

    def show(self, name: str) -> None:
        """Let the bar say what runs now."""
        self._bar.step(name)

    def time(self, name: str, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes on the slowest rank, from a meeting of all ranks on. Collective."""
        self.show(name)
        self.world.meet()
        began = time.perf_counter()
        work()
        return self.world.maxima([time.perf_counter() - began])[0]


def run_in_ranks(
    options: argparse.Namespace,
    words: list[str],
    run: Callable[[World], int],
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a benchmark, in ranks that are started here unless a launcher has done so. Return the exit code.

    Args:
        options: The command line; ``--ranks`` says how many.
        words: The same as words, for the ranks that are started.
        run: Runs the benchmark on each rank.
        ranks: How many without ``--ranks``. If 1, a single rank is this process.
        env: Variables for the ranks that are started here, set before they load NumPy.
    """
    wanted = options.ranks or ranks
    if launched_size() is None and max(wanted, ranks) > 1:
        code = run_ranks(wanted, ["-m", "zerort", *words, *Screen.words()], env=env).code
        return code if code in (0, 2) else 1
    world = World(load_mpi())
    if options.ranks not in (None, world.size):
        raise UsageError(f"--ranks: Expected the {world.size} ranks that the launcher started, got {options.ranks}.")
    return run(world)


def rounds_table(
    title: str,
    unit: str,
    figures: Mapping[str, Sequence[float]],
    *,
    digits: int,
    more: Mapping[str, Mapping[str, str]],
) -> Table:
    """Return a table with a line for each contender: median, smallest and largest figure over the rounds.

    Args:
        title: Above the table.
        unit: Of the figures.
        figures: By contender, one for each round.
        digits: Decimals that are shown.
        more: Further columns by heading; each has cells for some of the contenders.
    """
    table = new_table(title)
    for heading in ("", unit, "min", "max", *more):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, every in figures.items():
        cells = [f"{one:.{digits}f}" for one in (statistics.median(every), min(every), max(every))]
        table.add_row(name, *cells, *(column.get(name, "") for column in more.values()))
    return table


def wrong_line(what: str, count: int) -> str:
    """Return the line of a legend that says how much of the data was wrong."""
    return f"# wrong {what}: {count}" + (": THE DATA IS WRONG" if count else "")
