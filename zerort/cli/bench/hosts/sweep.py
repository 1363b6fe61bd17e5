"""`HostsSweep`: every collective at every size between the hosts that the ranks are on, and a step if asked for.

Each size: ours, MPI's own and plain sockets, in turn, repetition by repetition; data is checked before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerort.cli.bench.collectives.buffers import Buffers, NoRoom
from zerort.cli.bench.collectives.operations import Operation
from zerort.cli.bench.collectives.rows import Row, make_side
from zerort.cli.bench.collectives.sweep import Sweep
from zerort.cli.bench.collectives.trials import Pattern, Trial, mpi_trials, our_trials, shared_trial
from zerort.cli.bench.harness import Result
from zerort.cli.bench.hosts.rows import HostRow, hosts_legend, hosts_table
from zerort.cli.bench.hosts.sockets import RawSockets
from zerort.cli.bench.hosts.wire import Wire, transfers
from zerort.cli.machine import library_title
from zerort.cli.world import World
from zerort.comm import Group
from zerort.errors import SharedMemoryError
from zerort.native.dtypes import numpy_dtype
from zerort.trace.files import write_json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["HostsSweep", "write_results"]

_DTYPE = "float32"


class HostsSweep(Sweep):
    """Collectives between hosts, beside MPI's, plain sockets and the wire's bound.

    Args:
        options: The command line.
        group: Whose collectives.
        world: All ranks.
        step: Measures a training step; None for none.
    """

    name = "hosts"
    no_room = NoRoom

    def __init__(
        self, options: argparse.Namespace, group: Group, world: World, *, step: Callable[[], Result] | None
    ) -> None:
        options.dtypes, options.compare = (_DTYPE,), "mpi"
        options.ops = tuple(op for op in options.ops if op != "none")
        super().__init__(options, group, world)
        self.repetitions = options.rounds
        self._step = step
        names = world.all(socket.gethostname())
        self._hosts = [list(dict.fromkeys(names)).index(name) for name in names]
        count = len(set(self._hosts))
        self._wire = Wire(tuple(self._hosts.count(h) for h in range(count)), options.rate, options.delay)
        self._sockets: RawSockets | None = None
        in_namespaces = options.part is not None
        ranks_here = world.size if in_namespaces else None
        self._buffers = Buffers(group, world, arrays="window", compare=True, ranks_here=ranks_here)

    def measure(self) -> Result:
        """Measure the collectives, then the step."""
        result = self._collectives() if self.options.ops else Result([], [], {"rows": [], "skipped": []}, failed=False)
        if self._step is None:
            return result
        step = self._step()
        return dataclasses.replace(
            result,
            tables=[*result.tables, *step.tables],
            legend=[*result.legend, *step.legend],
            figures={**result.figures, "step": step.figures["rows"]},
            failed=result.failed or step.failed,
        )

    def _collectives(self) -> Result:
        if len(self._wire.ranks) == 1:
            return super().measure()
        with contextlib.closing(RawSockets(self.world, self._hosts)) as self._sockets:
            return super().measure()

    def conclude(self) -> tuple[list[str], dict[str, Any]]:
        """Return the legend."""
        self._buffers.free()
        if len(self.skipped) == len(self.options.sizes):
            raise SharedMemoryError(f"Expected a size that fits, got none. {next(iter(self.skipped.values()))}")
        return hosts_legend(self._host_rows(self.rows), rounds=self.repetitions), {}

    def save(self, machine: dict[str, Any], result: Result) -> None:
        """Write the trace, and the figures for whoever joins them."""
        if self.options.trace is not None:
            self._group.save_trace(self.options.trace)
        if self.world.rank == 0:
            found = {"machine": machine, **result.figures}
            if self.options.part is None:
                write_results(self.options, [found])
            else:  # for the process that made the hosts, which joins them
                write_json(self.options.part, found)

    def describe(self) -> dict[str, Any]:
        """Say where the ranks are, and what lies between."""
        return {
            "mpi": library_title(self.world.mpi) if self.world.mpi is not None else None,
            "ranks": self.world.size,
            "ranks_of_hosts": self._wire.ranks,
            "rate": self.options.rate,
            "delay": self.options.delay,
            "in_namespaces": self.options.part is not None,
            "group": repr(self._group),
            "kind": self._group.kind,
        }

    def head(self, machine: dict[str, Any]) -> list[str]:
        """Say the same for people."""
        shape = "+".join(map(str, machine["ranks_of_hosts"]))
        where = "network namespaces of this machine" if machine["in_namespaces"] else "where mpirun put the ranks"
        return [
            f"# MPI: {machine['mpi']}",
            f"# {machine['group']}",
            f"# {len(machine['ranks_of_hosts'])} hosts of {shape} ranks, {where}, {machine['cores']} cores in all; "
            f"links: {machine['rate'] or 'no limit'}, delay {machine['delay'] or 'none added'}",
        ]

    def table(self, title: str, rows: Sequence[Row]) -> Table:
        """Return the table of one operation."""
        hosts = len(self._wire.ranks)
        return hosts_table(f"{title}, {hosts} host{'s' * (hosts > 1)}", self._host_rows(rows))

    def point(self, operation: Operation, dtype: str, size: int) -> Iterator[Row]:
        """Check and time one operation at one size: ours, MPI's and plain sockets."""
        group, n, width = self._group, self.world.size, numpy_dtype(dtype).itemsize
        share = max(1, size // (n * width))
        nbytes = share * n * width
        ours, theirs = self._buffers.of(nbytes)
        assert theirs is not None
        pattern = Pattern(dtype, n)
        mine, its = ([array.view(numpy_dtype(dtype)) for array in pair] for pair in (ours, theirs))
        trials = {"out": our_trials(group, operation, mine[0], mine[1], pattern)["out"]}
        mpi = mpi_trials(self.world.mpi, group, operation, its[0], its[1], pattern)
        trials["mpi"] = mpi.get("mpi") or mpi["mpi in"]
        if self._sockets is not None:
            carry, phases = self._sockets.carry, transfers(operation.name, nbytes, self._wire.ranks)
            trials["sockets"] = Trial(lambda: carry(phases), lambda: 0)
        shards = None
        if operation.name == "all_gather":
            try:
                shards = group.zeros_shared([share] * n, dtype)
            except SharedMemoryError as error:
                raise NoRoom(str(error)) from None
            trials["shared"] = shared_trial(group, operation, shards, pattern)
        timings, wrong = self.check_and_time(trials)
        if shards is not None:
            whole, shards = shards.full, None
            group.free(whole)
        sides = {name: make_side(name, timings, wrong, nbytes=nbytes, bus=operation.bus(n)) for name in trials}
        seconds = self._wire.seconds(operation.name, nbytes)

        def row(op: str, side: str) -> HostRow:
            plain = Row(
                op=op,
                dtype=dtype,
                redop="sum" if operation.reduces else "none",
                nbytes=nbytes,
                count=share if operation.splits else share * n,
                out_of_place=sides[side],
                mpi=sides["mpi"],
            )
            return HostRow.of(plain, wire_us=seconds and 1e6 * seconds, sockets=sides.get("sockets"))

        yield row(operation.name, "out")
        if "shared" in sides:
            yield row("all_gather shared", "shared")

    def _host_rows(self, rows: Sequence[Row]) -> list[HostRow]:
        return [row if isinstance(row, HostRow) else HostRow.of(row) for row in rows]  # a barrier carries nothing


def write_results(options: argparse.Namespace, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write the files that were asked for.

    Args:
        options: The command line.
        parts: For each number of hosts, the machine and what was found.
    """
    if options.json is not None and parts:
        write_json(options.json, {"bench": HostsSweep.name, "parts": list(parts)})
    if options.plot is not None and any(part["rows"] for part in parts):
        from zerort.cli.bench.hosts.plots import draw_hosts

        draw_hosts(options.plot, [part for part in parts if part["rows"]])
