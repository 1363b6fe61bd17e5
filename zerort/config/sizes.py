"""Bytes as people write them."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from zerort.errors import CallError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS: Final = ("", "K", "M", "G", "T", "P")
_BYTES: Final = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*(?:([KMGTP])(I?B)?|B)?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``"4MiB"``, ``"256K"``, ``"1.5 GiB"``, ``"4096"``.

    As in GNU tools, ``K`` and ``KiB`` are 1024 bytes and ``KB`` is 1000; case does not matter. A part of a unit is
    rounded to whole bytes: what `format_bytes` writes can be read.

    >>> parse_bytes("256K"), parse_bytes("1KB"), parse_bytes("1.5GiB")
    (262144, 1000, 1610612736)

    Raises:
        CallError: If it does not read as a whole number of bytes.
    """
    found = _BYTES.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is not None:
        digits, unit, suffix = found.groups(default="")
        base = 1000 if suffix.upper() == "B" else 1024
        amount = Fraction(digits) * Fraction(base) ** _UNITS.index(unit.upper())
        if unit or amount.denominator == 1:
            return round(amount)
    raise CallError(f"Expected a whole number of bytes such as '4096', '256K' or '4MiB', got {text!r}.")


def format_bytes(nbytes: int, *, up: bool = False) -> str:
    """Write a number of bytes for people, rounded to two decimals; ``up``: to one that is not less.

    >>> format_bytes(4 * 1024**2), format_bytes(1_234_567), format_bytes(1_234_567, up=True), format_bytes(17)
    ('4MiB', '1.18MiB', '1.18MiB', '17B')

    Raises:
        CallError: If it is negative.
    """
    if nbytes < 0:
        raise CallError(f"Expected a number of bytes of at least 0, got {nbytes}.")
    rounded = math.ceil if up else round
    power = 0
    while power + 1 < len(_UNITS) and rounded(Fraction(100 * nbytes, 1024**power)) >= 102400:
        power += 1
    whole, hundredths = divmod(rounded(Fraction(100 * nbytes, 1024**power)), 100)
    amount = f"{whole}.{hundredths:02}".rstrip("0").rstrip(".")
    return f"{amount}{_UNITS[power]}iB" if power else f"{nbytes}B"
