"""Arguments of ``zerort doctor``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command

__all__ = ["add_doctor"]

_DOCTOR = """\
Check Python, MPI, shared memory, kernels, GPUs and a disk. Each finding is ok, warn or bad, with the cure.

examples:
  zerort doctor
  zerort doctor /mnt/nvme           also measures that disk
  mpirun -n 8 python -m zerort doctor"""


def add_doctor(commands: Commands) -> None:
    """Add ``zerort doctor``."""
    one = add_command(
        commands, "doctor", _serve_doctor, help="check this machine, with the cure for each problem", text=_DOCTOR
    )
    one.add_argument("directory", nargs="?", default=".", metavar="DIR", help="a directory on the disk to measure")
    one.add_argument("--json", action="store_true", help="print JSON instead of lines")


def _serve_doctor(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.doctor.command import run_doctor

    return run_doctor(options.directory, as_json=options.json)
