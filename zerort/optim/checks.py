"""What an option may be, and what is said about anything else: ``Expected X, got Y.`` and the cure.

Imports `zerort.errors` only.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real

from zerort.errors import CallError

__all__ = ["check_bool", "check_choice", "check_count", "check_lr", "check_number", "check_pair"]


def check_number(
    what: str, value: object, *, minimum: float = 0.0, above: float | None = None, below: float | None = None
) -> None:
    """Raise unless `value` is a finite number of at least `minimum`, above `above` and below `below`."""
    low = f"of at least {minimum:g}" if above is None else f"above {above:g}"
    bounds = low if below is None else f"{low} and below {below:g}"
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
        number = float(value)
        reached = number >= minimum if above is None else number > above
        if reached and (below is None or number < below):
            return
    raise CallError(f"Expected {what} to be a finite number {bounds}, got {value!r}. Pass such a number.")


def check_pair(what: str, value: object, *, below: float | None = None) -> tuple[float, float]:
    """Return `value` as a tuple of two numbers of at least 0 and below `below`, or raise."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise CallError(f"Expected {what} to be two numbers, got {value!r}. Pass a tuple such as {what}=(0.5, 0.5).")
    for index, number in enumerate(value):
        check_number(f"{what}[{index}]", number, below=below)
    return float(value[0]), float(value[1])


def check_count(what: str, value: object, *, minimum: int) -> None:
    """Raise unless `value` is an int of at least `minimum`."""
    if type(value) is not int or value < minimum:
        raise CallError(f"Expected {what} to be an int of at least {minimum}, got {value!r}. Pass such a number.")


def check_bool(what: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise CallError(f"Expected {what} to be True or False, got {value!r}.")


def check_choice(what: str, value: object, names: Collection[str]) -> None:
    """Raise unless `value` is one of some names."""
    if not isinstance(value, str) or value not in names:
        raise CallError(f"Expected {what} to be {' or '.join(map(repr, names))}, got {value!r}.")


def check_lr(value: object) -> None:
    """Raise unless `value` is a learning rate or a schedule of it."""
    if not callable(value):
        check_number("lr", value)
