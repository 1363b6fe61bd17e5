"""`Sweep`: every operation at every dtype and size, and a table for each operation; for host memory and for GPUs."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from zerort.cli.bench.collectives.operations import OPERATIONS, Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.tables import collectives_table
from zerort.cli.bench.collectives.trials import Trial
from zerort.cli.bench.harness import Benchmark, Result
from zerort.cli.bench.timing import REPETITIONS, Timing, time_interleaved
from zerort.cli.screen import Bar
from zerort.cli.world import World
from zerort.comm import Group
from zerort.config import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Sweep"]


class Sweep(Benchmark):
    """Collectives of a group, checked and timed.

    Args:
        options: The command line.
        group: Whose collectives.
        world: All ranks.
    """

    name = "collectives"
    repetitions = REPETITIONS
    no_room: ClassVar[type[Exception]]
    """Raised by `point`, on every rank alike, for a size that there is no memory for; that size is skipped."""

    def __init__(self, options: argparse.Namespace, group: Group, world: World) -> None:
        super().__init__(options, world=world, group=group)
        self._group = group
        self.rows: list[Row] = []
        self.skipped: dict[int, str] = {}

    @abstractmethod
    def point(self, operation: Operation, dtype: str, size: int) -> Iterator[Row]:
        """Check and time one operation at one size of the full buffer."""

    @abstractmethod
    def conclude(self) -> tuple[list[str], dict[str, Any]]:
        """Return the legend, and what JSON holds beside the rows. Every rank calls this."""

    def measure(self) -> Result:
        """Print a table for each operation as soon as it is measured."""
        options = self.options
        with self.screen.bar(len(options.ops) * len(options.dtypes) * len(options.sizes)) as bar:
            for op in options.ops:
                found = list(self._rows_of(op, bar))
                self.rows += found
                for name in dict.fromkeys(row.op for row in found):
                    part = [row for row in found if row.op == name]
                    self.screen.print(self.table(name, part))
        for size, why in self.skipped.items():
            self.screen.print(f"# skipped {format_bytes(size)}: {why}")
        legend, more = self.conclude()
        skipped = [{"nbytes": size, "why": why} for size, why in self.skipped.items()]
        return Result(
            tables=[],
            legend=legend,
            figures={"rows": [row.as_json() for row in self.rows], "skipped": skipped, **more},
            failed=not self.rows or any(row.wrong for row in self.rows),
        )

    def table(self, title: str, rows: Sequence[Row]) -> Table:
        """Return the table of one operation."""
        return collectives_table(title, rows, compare=bool(self.options.compare))

    def meet(self) -> None:
        """Wait until every rank is here."""
        self._group.barrier().wait()

    def check_and_time(
        self, trials: Mapping[str, Trial], **others: Callable[[], object]
    ) -> tuple[dict[str, Timing], dict[str, int]]:
        """Return timings, and wrong elements over all ranks before and after thousands of calls, by name of the trial.

        Args:
            trials: What to run, by name.
            others: Works that are timed in between, once per repetition.
        """
        wrong = {name: trial.check() for name, trial in trials.items()}
        works: dict[str, Callable[[], object]] = {name: trial.run for name, trial in trials.items()}
        timings = self._time(works | others, once=list(others))
        for name, trial in trials.items():
            wrong[name] += trial.check()
        return timings, {name: self.world.total(count) for name, count in wrong.items()}

    def _rows_of(self, op: str, bar: Bar) -> Iterator[Row]:
        if op == "barrier":
            bar.step("barrier")
            yield self._barrier()
            bar.step("barrier", advance=len(self.options.dtypes) * len(self.options.sizes))
            return
        for dtype in self.options.dtypes:
            for size in self.options.sizes:
                bar.step(f"{op} {format_bytes(size)} {dtype}")
                try:
                    if size not in self.skipped:
                        yield from self.point(OPERATIONS[op], dtype, size)
                except self.no_room as error:
                    self.skipped[size] = str(error)
                bar.step("", advance=1)

    def _barrier(self) -> Row:
        works: dict[str, Callable[[], object]] = {"out": self.meet}
        if self.options.compare:
            works["mpi"] = self.world.comm.Barrier
        timings = self._time(works)
        sides = {name: make_side(name, timings, {}, nbytes=0, bus=0.0) for name in works}
        return Row("barrier", "none", "none", 0, 0, sides["out"], mpi=sides.get("mpi"))

    def _time(self, works: dict[str, Callable[[], object]], once: Sequence[str] = ()) -> dict[str, Timing]:
        return time_interleaved(
            works,
            seconds=self.options.seconds,
            repetitions=self.repetitions,
            once=once,
            meet=self.meet,
            maxima=self.world.maxima,
        )
