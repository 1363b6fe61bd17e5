"""The words of ``zerort bench nvme`` and ``zerort bench offload``, and who serves them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from zerort.cli.arguments import (
    output_file,
    parse_count,
    parse_directory,
    parse_nbytes,
    parse_numel,
    parse_ranks,
    parse_rounds,
)

__all__ = ["add_bench_nvme", "add_bench_offload"]

Command = Callable[..., argparse.ArgumentParser]
"""What adds a command: (parents, name, serve, help=, text=)."""

_NVME = """\
Measure how fast a store on this disk writes and reads against the disk itself: plain blocks by as many threads
(preadv, pwritev), and fio if it is installed, in turn on one file.

examples:
  zerort bench nvme
  zerort bench nvme --dir /mnt/nvme --nbytes 4GiB --rounds 7
  zerort bench nvme --unchecked --json result.json"""

_OFFLOAD = """\
Measure AdamW over state that sleeps on a disk: read, update, write back, a few chunks at a time. Beside it, in turn,
what bounds it: the same reads and writes without computing, and the same computing without a disk. Started without
mpirun and with --ranks above 1, this starts the ranks itself; each has its own part of the parameters.

examples:
  zerort bench offload
  zerort bench offload --numel 50M --depth 4 --dir /mnt/nvme
  zerort bench offload --ranks 2 --trace offload.json"""


def add_bench_nvme(benches: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add ``zerort bench nvme``."""
    one = command(benches, "nvme", _serve_nvme, help="a store on a disk against the disk's speed", text=_NVME)
    one.add_argument("--dir", type=parse_directory, default=Path(), metavar="D", help="on the disk (default: .)")
    one.add_argument("--nbytes", type=parse_nbytes, default=1024**3, metavar="S", help="of the file (default: 1GiB)")
    one.add_argument("--threads", type=parse_count(1), default=4, metavar="N", help="that move blocks (default: 4)")
    one.add_argument("--unchecked", action="store_true", help="without checksums")
    one.add_argument("--rounds", type=parse_rounds, default=5, metavar="N", help="how often (default: 5)")
    one.add_argument("--json", type=output_file, metavar="F", help="also write the figures as JSON")


def add_bench_offload(benches: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add ``zerort bench offload``."""
    one = command(benches, "offload", _serve_offload, help="AdamW over state on a disk", text=_OFFLOAD)
    one.add_argument("--ranks", type=parse_ranks, metavar="N", help="ranks to start (default: 1)")
    one.add_argument("--dir", type=parse_directory, default=Path(), metavar="D", help="on the disk (default: .)")
    one.add_argument("--numel", type=parse_numel, default=200_000_000, metavar="N", help="parameters (default: 200M)")
    one.add_argument("--chunk", type=parse_nbytes, default=16 * 1024**2, metavar="S", help="of each tensor (16MiB)")
    one.add_argument("--depth", type=parse_count(1), default=3, metavar="N", help="slots (default: 3)")
    one.add_argument("--threads", type=parse_count(1), default=4, metavar="N", help="that move blocks (default: 4)")
    one.add_argument("--unchecked", action="store_true", help="without checksums")
    one.add_argument("--rounds", type=parse_rounds, default=5, metavar="N", help="how often (default: 5)")
    one.add_argument("--json", type=output_file, metavar="F", help="also write the figures as JSON")
    one.add_argument("--trace", type=output_file, metavar="F.json", help="also write a Perfetto trace of rank 0")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw


def _serve_nvme(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.nvme import run_nvme

    return run_nvme(options)


def _serve_offload(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.offload import run_offload

    return run_offload(options, words)
