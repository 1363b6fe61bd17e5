"""`StripedStore`: several stores as one, each value laid over all of them in units, more on those that are faster.

    weights 2 : 1     unit    0 1 2 3 4 5 6 …           members of one value are values of the same name
                      member  A B A A B A A …           and lie in each member one behind the other

A member that is too slow to help is left out when the store opens; one that is full is left out of the values that it
has no room for. Both are said once and shown in `repr`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerort.device import Ticket, joined
from zerort.errors import CallError, ClosedError, StorageError
from zerort.storage.files.extents import FileExtent, Stretch
from zerort.storage.files.preflight import SAMPLE_NBYTES, inspect
from zerort.storage.stores.nvme import NvmeOptions, NvmeStore
from zerort.storage.stores.store import Parts, Store, as_bytes, check_new, check_range, move_each
from zerort.typing import Array

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["UNIT_NBYTES", "StripedStore", "Stripes", "plan_stripes"]

UNIT_NBYTES = 4 * 1024**2
"""Bytes that lie on one member before the next one's turn comes: a block of a disk."""

_PERIOD = 32
"""Units after which the order of members repeats: weights are rounded to 32nds."""

_TOO_SLOW = 1 / 16
"""A member below this part of the fastest is left out: waiting for it would cost more than it gives."""


