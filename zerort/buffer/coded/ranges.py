"""`RangeCodec`: what a rank's range of parameters travels as, from its owner to all ranks (`CodedGather`).

    BlockCodes         int8, int4 or bfloat16                  lossy; as long for any values
    DifferenceCodes    codes of what the whole of before lacks    losses are made up for; the whole stays on each host
    Changes            what differs from the whole of before      lossless; the whole stays on each host
    NonZeros           what is not zero                           lossless; for what `zr.Sparsity` prunes

Blocks lie by global element index, and ranges begin at multiples of them: the decoded whole does not depend on how
ranks cut it (decision 0126). The base of changes is the whole that all ranks have, the same bits on each, and values
are absolute: whatever ranges hold now, the result is what they hold. So nothing makes a base invalid: not an
assignment, a load or another cut (decision 0140). A range of non-zeros travels as it is if that is as short: before
anything is pruned, each gather moves as much as a plain one (decision 0178).

Differences are added to their base, and to add twice is wrong: where ranks share the whole, each decodes other ranges
of it (`adds`). The result is the next base, so what codes lose is part of the next difference (decision 0196).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np

from zerort.codec import (
    DeltaSize,
    Format,
    apply_delta,
    decode_sparse,
    delta_nbytes,
    encode_delta,
    marks_nbytes,
    measure_delta,
    sparse_nbytes,
    write_sparse,
)
from zerort.typing import Array

__all__ = ["BlockCodes", "Changes", "DifferenceCodes", "NonZeros", "RangeCodec", "room_nbytes", "sent_nbytes_of"]

_ALIGNMENT: Final = 8
"""Bytes that each rank's payload begins at a multiple of, if its length depends on values."""


class Words(NamedTuple):
    """What is done with codes, in errors and traces."""

    sizes: str = "sizes"
    decode: str = "decode"


class RangeCodec(Protocol):
    """What a range travels as. One for each array, if `is_measured`: it notes what was measured of it."""

    needs_base: bool
    """Whether it is decoded into the whole of before, the same on every rank: zeros at first."""
    decodes_apart: bool
    """Whether what is decoded is apart from ranges, also in memory that ranks share."""
    is_measured: bool
    """Whether the length of a payload depends on values: then ranks tell each other."""
    adds: bool
    """Whether decoding adds to the whole of before: then each range is decoded once in every memory."""
    words: Words

    def most_nbytes(self, numel: int) -> int:
        """Return the length of the payload of ``numel`` elements, at its most if it depends on values."""

    def beside_nbytes(self, numel: int) -> int:
        """Return the bytes that a GPU needs beside ``numel`` elements and their payload."""

    def measure(self, mine: Array, before: Array, *, room: Array) -> int:
        """Return the length of a range's payload; 0: there is nothing to send. The host waits for it.

        Args:
            mine: The range.
            before: The same of the whole of before.
            room: Of a GPU, `beside_nbytes`.
        """

    def encode(self, payload: Array, mine: Array, before: Array, *, start: int, room: Array) -> None:
        """Write a range, which was measured, into ``payload``; ``start`` is the global index of its first element."""

    def decode(self, out: Array, payload: Array, *, room: Array) -> None:
        """Write the range of a payload to its place in the whole."""


