"""Options that several benchmarks share, each worded once."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerort.cli.arguments import output_file, parse_directory, parse_ranks, parse_rounds, parse_seconds

__all__ = ["add_directory", "add_json", "add_ranks", "add_rounds", "add_seconds", "add_trace"]


def add_ranks(one: argparse.ArgumentParser, default: int = 2) -> None:
    """Add ``--ranks``, for `run_in_ranks`."""
    one.add_argument("--ranks", type=parse_ranks, metavar="N", help=f"ranks to start (default: {default})")
    one.add_argument("--screen", help=argparse.SUPPRESS)  # the terminal that the starting process saw


def add_directory(one: argparse.ArgumentParser) -> None:
    """Add ``--dir``."""
    help = "a directory on the disk to measure (default: .)"
    one.add_argument("--dir", type=parse_directory, default=Path(), metavar="D", help=help)


def add_rounds(one: argparse.ArgumentParser) -> None:
    """Add ``--rounds``, for `Benchmark.rounds`."""
    one.add_argument("--rounds", type=parse_rounds, default=5, metavar="N", help="how often to measure (default: 5)")


def add_seconds(one: argparse.ArgumentParser, default: float) -> None:
    """Add ``--seconds``, for `time_interleaved`."""
    help = f"time for each figure (default: {default:g})"
    one.add_argument("--seconds", type=parse_seconds, default=default, metavar="T", help=help)


def add_json(one: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    one.add_argument("--json", type=output_file, metavar="F", help="also write the figures as JSON")


def add_trace(one: argparse.ArgumentParser, ranks: str = "all ranks") -> None:
    """Add ``--trace``."""
    one.add_argument("--trace", type=output_file, metavar="F.json", help=f"also write a Perfetto trace of {ranks}")
