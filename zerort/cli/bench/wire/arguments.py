"""Arguments of ``zerort bench wire``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, parse_numel
from zerort.cli.bench.options import add_json, add_seconds

__all__ = ["add_bench_wire"]

_WIRE = """\
Measure the codecs on one thread: encoding and decoding against a memcpy of the same values, bytes, and the largest
error against its bound. Then what share of a small model an update changes, by learning rate: what deltas send.

examples:
  zerort bench wire
  zerort bench wire --numel 1M --json result.json"""


def add_bench_wire(benches: Commands) -> None:
    """Add ``zerort bench wire``."""
    one = add_command(benches, "wire", _serve_wire, help="codecs: speed, bytes and error", text=_WIRE)
    one.add_argument("--numel", type=parse_numel, default=16_000_000, metavar="N", help="values (default: 16M)")
    add_seconds(one, 0.5)
    add_json(one)


def _serve_wire(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.wire.command import run_wire

    return run_wire(options)
