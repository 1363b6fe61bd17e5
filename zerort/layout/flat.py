"""Lay named parameters out in one flat buffer.

    FlatLayout.build({"w": (2, 3), "b": (3,)}, alignment=4)

    element   0 1 2 3 4 5 6 7 8 9 10 11
              w w w w w w · · b b b  ·        · = padding, which belongs to no parameter

Every parameter starts at a multiple of the alignment, and the buffer ends at one, or at a larger multiple that ranks
can share equally (`end` and `numel` then differ). The alignment counts elements, not bytes: so a bfloat16 buffer and
the float32 state that belongs to it have the same offsets, and one `Partition` serves both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zerort.errors import CallError
from zerort.layout.dtypes import itemsize
from zerort.layout.extent import Extent, Overlap
from zerort.layout.integers import as_int, prove_int, prove_range

__all__ = ["ALIGNMENT", "FlatLayout"]

ALIGNMENT: Final = 64
"""Elements. A cache line or more for every dtype, so that neither vector loads nor neighbours' writes are split."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each parameter lies in one flat buffer: a value that `build` computes and the constructor proves.

    Two layouts are equal when every parameter lies at the same place in both; they hash and pickle accordingly.

    >>> layout = FlatLayout.build({"w": (2, 3), "b": (3,)}, alignment=4)
    >>> layout.numel, layout.padding, layout.nbytes
    (12, 3, 48)
    >>> layout.of("b").offset
    8
    """

    dtype: str
    """The name of every element's dtype."""

    extents: tuple[Extent, ...]
    """The parameters' places, in the order of the buffer."""

    numel: int
    """The elements of the buffer, padding included."""

    alignment: int = ALIGNMENT
    """Elements. Every parameter starts at a multiple of it, and `numel` is one."""

    # Derived, for lookup: written once by __post_init__, and no part of the value's identity.
    _by_name: dict[str, Extent] = field(init=False, repr=False, compare=False)
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: str = "float32",
        alignment: int = ALIGNMENT,
        multiple: int = 1,
    ) -> FlatLayout:
        """Lay the parameters out one after the other, in the mapping's order.

        Args:
            shapes: The parameters' shapes by name. Scalars, empty parameters and an empty mapping are ordinary.
            dtype: The name of every element's dtype.
            alignment: Elements; every parameter starts at a multiple of it.
            multiple: Elements; the buffer is padded at its end to a multiple of it, too.

        Raises:
            CallError: If a shape, the dtype, the alignment or the multiple is none.
        """
        alignment = as_int(alignment, what="the alignment", minimum=1)
        multiple = math.lcm(as_int(multiple, what="the multiple", minimum=1), alignment)
        extents = []
        cursor = 0
        for name, axes in shapes.items():
            shape = tuple(as_int(axis, what=f"every axis of the shape of {name!r}") for axis in axes)
            extent = Extent(name=name, shape=shape, offset=cursor, numel=math.prod(shape))
            extents.append(extent)
            cursor = -(-extent.stop // alignment) * alignment
        return cls(dtype=dtype, extents=tuple(extents), numel=-(-cursor // multiple) * multiple, alignment=alignment)

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        prove_int(self.numel, what="the layout's numel")
        prove_int(self.alignment, what="the layout's alignment", minimum=1)
        if not isinstance(self.extents, tuple):
            raise CallError(f"Expected the extents to be a tuple, got {type(self.extents).__name__}.")
        by_name: dict[str, Extent] = {}
        end, before = 0, "the buffer's start"
        for extent in self.extents:
            if extent.name in by_name:
                raise CallError(f"Expected unique names, got {extent.name!r} twice. Rename one of the parameters.")
            if extent.offset % self.alignment:
                raise CallError(
                    f"Expected {extent.name!r} to start at a multiple of {self.alignment} elements, "
                    f"got offset {extent.offset}. FlatLayout.build aligns by itself."
                )
            if extent.offset < end:
                raise CallError(
                    f"Expected {extent.name!r} to start at {end} or later, behind {before}, got offset "
                    f"{extent.offset}. FlatLayout.build puts extents in order and without overlap."
                )
            by_name[extent.name] = extent
            end, before = extent.stop, repr(extent.name)
        if self.numel < end or self.numel % self.alignment:
            raise CallError(
                f"Expected numel to be a multiple of {self.alignment} and at least {end}, where {before} ends, "
                f"got {self.numel}. FlatLayout.build pads by itself."
            )
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_offsets", tuple(extent.offset for extent in self.extents))

    def of(self, name: str) -> Extent:
        """Return the place of one parameter.

        Raises:
            CallError: If the layout holds no parameter of that name.
        """
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(map(repr, list(self._by_name)[:8])) + (", …" if len(self._by_name) > 8 else "")
            raise CallError(f"Expected one of the parameters {known or '(none)'}; got {name!r}.") from None

    def overlaps(self, first: int, stop: int) -> tuple[Overlap, ...]:
        """Return the parts of parameters that lie in ``[first, stop)``, in the buffer's order.

        Padding belongs to no parameter and empty parameters have no part, so neither is returned.

        >>> layout = FlatLayout.build({"w": (2, 3), "b": (3,)}, alignment=4)
        >>> for extent, in_extent, in_range in layout.overlaps(4, 9):
        ...     print(extent.name, in_extent, in_range)
        w slice(4, 6, None) slice(0, 2, None)
        b slice(0, 1, None) slice(4, 5, None)

        Raises:
            CallError: If the range leaves the buffer.
        """
        prove_range(first, stop, numel=self.numel)
        found = []
        # Of several extents with one offset only the last is not empty, and bisect_right finds that one.
        for index in range(max(bisect_right(self._offsets, first) - 1, 0), len(self.extents)):
            extent = self.extents[index]
            if extent.offset >= stop:
                break
            begin, end = max(first, extent.offset), min(stop, extent.stop)
            if begin < end:
                in_extent = slice(begin - extent.offset, end - extent.offset)
                found.append(Overlap(extent, in_extent, slice(begin - first, end - first)))
        return tuple(found)

    @property
    def end(self) -> int:
        """Return where the last parameter's last block ends: the same, whatever the buffer was padded to."""
        return -(-self.extents[-1].stop // self.alignment) * self.alignment if self.extents else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffer, padding included."""
        return self.numel * itemsize(self.dtype)

    @property
    def padding(self) -> int:
        """Return the elements that belong to no parameter."""
        return self.numel - sum(extent.numel for extent in self.extents)
