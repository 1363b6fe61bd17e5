"""What a collective has to carry between hosts, and how long the wire needs for it.

    S is the full buffer, n the ranks, h a host with k of them     the busiest host carries, each way
    all_gather, reduce_scatter     what the other hosts hold           S · (n - k) / n
    all_reduce                     both of these, over H hosts         2 · S · (H - 1) / H
    broadcast, reduce              all of it, through root's link      S
    all_to_all                     what its ranks have for others      k · S · (n - k) / n

`Wire.seconds` is a bound: no algorithm is faster. `transfers` is what plain sockets carry for comparison: every pair of
hosts at once, one phase after the other.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Phase", "Wire", "parse_delay", "parse_rate", "transfers"]

Phase = list[list[int]]
"""Bytes that each host sends to each other host at once."""

_BITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Wire:
    """The links between hosts."""

    ranks: tuple[int, ...]
    """On each host."""
    rate: str | None = None
    """Of every host's link, each way, as ``tc`` reads it; None if it is not known."""
    delay: str | None = None
    """One way between two hosts, as ``tc`` reads it; None for next to none."""

    def busiest_nbytes(self, op: str, nbytes: int) -> int:
        """Return the bytes that the busiest host has to send or receive."""
        n, hosts = sum(self.ranks), len(self.ranks)
        if hosts == 1:
            return 0
        largest = {
            "all_gather": max((n - k) / n for k in self.ranks),
            "reduce_scatter": max((n - k) / n for k in self.ranks),
            "all_reduce": 2 * (hosts - 1) / hosts,
            "broadcast": 1.0,
            "reduce": 1.0,
            "all_to_all": max(k * (n - k) / n for k in self.ranks),
        }
        return round(largest.get(op.removesuffix(" shared"), 0.0) * nbytes)

    def seconds(self, op: str, nbytes: int) -> float | None:
        """Return the least time that a collective can take; None if the links' rate is not known."""
        if self.rate is None:
            return None
        delay = 0.0 if self.delay is None else _amount(self.delay, _SECONDS)
        return 8 * self.busiest_nbytes(op, nbytes) / _amount(self.rate, _BITS) + delay


def transfers(op: str, nbytes: int, ranks: Sequence[int]) -> list[Phase]:
    """Return what the hosts send each other for a collective of ``nbytes``, phase by phase.

    >>> transfers("all_gather", 100, (1, 3))
    [[[0, 25], [75, 0]]]
    """
    n, hosts = sum(ranks), range(len(ranks))

    def phase(count: list[list[float]]) -> Phase:
        return [[0 if a == b else round(count[a][b] * nbytes) for b in hosts] for a in hosts]

    shares = [k / n for k in ranks]
    gather = phase([[shares[a] for _ in hosts] for a in hosts])
    scatter = phase([[shares[b] for b in hosts] for _ in hosts])
    even = phase([[1 / len(ranks) for _ in hosts] for _ in hosts])
    from_root = phase([[shares[b] if a == 0 else 0.0 for b in hosts] for a in hosts])
    to_root = phase([[shares[a] if b == 0 else 0.0 for b in hosts] for a in hosts])
    return {
        "all_gather": [gather],
        "reduce_scatter": [scatter],
        "all_reduce": [even, even],
        "broadcast": [from_root, gather],
        "reduce": [scatter, to_root],
        "all_to_all": [phase([[ranks[a] * shares[b] for b in hosts] for a in hosts])],
    }.get(op.removesuffix(" shared"), [phase([[0.0 for _ in hosts] for _ in hosts])])


def parse_rate(text: str) -> str:
    """Read a rate as ``tc`` does: ``1gbit``, ``500mbit``."""
    return _checked(text, _BITS, "a rate such as 1gbit or 500mbit")


def parse_delay(text: str) -> str:
    """Read a delay as ``tc`` does: ``5ms``, ``100us``."""
    return _checked(text, _SECONDS, "a delay such as 5ms or 100us")


def _checked(text: str, units: dict[str, float], expected: str) -> str:
    if not _pattern(units).fullmatch(text.strip().lower()) or _amount(text, units) <= 0:
        raise argparse.ArgumentTypeError(f"Expected {expected}, got {text!r}.")
    return text.strip().lower()


def _amount(text: str, units: dict[str, float]) -> float:
    found = _pattern(units).fullmatch(text.strip().lower())
    assert found is not None
    return float(found[1]) * units[found[2]]


def _pattern(units: dict[str, float]) -> re.Pattern[str]:
    return re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(units)})", re.ASCII)
