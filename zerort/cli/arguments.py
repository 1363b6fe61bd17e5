"""Commands, and the types of their arguments: sizes, counts, lists of names, files to write.

Each ``parse`` function turns text into a value or raises ``argparse.ArgumentTypeError``, which argparse prints as one
line, with exit code 2.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import TypeAlias

from zerort.config import parse_bytes
from zerort.errors import CallError

__all__ = [
    "Commands",
    "UsageError",
    "add_command",
    "names_of",
    "output_file",
    "parse_count",
    "parse_directory",
    "parse_nbytes",
    "parse_numel",
    "parse_ranks",
    "parse_rounds",
    "parse_seconds",
    "parse_sizes",
    "serve_help",
]


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where commands are added."""


class UsageError(CallError):
    """The words of the command line make no sense together; exit code 2."""


_POWERS = {"": 0, "K": 3, "M": 6, "G": 9}
_NUMEL = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)", re.IGNORECASE | re.ASCII)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes in bytes: a list ``64K,1M``, or ``4K..256M``, every fourth power of two from the first on.

    >>> parse_sizes("64K,1M")
    (65536, 1048576)
    >>> parse_sizes("4K..1M")
    (4096, 16384, 65536, 262144, 1048576)
    """
    sizes: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        try:
            first = parse_bytes(low)
            last = parse_bytes(high) if dots else first
        except CallError:
            raise argparse.ArgumentTypeError(
                f"Expected sizes such as 64K,1M or 4K..256M (powers of four from 4K on), got {text!r}."
            ) from None
        if not 1 <= first <= last:
            raise argparse.ArgumentTypeError(f"Expected sizes of at least 1 byte, from small to large, got {part!r}.")
        while first <= last:
            sizes.append(first)
            first *= 4
    return tuple(dict.fromkeys(sizes))


def parse_numel(text: str) -> int:
    """Read a number of elements, as people count parameters: K, M and G are powers of ten.

    >>> parse_numel("50M"), parse_numel("1.5K")
    (50000000, 1500)
    """
    found = _NUMEL.fullmatch(text.strip())
    if found is not None:
        amount = Decimal(found[1]).scaleb(_POWERS[found[2].upper()])
        if amount == int(amount) and amount >= 1:
            return int(amount)
    raise argparse.ArgumentTypeError(f"Expected a number of elements such as 50M or 1000, got {text!r}.")


def names_of(choices: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return what reads a comma-separated list of ``choices``; ``all`` is all of them."""
    known = tuple(choices)

    def parse(text: str) -> tuple[str, ...]:
        if text == "all":
            return known
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"Expected names out of {', '.join(known)}; got {name!r}.")
        return names

    return parse


def parse_count(minimum: int, *, multiple: int = 1) -> Callable[[str], int]:
    """Return what reads a whole number of at least ``minimum`` and a multiple of ``multiple``.

    >>> parse_count(1)("12")
    12
    """
    needs = f"a whole number of at least {minimum}{f' and a multiple of {multiple}' * (multiple > 1)}"

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < minimum or int(text) % multiple:
            raise argparse.ArgumentTypeError(f"Expected {needs}, got {text!r}.")
        return int(text)

    return parse


def parse_ranks(text: str) -> int:
    """Read how many ranks to start."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"Expected a number of ranks of at least 1, got {text!r}.")
    return int(text)


def parse_seconds(text: str) -> float:
    """Read a time in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"Expected seconds above 0 and below 3600, got {text!r}.")
    return seconds


def output_file(text: str) -> Path:
    """Read where a result goes; its directory has to be there before anything is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"Expected a file in a directory that can be written to, got {text!r}.")
    return path


def parse_nbytes(text: str) -> int:
    """Read one size of at least 1 MiB."""
    sizes: tuple[int, ...] = ()
    if "," not in text and ".." not in text:
        sizes = parse_sizes(text)
    if len(sizes) != 1 or sizes[0] < 1024**2:
        raise argparse.ArgumentTypeError(f"Expected a size of at least 1MiB such as 1GiB, got {text!r}.")
    return sizes[0]


def parse_rounds(text: str) -> int:
    """Read how often to measure."""
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"Expected a number of rounds from 1 to 1000, got {text!r}.")
    return int(text)


def add_command(
    commands: Commands, name: str, serve: Callable[[argparse.Namespace, list[str]], int], *, help: str, text: str
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: Where to.
        name: What the user types.
        serve: Runs it, given the options and the words of the command line, and returns the exit code.
        help: Its line in the list of commands.
        text: What its own ``--help`` begins with: what it does, and examples.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, description=text, formatter_class=raw)
    parser.set_defaults(serve=serve)
    return parser


def serve_help(parser: argparse.ArgumentParser) -> None:
    """Let a command that is named alone, without the one below it, print what there is."""

    def serve(options: argparse.Namespace, words: list[str]) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(serve=serve)


def parse_directory(text: str) -> Path:
    """Read a directory that is there and can be written to."""
    if not os.path.isdir(text) or not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"Expected a directory that can be written to, got {text!r}.")
    return Path(text)
