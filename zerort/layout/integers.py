"""Check integers once, in the same words everywhere.

`as_int` is for the doors (``build``), where NumPy's integers are welcome and leave as Python's; `prove_int` is for
``__post_init__``, where a value proves that it holds Python's only, because layouts are hashed, compared between ranks
and written as JSON.
"""

from __future__ import annotations

import operator
from typing import Any

from zerort.errors import CallError

__all__ = ["as_int", "prove_int", "prove_range"]


def as_int(value: Any, *, what: str, minimum: int = 0) -> int:
    """Turn anything integral into an ``int`` that is not below `minimum`.

    Args:
        value: An ``int`` or anything with ``__index__``, except ``bool``.
        what: What the value is, for the error message.
        minimum: The smallest legal value.

    Raises:
        CallError: If it is not integral, or too small.

    >>> as_int(7, what="numel")
    7
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise CallError(f"Expected {what} to be an integer of at least {minimum}, got {value!r}.") from None
    if number < minimum:
        raise CallError(f"Expected {what} to be an integer of at least {minimum}, got {value!r}.")
    return number


def prove_int(value: object, *, what: str, minimum: int = 0) -> None:
    """Raise unless the value is a plain ``int`` of at least `minimum`.

    Raises:
        CallError: If it is anything else.
    """
    if type(value) is not int or value < minimum:
        raise CallError(f"Expected {what} to be a plain int of at least {minimum}, got {value!r}.")


def prove_range(first: int, stop: int, *, numel: int) -> None:
    """Raise unless ``[first, stop)`` lies within ``[0, numel)``.

    Raises:
        CallError: If it does not, or runs backwards.
    """
    if not 0 <= first <= stop <= numel:
        raise CallError(
            f"Expected a range with 0 <= first <= stop <= {numel}, got first={first}, stop={stop}. "
            "Ranges are half open and count elements."
        )
