"""Arguments of ``zerort bench nvme``, ``offload`` and ``checkpoint``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, parse_count, parse_nbytes, parse_numel
from zerort.cli.bench.options import add_directory, add_json, add_ranks, add_rounds, add_trace

__all__ = ["add_bench_checkpoint", "add_bench_nvme", "add_bench_offload"]

_NVME = """\
Measure how fast a store on this disk writes and reads against the disk itself: plain blocks by as many threads
(preadv, pwritev), and fio if it is installed, in turn on one file.

examples:
  zerort bench nvme
  zerort bench nvme --dir /mnt/nvme --nbytes 4GiB --rounds 7
  zerort bench nvme --unchecked --json result.json"""

_OFFLOAD = """\
Measure AdamW over state on a disk: read, update, write back, a few chunks at a time. Beside it, in turn,
what bounds it: the same reads and writes without computing, and the same computing without a disk. Started without
mpirun and with --ranks above 1, this starts the ranks itself; each has its own part of the parameters.

examples:
  zerort bench offload
  zerort bench offload --numel 50M --depth 4 --dir /mnt/nvme
  zerort bench offload --ranks 2 --trace offload.json"""

_CHECKPOINT = """\
Measure save and load of a checkpoint against the disk itself: plain blocks, written and read by the same number of
threads, past the page cache in the same way, in the same run. Started without mpirun, this starts the ranks itself.

examples:
  zerort bench checkpoint
  zerort bench checkpoint --ranks 8 --nbytes 4GiB --dir /mnt/nvme
  mpirun -n 8 python -m zerort bench checkpoint --json result.json"""


def add_bench_nvme(benches: Commands) -> None:
    """Add ``zerort bench nvme``."""
    one = add_command(benches, "nvme", _serve_nvme, help="a store on a disk against the disk's speed", text=_NVME)
    add_directory(one)
    one.add_argument(
        "--nbytes", type=parse_nbytes, default=1024**3, metavar="S", help="size of the file (default: 1GiB)"
    )
    one.add_argument("--threads", type=parse_count(1), default=4, metavar="N", help="I/O threads (default: 4)")
    one.add_argument("--unchecked", action="store_true", help="without checksums")
    add_rounds(one)
    add_json(one)


def add_bench_offload(benches: Commands) -> None:
    """Add ``zerort bench offload``."""
    one = add_command(benches, "offload", _serve_offload, help="AdamW over state on a disk", text=_OFFLOAD)
    add_ranks(one, 1)
    add_directory(one)
    one.add_argument("--numel", type=parse_numel, default=200_000_000, metavar="N", help="parameters (default: 200M)")
    one.add_argument(
        "--chunk",
        type=parse_nbytes,
        default=16 * 1024**2,
        metavar="S",
        help="size of a chunk of each tensor (default: 16MiB)",
    )
    one.add_argument(
        "--depth", type=parse_count(1), default=3, metavar="N", help="chunks in memory at once (default: 3)"
    )
    one.add_argument("--threads", type=parse_count(1), default=4, metavar="N", help="I/O threads (default: 4)")
    one.add_argument("--unchecked", action="store_true", help="without checksums")
    add_rounds(one)
    add_json(one)
    add_trace(one, "rank 0")


def add_bench_checkpoint(benches: Commands) -> None:
    """Add ``zerort bench checkpoint``."""
    one = add_command(
        benches, "checkpoint", _serve_checkpoint, help="save and load against the disk's speed", text=_CHECKPOINT
    )
    add_ranks(one)
    one.add_argument(
        "--nbytes", type=parse_nbytes, default=1024**3, metavar="S", help="size of the state (default: 1GiB)"
    )
    add_directory(one)
    add_rounds(one)
    add_json(one)
    one.add_argument("--inside", help=argparse.SUPPRESS)  # the directory that the starting process made


def _serve_nvme(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.nvme import run_nvme

    return run_nvme(options)


def _serve_offload(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.offload import run_offload

    return run_offload(options, words)


def _serve_checkpoint(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.bench.disk.checkpoint import run_checkpoint

    return run_checkpoint(options, words)