class Stripes(NamedTuple):
    """How a value lies over the members: integers, nothing else."""

    unit: int
    """Bytes of a unit."""
    pattern: tuple[int, ...]
    """Whose unit it is, for one period."""
    nbytes: int
    """Of the value."""

    def pieces(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Return ``(member, offset there, first byte, one past the last)`` for each piece of a range of the value."""
        found: list[tuple[int, int, int, int]] = []
        while begin < end:
            number, inside = divmod(begin, self.unit)
            period, at = divmod(number, len(self.pattern))
            member = self.pattern[at]
            before = period * self.pattern.count(member) + self.pattern[:at].count(member)
            last = min(end, begin + self.unit - inside)
            if found and found[-1][0] == member:  # units of one member are neighbours there, too
                found[-1] = (*found[-1][:3], last)
            else:
                found.append((member, before * self.unit + inside, begin, last))
            begin = last
        return found

    def share(self, member: int) -> int:
        """Return the bytes of the value that lie on a member."""
        units, rest = divmod(self.nbytes, self.unit)
        periods, more = divmod(units, len(self.pattern))
        count = periods * self.pattern.count(member) + self.pattern[:more].count(member)
        return count * self.unit + (rest if self.pattern[more] == member else 0)


def plan_stripes(nbytes: int, weights: Sequence[float], *, first: int = 0, unit: int = UNIT_NBYTES) -> Stripes:
    """Lay a value over members by their weights.

    Args:
        nbytes: Of the value.
        weights: One for each member; 0 leaves it out.
        first: Rotates the order, so that small values do not all lie on one member.
        unit: Bytes of a unit.

    >>> plan_stripes(10, [2, 1], unit=1).pattern[:6]
    (0, 1, 0, 0, 1, 0)
    """
    total = sum(weights)
    if len([weight for weight in weights if weight > 0]) == 1:
        return Stripes(unit, (max(range(len(weights)), key=weights.__getitem__),), nbytes)
    # Smooth weighted round robin: each turn everybody gains their weight, the richest serves and pays the total.
    credit = [0.0] * len(weights)
    pattern = []
    for _ in range(_PERIOD):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        member = max(range(len(weights)), key=lambda one: (weights[one] > 0, credit[one]))
        credit[member] -= total
        pattern.append(member)
    turn = first % _PERIOD
    return Stripes(unit, tuple(pattern[turn:] + pattern[:turn]), nbytes)


class StripedStore:
    """Several stores as one.

    Args:
        members: The stores; they close with this one.
        weights: How much of a value each gets, such as measured GB/s; equal if None.
        name: What it is called in errors and traces.
        unit_nbytes: Bytes that lie on one member before the next one's turn comes.
    """

    def __init__(
        self,
        members: Sequence[Store],
        *,
        weights: Sequence[float] | None = None,
        name: str = "striped",
        unit_nbytes: int = UNIT_NBYTES,
    ) -> None:
        self.name = name
        self.members = tuple(members)
        given = [1.0] * len(self.members) if weights is None else [float(weight) for weight in weights]
        if not self.members or len(given) != len(self.members) or min(given) < 0 or max(given) <= 0:
            raise CallError(f"Expected a weight above 0 for each of {len(self.members)} members, got {weights}.")
        if unit_nbytes < 1:
            raise CallError(f"Expected units of at least one byte, got {unit_nbytes}.")
        slow = [at for at, weight in enumerate(given) if weight < _TOO_SLOW * max(given)]
        self.weights = tuple(0.0 if at in slow else weight for at, weight in enumerate(given))
        """How much of a value each member gets; 0 for those that are left out."""
        self._unit = unit_nbytes
        self._values: dict[str, Stripes] = {}
        self._made = 0
        self._full: set[int] = set()
        self._closed = False
        if slow:
            warnings.warn(
                f"Store {name!r} leaves out {', '.join(map(repr, (self.members[at].name for at in slow)))}: less than "
                "a 16th as fast as the fastest member. Give it faster disks only.",
                RuntimeWarning,
                stacklevel=2,
            )

    @classmethod
    def open(
        cls,
        directories: Sequence[str | os.PathLike[str]],
        *,
        rank: int = 0,
        name: str = "striped",
        options: NvmeOptions | None = None,
        sample_nbytes: int = SAMPLE_NBYTES,
        unit_nbytes: int = UNIT_NBYTES,
    ) -> StripedStore:
        """Open a store over several directories, each on a disk of its own, weighted by how fast they are now.

        Args:
            directories: Where.
            rank: Whose store it is.
            name: What it is called.
            options: How the members work.
            sample_nbytes: How much to write and read to measure each.
            unit_nbytes: Bytes that lie on one member before the next one's turn comes.

        Raises:
            StorageError: One of them cannot be written to.
        """
        reports = [inspect(one, rank=rank, sample_nbytes=sample_nbytes) for one in directories]
        members: list[NvmeStore] = []
        try:
            for at, one in enumerate(directories):
                members.append(NvmeStore(one, rank=rank, name=f"{name}.{at}", options=options))
            return cls(members, weights=[report.gbs for report in reports], name=name, unit_nbytes=unit_nbytes)
        except BaseException:
            for member in members:
                member.close()
            raise

    @property
    def nbytes(self) -> int:
        """The bytes of all values together."""
        return sum(stripes.nbytes for stripes in self._values.values())

    def create(self, name: str, nbytes: int, *, grain: int | None = None) -> None:
        """Make a value over all members that have room; see `Store.create`."""
        self._check_open()
        check_new(self, name, nbytes, known=name in self._values)
        left_out: set[int] = set()
        while True:
            weights = [0.0 if at in left_out else weight for at, weight in enumerate(self.weights)]
            stripes = plan_stripes(int(nbytes), weights, first=self._made, unit=self._unit)
            made: list[int] = []
            try:
                for at in sorted(set(stripes.pattern)):
                    self.members[at].create(name, stripes.share(at), grain=grain)
                    made.append(at)
                break
            except StorageError as error:
                for one in made:
                    self.members[one].delete(name)
                left_out.add(at)
                if not any(weight for one, weight in enumerate(weights) if one not in left_out):
                    raise
                self._say_full(at, error)
        self._values[name] = stripes
        self._made += 1

    def _say_full(self, at: int, error: StorageError) -> None:
        if at not in self._full:
            self._full.add(at)
            warnings.warn(
                f"Member {self.members[at].name!r} of store {self.name!r} cannot take its share; others do: {error}",
                RuntimeWarning,
                stacklevel=3,
            )

    def read(self, name: str, out: Array, *, offset: int = 0) -> Ticket[Array]:
        """Fill ``out`` from a value; see `Store.read`."""
        data = as_bytes(out, what="out", written=True)
        pieces = self._pieces(name, offset, data.size)
        tickets = [
            self.members[member].read(name, data[begin - offset : end - offset], offset=there)
            for member, there, begin, end in pieces
        ]
        return joined(tickets, result=out)

    def write(self, name: str, source: Array, *, offset: int = 0) -> Ticket[Array]:
        """Put ``source`` into a value; see `Store.write`."""
        data = as_bytes(source, what="the source", written=False)
        pieces = self._pieces(name, offset, data.size)
        tickets = [
            self.members[member].write(name, data[begin - offset : end - offset], offset=there)
            for member, there, begin, end in pieces
        ]
        return joined(tickets, result=source)

    def _pieces(self, name: str, offset: int, count: int) -> list[tuple[int, int, int, int]]:
        return self.stripes_of(name, offset, count).pieces(int(offset), int(offset) + count)

    def stripes_of(self, name: str, offset: int = 0, count: int = 0) -> Stripes:
        """Return how a value lies over the members, if it has ``count`` bytes from ``offset`` on."""
        self._check_open()
        stripes = self._values.get(name)
        check_range(self, name, offset, count, nbytes=None if stripes is None else stripes.nbytes)
        assert stripes is not None
        return stripes

    def read_parts(self, name: str, out: Array, parts: Parts) -> Ticket[Array]:
        """Fill ``out`` from several ranges of a value; see `Store.read_parts`."""
        return move_each(self.read, name, out, parts)

    def write_parts(self, name: str, source: Array, parts: Parts) -> Ticket[Array]:
        """Put ``source`` into several ranges of a value; see `Store.write_parts`."""
        return move_each(self.write, name, source, parts)

    def flush(self) -> None:
        """Flush all members; see `Store.flush`."""
        self._check_open()
        for member in self.members:
            member.flush()

    def file_extents(self, name: str, directory: str) -> list[FileExtent]:
        """Return the files on the members, which hold their units one behind the other; see `Store.file_extents`."""
        stripes = self.stripes_of(name)
        laid: dict[int, list[Stretch]] = {}
        for member, offset, first, last in stripes.pieces(0, stripes.nbytes):
            laid.setdefault(member, []).append(Stretch(first, last, offset))
        return [
            extent._replace(stretches=tuple(stretches))
            for member, stretches in laid.items()
            for extent in self.members[member].file_extents(name, directory)
        ]

    def copied_parts(self, directory: str) -> list[float]:
        """Return the parts of the members whose files can have no second name; see `Store.copied_parts`."""
        total = sum(self.weights)
        return [
            weight / total * part
            for member, weight in zip(self.members, self.weights, strict=True)
            for part in member.copied_parts(directory)
        ]

    def delete(self, name: str) -> None:
        """Forget a value; see `Store.delete`."""
        for at in sorted(set(self.stripes_of(name).pattern)):
            self.members[at].delete(name)
        del self._values[name]

    def close(self) -> None:
        """Close all members, also if one of them fails to; see `Store.close`."""
        self._closed = True
        failed: Exception | None = None
        for member in self.members:
            try:
                member.close()
            except Exception as error:  # noqa: PERF203
                failed = failed or error
        if failed is not None:
            raise failed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"Store {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"StripedStore({self.name!r}, closed)"
        total = sum(self.weights)
        parts = [
            f"{weight / total:.0%} {member!r}{' (full)' if at in self._full else ''}"
            for at, (member, weight) in enumerate(zip(self.members, self.weights, strict=True))
        ]
        return f"StripedStore({self.name!r}, {', '.join(parts)})"
