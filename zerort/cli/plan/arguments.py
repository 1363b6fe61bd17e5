"""Arguments of ``zerort plan``."""

from __future__ import annotations

import argparse

from zerort.cli.arguments import Commands, add_command, output_file, parse_count, parse_directory, parse_ranks
from zerort.codec import ROWS
from zerort.config import ZERO, parse_bytes
from zerort.errors import CallError
from zerort.layout.dtypes import TRAINABLE
from zerort.optim import MASTERS

__all__ = ["OPTIMIZERS", "add_plan"]

OPTIMIZERS = ("adamw", "lion", "sgd", "sgd-momentum", "adafactor")
_DTYPES = tuple(TRAINABLE)

_PLAN = """\
Forecast the memory that a model needs under a budget, the part that goes to the disk, and the seconds of reading and
writing that this adds to each step; without a budget, the memory that each plan needs. Nothing is loaded and nothing
is trained. Exit code 0: it fits; 1: it does not.

examples:
  zerort plan model.safetensors --ranks 8
  zerort plan model.safetensors --ranks 8 --host 8GiB --nvme 200GiB
  zerort plan params.json --ranks 2 --host 3GiB --nvme 40GiB --dtype bfloat16 --scratch /mnt/nvme
  zerort plan run/checkpoint --ranks 4 --host 16GiB --read-speed 3.2 --write-speed 1.8
  zerort plan model.safetensors --ranks 8 --device cuda --device 20GiB --host 64GiB
  zerort plan model.safetensors --ranks 8 --history peaks.jsonl --batch 64
  zerort plan mymodel:parameters --ranks 8 --device 2GiB --host 8GiB --nvme 1TiB --json plan.json

MODEL is one of
  params.json              {"block0": {"w": [1024, 1024], "b": {"shape": [1024], "dtype": "bfloat16"}}, …}: tensors by
                           unit and name, or by name alone; a dtype that is not given is float32
  model.safetensors        the head of the file is read, or of all files of a model.safetensors.index.json
  a directory              a checkpoint of zerort; its parameters are float32, --dtype says what they are trained in
  module:function          called without arguments, returns what params.json holds; arrays and TensorSpecs will do

Sizes are per rank. On a machine without a GPU, device and host are one memory, and their sum counts; --device cuda
plans for ranks with a GPU each, whose memory is apart."""


def add_plan(commands: Commands) -> None:
    """Add ``zerort plan``."""
    one = add_command(
        commands, "plan", _serve_plan, help="forecast the memory, disk and time a model needs", text=_PLAN
    )
    one.add_argument("model", metavar="MODEL", help="what to plan for; see above")
    one.add_argument(
        "--ranks", type=parse_ranks, default=1, metavar="N", help="ranks that share the model (default: 1)"
    )
    one.add_argument(
        "--device",
        type=_device,
        action="append",
        default=[],
        metavar="S",
        help="cuda or host: where ranks compute (default: host); or a size: budget of GPU memory per rank",
    )
    for name, what in (("host", "host memory"), ("nvme", "disk space")):
        one.add_argument(
            f"--{name}", type=_size, default=0, metavar="S", help=f"budget of {what} per rank (default: none)"
        )
    one.add_argument("--stage", type=int, choices=tuple(ZERO), help="ZeRO stage (default: 3; without a budget, all)")
    one.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="whose state is counted (default: adamw)")
    one.add_argument("--master", choices=tuple(MASTERS), help="form of adamw's master weights (default: float32)")
    one.add_argument("--moments", choices=("float32", "int8"), help="form of adamw's moments (default: float32)")
    one.add_argument("--dtype", choices=_DTYPES, help="dtype of all floating-point parameters (default: as MODEL says)")
    one.add_argument(
        "--gradient-dtype", choices=_DTYPES, help="dtype that gradients are summed in (default: the parameters')"
    )
    one.add_argument(
        "--frozen",
        action="append",
        default=[],
        metavar="G",
        help="pattern of names of tensors that are not trained; may be repeated",
    )
    one.add_argument(
        "--frozen-format", choices=tuple(ROWS), help="codes that those rest in (default: none, as they are)"
    )
    one.add_argument(
        "--tie",
        action="append",
        default=[],
        metavar="UNIT=NAME",
        help="a unit that uses another one's tensor, too: head=embed.table; may be repeated",
    )
    one.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="NAME",
        help="a table of which batches touch few rows, by its full name: embed.table; may be repeated",
    )
    one.add_argument(
        "--micro-steps", type=parse_count(1), default=1, metavar="N", help="gradients that a step sums (default: 1)"
    )
    one.add_argument(
        "--virtual-shards",
        type=parse_count(1),
        metavar="N",
        help="micro-batches of a step that is the same to the bit on any number of ranks",
    )
    one.add_argument(
        "--accumulate",
        choices=("sharded", "local"),
        help="how they are summed (default: sharded where the plan shards gradients)",
    )
    one.add_argument(
        "--prefetch", type=parse_count(0), default=1, metavar="N", help="units gathered ahead (default: 1)"
    )
    one.add_argument("--buckets", type=parse_count(1), default=2, metavar="N", help="gradient buckets (default: 2)")
    one.add_argument(
        "--machines", type=parse_count(1), default=1, metavar="N", help="machines, with a disk each (default: 1)"
    )
    one.add_argument(
        "--history", metavar="F", help="peaks of a run (zr.open(history=F)): also predict whole steps from them"
    )
    one.add_argument(
        "--batch",
        type=parse_count(1),
        metavar="N",
        help="samples that a rank computes at once in those (default: the most of the history)",
    )
    one.add_argument("--scratch", type=parse_directory, metavar="DIR", help="measure this directory's disk")
    one.add_argument("--read-speed", type=_speed, metavar="GB/S", help="speed of the disk, instead of measuring it")
    one.add_argument("--write-speed", type=_speed, metavar="GB/S", help="speed of the disk, instead of measuring it")
    one.add_argument("--json", type=output_file, metavar="F", help="also write the forecast of every rank as JSON")


def _device(text: str) -> int | str:
    return text if text in ("cuda", "host") else _size(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except CallError as error:
        raise argparse.ArgumentTypeError(f"Expected a size such as 8GiB, got {text!r}.") from error


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e6:
        raise argparse.ArgumentTypeError(f"Expected a speed in GB/s above 0 such as 2.5, got {text!r}.")
    return speed


def _serve_plan(options: argparse.Namespace, words: list[str]) -> int:
    from zerort.cli.plan.command import run_plan

    return run_plan(options)