def sent_nbytes_of(codec: RangeCodec, nbytes: int) -> int:
    """Return the bytes that a payload takes on the wire."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT if codec.is_measured else nbytes


def room_nbytes(codec: RangeCodec, counts: Sequence[int], *, on_gpus: bool = False) -> int:
    """Return the bytes of all ranks' payloads at their most, and what GPUs need beside them.

    Args:
        codec: Theirs.
        counts: How many elements each rank has.
        on_gpus: Whether ranks compute there.
    """
    payloads = sum(sent_nbytes_of(codec, codec.most_nbytes(numel)) for numel in counts)
    return payloads + (codec.beside_nbytes(max(counts)) if on_gpus else 0)


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A code for each element, and scales of blocks."""

    format: Format
    needs_base = False
    decodes_apart = True
    is_measured = False
    adds = False
    words = Words()

    def most_nbytes(self, numel: int) -> int:
        """Return the length of a payload."""
        return self.format.nbytes(numel)

    def beside_nbytes(self, numel: int) -> int:
        """Return 0: a kernel needs nothing else."""
        return 0

    def measure(self, mine: Array, before: Array, *, room: Array) -> int:
        """Return the length of a range's payload."""
        return self.format.nbytes(mine.size)

    def encode(self, payload: Array, mine: Array, before: Array, *, start: int, room: Array) -> None:
        """Write the codes of a range."""
        self.format.encode(payload, mine, start=start)

    def decode(self, out: Array, payload: Array, *, room: Array) -> None:
        """Write the values of codes."""
        self.format.decode(out, payload)


@dataclass(frozen=True, slots=True)
class DifferenceCodes(BlockCodes):
    """A code for each element of what the whole of before lacks, and scales of blocks, which the format must have."""

    needs_base = True
    adds = True
    words = Words(decode="add differences of")

    def encode(self, payload: Array, mine: Array, before: Array, *, start: int, room: Array) -> None:
        """Write the codes of what a range has more than before."""
        self.format.encode(payload, mine, start=start, base=before)

    def decode(self, out: Array, payload: Array, *, room: Array) -> None:
        """Add the values of codes to the whole of before."""
        self.format.decode(out, payload, adds=True)


@dataclass(slots=True)
class Changes:
    """Elements of 16 bits that differ from the whole of before, and where they are."""

    _size: DeltaSize | None = None
    needs_base = True
    decodes_apart = True
    is_measured = True
    adds = False
    words = Words("changes", "apply changes of")

    def most_nbytes(self, numel: int) -> int:
        """Return the bytes of a delta at their most."""
        return delta_nbytes(numel, 2) if numel else 0

    def beside_nbytes(self, numel: int) -> int:
        """Return the bytes that kernels note of changes."""
        return marks_nbytes(numel)

    def measure(self, mine: Array, before: Array, *, room: Array) -> int:
        """Return the bytes of a delta; 0: nothing has changed."""
        self._size = measure_delta(before, mine, room=room)
        return self._size.nbytes if self._size.changed else 0

    def encode(self, payload: Array, mine: Array, before: Array, *, start: int, room: Array) -> None:
        """Write what has changed."""
        if payload.size:
            encode_delta(before, mine, size=self._size, out=payload, room=room)

    def decode(self, out: Array, payload: Array, *, room: Array) -> None:
        """Put what has changed into the whole of before."""
        if payload.size:
            apply_delta(out, payload, room=room)


@dataclass(frozen=True, slots=True)
class NonZeros:
    """Elements that are not zero, and a bitmap of where they are."""

    width: int
    """Bytes of an element."""
    needs_base = False
    decodes_apart = False
    is_measured = True
    adds = False
    words = Words()

    def most_nbytes(self, numel: int) -> int:
        """Return the bytes of the range as it is."""
        return numel * self.width

    def beside_nbytes(self, numel: int) -> int:
        """Return the bytes that kernels note of elements."""
        return marks_nbytes(numel)

    def measure(self, mine: Array, before: Array, *, room: Array) -> int:
        """Return the bytes of a payload, or of the range as it is, if these are no more."""
        return min(sparse_nbytes(mine, room=room), int(mine.nbytes))

    def encode(self, payload: Array, mine: Array, before: Array, *, start: int, room: Array) -> None:
        """Write what is not zero, or the range as it is."""
        if payload.size < mine.nbytes:
            write_sparse(payload, mine, room=room)
        else:
            payload[:] = mine.view(np.uint8)

    def decode(self, out: Array, payload: Array, *, room: Array) -> None:
        """Write all elements, each once."""
        if payload.size < out.nbytes:
            decode_sparse(out, payload, room=room)
        else:
            out.view(np.uint8)[:] = payload  # bytes: CuPy 13 copies no bfloat16
