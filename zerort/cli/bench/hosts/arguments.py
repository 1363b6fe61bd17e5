"""Arguments of ``zerort bench hosts``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, names_of, output_file, parse_count, parse_ranks, parse_sizes
from zerort.cli.bench.hosts.wire import parse_delay, parse_rate
from zerort.cli.bench.options import add_json, add_rounds, add_seconds, add_trace
from zerort.cli.bench.step.arguments import add_model

__all__ = ["add_bench_hosts"]

_OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "barrier")
_NONE = "none"

_HOSTS = """\
Measure every collective between hosts, beside MPICH's own, plain sockets and the bound of the wire, all in turn in one
run. As root this makes the hosts itself, as network namespaces on this machine, and removes them whatever happens.
Started by mpirun, it measures the hosts that the ranks are on.

examples:
  zerort bench hosts --hosts 4 --ranks-per-host 2 --rate 1gbit
  zerort bench hosts --hosts 2,4,8 --rate 1gbit --sizes 1K,64K,64M --ops all_gather,all_reduce --plot hosts.png
  zerort bench hosts --hosts 2 --ranks-per-host 1 --ops none --step --trace step.json
  mpirun -hosts a,b -ppn 2 python -m zerort bench hosts --rate 25gbit --json result.json

sizes: bytes of the full buffer (what all_gather delivers, what reduce_scatter takes), rounded down to whole elements
for every rank, at least one; 64K,1M is a list, and 8..128M are 8 32 128 512 2K … 128M."""


def add_bench_hosts(benches: Commands) -> None:
    """Add ``zerort bench hosts``."""
    one = add_command(benches, "hosts", _serve_hosts, help="every collective, and a step, between hosts", text=_HOSTS)
    one.add_argument(
        "--hosts", type=_parse_hosts, default=(2,), metavar="H,…", help="hosts to make, one number or more (default: 2)"
    )
    one.add_argument(
        "--ranks-per-host", type=parse_ranks, default=2, metavar="N", help="ranks on each of them (default: 2)"
    )
    one.add_argument(
        "--rate", type=parse_rate, metavar="R", help="of every host's link, each way: 1gbit (default: no limit)"
    )
    one.add_argument("--delay", type=parse_delay, metavar="T", help="one way between hosts: 5ms (default: none added)")
    one.add_argument(
        "--sizes",
        type=parse_sizes,
        default=parse_sizes("8..128M,256M"),
        metavar="S",
        help="sizes, see above (default: 8..128M,256M)",
    )
    one.add_argument(
        "--ops",
        type=names_of((*_OPS, _NONE)),
        default=_OPS,
        metavar="OP,…",
        help=f"operations, or {_NONE} (default: {', '.join(_OPS)})",
    )
    one.add_argument(
        "--step", action="store_true", help="also a ZeRO-3 step, beside the same ranks on one host of namespaces"
    )
    add_model(one, width=512, layers=10, rows=4)
    add_rounds(one)
    add_seconds(one, 0.25)
    add_json(one)
    one.add_argument(
        "--plot", type=output_file, metavar="F.png", help="also draw latency and bandwidth over sizes and hosts"
    )
    add_trace(one)
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw
    one.add_argument("--part", type=output_file, help=argparse.SUPPRESS)  # where ranks on namespaces leave figures


def _parse_hosts(text: str) -> tuple[int, ...]:
    read = parse_count(1)
    return tuple(dict.fromkeys(read(part) for part in text.split(",")))


def _serve_hosts(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.hosts.command import run_hosts

    return run_hosts(options, words)
