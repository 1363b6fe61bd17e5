"""`expect`: is a JSON value what it should be? A schema is data: what stands where, written as it looks in the file.

    str, dict                      a value of that type
    [schema]                       a list of any length
    (schema, schema)               a list of so many
    {"name": schema}               an object with at least these names
    Each(schema)                   an object with any names
    Where(test, "what it is")      a value for which a test holds

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["COUNT", "Each", "Where", "expect"]


@dataclass(frozen=True, slots=True)
class Each:
    """An object whose values are all alike."""

    schema: Any


@dataclass(frozen=True, slots=True)
class Where:
    """A value for which a test holds."""

    test: Callable[[Any], bool]
    what: str
    """What it is then, as a noun phrase."""


COUNT: Final = Where(lambda value: type(value) is int and 0 <= value < 2**63, "a whole number from 0 to 2^63")
"""Sizes, offsets, numbers of things."""


def expect(value: Any, schema: Any, *, at: str) -> None:
    """Raise unless ``value`` is what ``schema`` says.

    >>> expect({"files": [["a", 1]]}, {"files": [(str, COUNT)]}, at="body")
    >>> expect({"files": [["a", -1]]}, {"files": [(str, COUNT)]}, at="body")
    Traceback (most recent call last):
    ...
    ValueError: Expected a whole number from 0 to 2^63 at body.files[0][1], got -1

    Args:
        value: As `json.loads` returned it.
        schema: See above.
        at: What the value is called.

    Raises:
        ValueError: It is not, and where.
    """
    wrong = _mismatch(value, schema)
    if wrong is not None:
        where, what, got = wrong
        text = f"{type(got).__name__} of {len(got)}" if isinstance(got, (list, dict)) else repr(got)
        raise ValueError(f"Expected {what} at {(at + where)[:200]}, got {text[:100]}")


def _mismatch(value: Any, schema: Any) -> tuple[str, str, Any] | None:
    """Return what is wrong: where, what was expected there, and what was found; None if nothing is."""
    if isinstance(schema, Where):
        return None if schema.test(value) else ("", schema.what, value)
    if isinstance(schema, type):
        return None if type(value) is schema else ("", schema.__name__, value)
    parts: Iterable[tuple[Any, Any]]
    if isinstance(schema, (list, tuple)):
        if type(value) is not list or (isinstance(schema, tuple) and len(value) != len(schema)):
            return "", "a list" + (f" of {len(schema)}" if isinstance(schema, tuple) else ""), value
        parts = enumerate(schema if isinstance(schema, tuple) else schema * len(value))
    else:
        if type(value) is not dict:
            return "", "an object", value
        parts = [(name, schema.schema) for name in value] if isinstance(schema, Each) else schema.items()
    for name, part in parts:
        if isinstance(value, dict) and name not in value:
            return "", f"the name {name!r}", value
        wrong = _mismatch(value[name], part)
        if wrong is not None:
            step = f"[{name}]" if isinstance(value, list) else f".{name}"
            return step + wrong[0], *wrong[1:]
    return None
