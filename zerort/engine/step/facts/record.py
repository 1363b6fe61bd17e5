"""`Record`: named facts of every rank, each with its reduction, exchanged by all ranks at once.

    record = Record()
    record.add("failed", problem is not None, "or")          one line for each fact, by whoever knows it
    record.add("stop", signal_number, "max")
    heard = record.exchange(world, name="step")              one small all_gather
    heard["failed"]                                          the same on every rank

Who adds a fact does not know how it travels: that is `_travel`'s alone. Every rank adds the same names in the same
order, with equally many numbers each. Facts of more than a few numbers are compared by their digests, and travel only
if those differ, in a second exchange (decision 0110).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from zerort.comm import Group
from zerort.comm.agreed import gather_json
from zerort.errors import CallError
from zerort.typing import Array

__all__ = ["Record", "Reduction"]

Reduction = Literal["or", "and", "min", "max", "sum", "each"]

_REDUCTIONS: Final[Mapping[Reduction, Callable[[Array], Any]]] = {
    "or": lambda rows: rows.any(0),
    "and": lambda rows: rows.all(0),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
    "sum": lambda rows: rows.sum(0),
    "each": lambda rows: rows,
}
"""What becomes of a fact's rows, one of each rank; ``each`` keeps them, in rank order."""


_HAS_TEXTS: Final = "some rank has a text"

_PLAIN: Final = 2
"""Numbers of a fact that travel as they are: no more than its digest would have."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One named fact of this rank."""

    values: Array  # 1-D, int64 or float64
    reduction: Reduction
    then: Callable[[Array], object] | None
    are_flags: bool = False  # truth values: 0 or 1 each


class Record:
    """Facts of this rank that all ranks are about to exchange."""

    def __init__(self) -> None:
        self._fields: dict[str, _Field] = {}
        self._texts: dict[str, str] = {}

    def add(
        self, name: str, values: Any, reduction: Reduction, *, then: Callable[[Array], object] | None = None
    ) -> None:
        """Add a fact: one number or several, the same count on every rank.

        Args:
            name: What it is called in the result; unique.
            values: Numbers or truth values; floating-point ones keep their bits. Many truth values are best given as an
                array of them: where ranks differ, each costs a byte then.
            reduction: What becomes of all ranks' values: element by element, or ``each`` for one row per rank.
            then: Called with the result once all ranks have exchanged theirs.
        """
        self._expect_new(name)
        if reduction not in _REDUCTIONS:
            raise CallError(f"Expected a reduction out of {', '.join(_REDUCTIONS)} for {name!r}, got {reduction!r}.")
        array = np.atleast_1d(np.asarray(values))
        dtype = np.float64 if array.dtype.kind == "f" else np.int64
        self._fields[name] = _Field(array.astype(dtype), reduction, then, are_flags=array.dtype == np.bool_)

    def add_text(self, name: str, text: str) -> None:
        """Add a text, empty on most ranks; the result is a list of all ranks' texts, in rank order.

        Texts cost nothing as long as all of them are empty on every rank, and two more collectives otherwise.
        """
        self._expect_new(name)
        self._texts[name] = text

    def __bool__(self) -> bool:
        return bool(self._fields or self._texts)

    def _expect_new(self, name: str) -> None:
        if name in self._fields or name in self._texts or name == _HAS_TEXTS:
            raise CallError(f"Expected a new name for a fact that ranks exchange, got {name!r} twice. Choose another.")

    def exchange(self, group: Group, *, name: str) -> dict[str, Any]:
        """Return every fact's reduction, the same on every rank. All ranks of the group call this.

        Args:
            group: The ranks.
            name: What to call the collective in errors and traces.
        """
        fields = dict(self._fields)
        if self._texts:
            fields[_HAS_TEXTS] = _Field(np.array([any(self._texts.values())], np.int64), "or", None)
        rows = _travel(group, list(fields.values()), name=name)
        heard: dict[str, Any] = {
            key: _REDUCTIONS[one.reduction](row) for (key, one), row in zip(fields.items(), rows, strict=True)
        }
        heard.update({key: [""] * group.size for key in self._texts})
        if self._texts and heard.pop(_HAS_TEXTS).any():
            everyone = gather_json(group, self._texts, name=name)
            heard.update({key: [texts[key] for texts in everyone] for key in self._texts})
        for key, one in fields.items():
            if one.then is not None:
                one.then(heard[key])
        return heard


def _travel(group: Group, fields: list[_Field], *, name: str) -> list[Array]:
    """Return all ranks' values of each field as rows of one 2-D array, from which its reduction is made.

    One row stands for all where that is all that the reduction needs. All ranks call this.
    """
    sent = [one.values.view(np.int64) if one.values.size <= _PLAIN else _digest(one.values) for one in fields]
    told = _rows(group, sent, name=name)
    differ = [one.values.size > _PLAIN and bool((row != row[0]).any()) for one, row in zip(fields, told, strict=True)]
    joined = [one for one, differs in zip(fields, differ, strict=True) if differs and _is_joined(one)]
    others = [one for one, differs in zip(fields, differ, strict=True) if differs and not _is_joined(one)]
    flags = iter(_joined_flags(group, joined, name=name) if joined else [])
    each = iter(_rows(group, [one.values.view(np.int64) for one in others], name=f"{name} apart") if others else [])
    rows = []
    for one, row, differs in zip(fields, told, differ, strict=True):
        if not differs and one.values.size > _PLAIN:
            rows.append(np.broadcast_to(one.values, (group.size, one.values.size)))
        elif differs and _is_joined(one):
            rows.append(next(flags))
        else:
            rows.append((next(each) if differs else row).view(one.values.dtype))
    return rows


def _is_joined(field: _Field) -> bool:
    return field.are_flags and field.reduction in ("or", "and")


def _digest(values: Array) -> Array:
    return np.frombuffer(hashlib.blake2b(values.tobytes(), digest_size=8 * _PLAIN).digest(), np.int64)


def _rows(group: Group, mine: list[Array], *, name: str) -> list[Array]:
    """Return every rank's arrays as rows: one 2-D array for each of ``mine``. All ranks call this."""
    flat = np.concatenate(mine) if mine else np.zeros(0, np.int64)
    # not-gpu: between arrays of the host
    everyone = group.all_gather(flat, name=name).wait().reshape(group.size, -1)
    ends = np.cumsum([array.size for array in mine])
    return [np.ascontiguousarray(everyone[:, end - array.size : end]) for array, end in zip(mine, ends, strict=True)]


def _joined_flags(group: Group, fields: list[_Field], *, name: str) -> list[Array]:
    """Return one row for each field of flags: what is true on some rank, or on all. All ranks call this."""
    turned = [one.values == (one.reduction == "or") for one in fields]  # all are true where none is false
    # not-gpu: between arrays of the host
    some = group.all_reduce(np.concatenate(turned).view(np.uint8), reduction="max", name=f"{name} flags").wait()
    ends = np.cumsum([one.values.size for one in fields])
    return [
        (some[end - one.values.size : end] == (one.reduction == "or"))[np.newaxis]
        for one, end in zip(fields, ends, strict=True)
    ]
