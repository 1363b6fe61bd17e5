"""Arguments of ``zerort bench copies``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, parse_count, parse_numel, parse_sizes
from zerort.cli.bench.options import add_json, add_seconds

__all__ = ["add_bench_copies"]

_COPIES = """\
Measure copies between the host and a GPU: in, out and both ways at once, from pinned and from pageable memory; and a
step of AdamW whose state is in pinned memory, computed on either side.

examples:
  zerort bench copies
  zerort bench copies --gpu 3 --sizes 64K..1G --json result.json"""


def add_bench_copies(benches: Commands) -> None:
    """Add ``zerort bench copies``."""
    one = add_command(benches, "copies", _serve_copies, help="host to GPU and back, pinned and pageable", text=_COPIES)
    one.add_argument("--gpu", type=parse_count(0), default=0, metavar="N", help="which GPU (default: 0)")
    one.add_argument(
        "--sizes",
        type=parse_sizes,
        default=parse_sizes("64K..256M"),
        metavar="S",
        help="bytes per copy (default: 64K..256M)",
    )
    one.add_argument(
        "--parameters", type=parse_numel, default=8_000_000, metavar="N", help="parameters to update (default: 8M)"
    )
    add_seconds(one, 0.5)
    add_json(one)


def _serve_copies(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.copies.command import run_copies

    return run_copies(options)
