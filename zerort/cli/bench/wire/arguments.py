"""Arguments of ``zerort bench wire``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, output_file, parse_numel
from zerort.cli.bench.hosts.wire import parse_rate
from zerort.cli.bench.options import add_json, add_rounds, add_seconds
from zerort.cli.bench.step.arguments import add_model

__all__ = ["add_bench_wire"]

_WIRE = """\
Measure the codecs on one thread: encoding and decoding against a memcpy of the same values, bytes, and the largest
error against its bound. Then what share of a small model an update changes, by learning rate: what deltas send.

With --step, a ZeRO-3 training step between two hosts of one rank, uncoded and with parameters as int8 and gradients as
int4, in turn: as root on network namespaces of this machine, over links of each rate and over one without a limit.
Started by mpirun, on the hosts that the ranks are on.

examples:
  zerort bench wire
  zerort bench wire --numel 1M --json result.json
  zerort bench wire --step --rates 1gbit,200mbit --plot link.png
  mpirun -hosts a,b -ppn 1 python -m zerort bench wire --step"""


def add_bench_wire(benches: Commands) -> None:
    """Add ``zerort bench wire``."""
    one = add_command(
        benches, "wire", _serve_wire, help="codecs: speed, bytes and error; a step on a slow link", text=_WIRE
    )
    one.add_argument("--numel", type=parse_numel, default=16_000_000, metavar="N", help="values (default: 16M)")
    add_seconds(one, 0.5)
    one.add_argument("--step", action="store_true", help="also a training step between two hosts, uncoded and coded")
    one.add_argument(
        "--rates",
        type=_parse_rates,
        default=("1gbit", "200mbit"),
        metavar="R,…",
        help="of the links of hosts that are made for --step (default: 1gbit,200mbit)",
    )
    add_model(one, width=512, layers=10, rows=4)
    add_rounds(one)
    add_json(one)
    one.add_argument("--plot", type=output_file, metavar="F.png", help="also draw the steps of --step")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw
    one.add_argument("--part", type=output_file, help=argparse.SUPPRESS)  # where ranks on namespaces leave figures


def _parse_rates(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(parse_rate(part) for part in text.split(",")))


def _serve_wire(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.wire.command import run_wire

    return run_wire(options, words)
