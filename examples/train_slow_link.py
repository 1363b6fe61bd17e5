"""Train between hosts with a slow link: the same training with values as they are, and as codes, side by side.

    mpirun -hosts a,b -ppn 1 python examples/train_slow_link.py       # two hosts of yours
    python examples/train_slow_link.py --rate 200mbit                 # as root: two hosts of network namespaces
    mpirun -n 2 python examples/train_slow_link.py --over all         # one host: codes for the sake of their results
    … train_slow_link.py --exact                                      # bfloat16, and fewer bytes with the same bits

Parameters travel as int8 and gradients as int4, whose losses each rank makes up for with its next ones. Updates and
checkpoints are of exact values. The report of each step has the bytes before and after coding.

With --exact nothing is lost: gathered parameters stay on each host until the next update (``secondary="host"``), or
only what an update has changed of them travels (``Wire(gather="delta")``), and all losses are the same.
"""

from __future__ import annotations

import argparse
import sys
import time

import zerort as zr
from common import console_of, whole  # examples/common.py
from zerort.cli.bench.hosts.namespaces import Hosts, expect_hosts
from zerort.cli.bench.hosts.wire import parse_rate
from zerort.cli.ranks import ending_as_exit, run_command
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Walk


def main() -> int:
    """Make hosts if asked to, and train on those that there are."""
    options = parse()
    if options.rate is not None and launched_size() is None:
        with ending_as_exit():
            expect_hosts(rate=options.rate)
            with Hosts(2, rate=options.rate) as hosts:
                code = run_command(hosts.command(1, [__file__, *sys.argv[1:]])).code
                return 1 if code is None else code
    with zr.open_group() as group:
        plain = zr.Plan.zero(3)
        ways: list[tuple[zr.Plan, zr.Wire | None]] = [(plain, None)]
        if options.exact:
            ways += [(zr.Plan.zero(3, secondary="host"), None), (plain, zr.Wire(gather="delta", over=options.over))]
        else:
            ways += [(plain, zr.Wire(gather="int8", reduce="int4", feedback=True, over=options.over))]
        for plan, wire in ways:
            train(group, plan, wire, options)
    return 0


def train(group: zr.Group, plan: zr.Plan, wire: zr.Wire | None, options: argparse.Namespace) -> None:
    """Train from the beginning, and show what a step moved and took."""
    model = ByteModel(width=options.width, layers=options.layers, context=64, heads=4)
    text = ByteText(rows=options.rows * group.size, context=64)
    with zr.open(plan, zr.AdamW(lr=options.lr), group=group, wire=wire) as rt:
        console, walk = console_of(rt), Walk(rt, model, text, dtype="bfloat16" if options.exact else "float32")
        walk.train(1)  # the first step touches memory
        began = time.perf_counter()
        losses = walk.train(options.steps)
        seconds = (time.perf_counter() - began) / options.steps
        report = walk.reports[-1]
        moved = sum(report.bytes_moved.values())
        before = moved + sum(report.bytes_uncoded[name] - report.bytes_moved[name] for name in report.bytes_uncoded)
        way = (report.wire or "as they are") + ", gathered once" * (plan.secondary is not None)
        console.print(
            f"{way}: {1e3 * seconds:.0f} ms a step, {format_bytes(moved)} through collectives "
            f"(uncoded: {format_bytes(before)}), loss {losses[-1]:.4f} after {options.steps} steps"
        )


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=whole, default=20)
    parser.add_argument("--width", type=whole, default=256)
    parser.add_argument("--layers", type=whole, default=4)
    parser.add_argument("--rows", type=whole, default=4, help="per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--exact", action="store_true", help="bfloat16 parameters, and no codes that lose anything")
    parser.add_argument("--over", choices=("hosts", "all"), default="hosts", help="where values are coded")
    parser.add_argument("--rate", type=parse_rate, metavar="R", help="make two hosts with a link of this rate: 200mbit")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
