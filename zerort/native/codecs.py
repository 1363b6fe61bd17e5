"""Fewer bytes for the same array: blocks of codes with a scale, changed or largest elements, byte planes.

Arrays are 1-D and contiguous. The definitions, and the NumPy forms that these agree with to the bit, are in
`reference.blocks`, `reference.changes` and `reference.largest`. Imports the siblings of this folder only.
"""

from __future__ import annotations

from zerort.native import checks, reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = [
    "apply_changes",
    "decode_blocks",
    "encode_blocks",
    "find_changes",
    "find_largest",
    "join_planes",
    "split_planes",
    "write_changes",
]


def encode_blocks(
    source: Array,
    scales: Array,
    codes: Array,
    *,
    bits: int,
    start: int = 0,
    keys: tuple[int, int] | None = None,
    base: Array | None = None,
) -> None:
    """Write a scale for each block of ``source`` and a code for each element.

    Args:
        source: float32; only read.
        scales: float32 for codes of 8 bits; uint16, the bits of bfloat16, for codes of 4.
        codes: int8 for 8 bits, uint8 with two codes each for 4.
        bits: 8 (blocks of 256) or 4 (blocks of 128).
        start: Global index of the first element, a multiple of a block.
        keys: Two numbers below 2**32 that choose how each element is rounded, stochastically; None: to nearest even.
        base: float32, as many elements: codes are of what ``source`` has more than it; where it is not finite it counts
            as 0.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    key0, key1 = keys if keys is not None else (0, 0)
    if kernels is not None and kernels.encode_blocks(
        source, scales, codes, bits, start, keys is not None, key0, key1, base
    ):
        return
    checks.check_blocks("source", source, scales, codes, bits, start, encodes=True, base=base)
    use_numpy_form()
    stochastic = keys is not None
    reference.encode_blocks(source, scales, codes, bits, start, stochastic=stochastic, keys=(key0, key1), base=base)


def decode_blocks(out: Array, scales: Array, codes: Array, *, bits: int, adds: bool = False) -> None:
    """Write the values of codes that `encode_blocks` wrote to ``out``, float32.

    Args:
        out: Where they go.
        scales: Of their blocks.
        codes: Of the elements.
        bits: Of a code.
        adds: Whether they are added to what ``out`` holds, the ``base`` that they were taken from: where it is not
            finite it counts as 0.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if kernels is not None and kernels.decode_blocks(out, scales, codes, bits, adds):
        return
    checks.check_blocks("out", out, scales, codes, bits, 0, encodes=False)
    use_numpy_form()
    reference.decode_blocks(out, scales, codes, bits, adds=adds)


def find_changes(base: Array, now: Array) -> tuple[int, int]:
    """Return how many elements of ``now`` differ from ``base`` in their bits, and the bytes of their gaps.

    Args:
        base: Unsigned integers: the bits of a tensor.
        now: The same dtype and length.

    Raises:
        ValueError: If they are not.
    """
    if kernels is not None:
        found: tuple[int, int] | None = kernels.find_changes(base, now)
        if found is not None:
            return found
    checks.check_changes(base=base, now=now)
    use_numpy_form()
    return reference.find_changes(base, now)


def write_changes(base: Array, now: Array, positions: Array, values: Array, *, bitmap: bool) -> None:
    """Write where ``now`` differs from ``base``, and its values there; sizes are those that `find_changes` gave.

    Raises:
        ValueError: If an array is not what it can work on, or both differ in more or fewer places.
    """
    fits: bool | None = None
    if kernels is not None:
        fits = kernels.write_changes(base, now, positions, values, bitmap)
    if fits is None:
        checks.check_changes(base=base, now=now)
        checks.check_positions(base, positions, values, bitmap=bitmap)
        use_numpy_form()
        fits = reference.write_changes(base, now, positions, values, bitmap=bitmap)
    if not fits:
        raise ValueError(
            f"Expected {values.size} changed elements and {positions.size} bytes of positions, got others. "
            "Do not write to the arrays between find_changes and write_changes."
        )


def apply_changes(target: Array, positions: Array, values: Array, *, bitmap: bool) -> None:
    """Put ``values`` into ``target`` where the positions say.

    Raises:
        ValueError: If an array is not what it can work on, or the positions do not fit: part may have been written.
    """
    fits: bool | None = None
    if kernels is not None:
        fits = kernels.apply_changes(target, positions, values, bitmap)
    if fits is None:
        checks.check_changes(target=target)
        checks.check_positions(target, positions, values)
        use_numpy_form()
        fits = reference.apply_changes(target, positions, values, bitmap=bitmap)
    if not fits:
        raise ValueError(
            f"Expected positions of {values.size} elements out of {target.size}, got others. The changes are damaged, "
            "or those of another array."
        )


def split_planes(planes: Array, elements: Array) -> None:
    """Write byte b of every element into plane b of ``planes``, uint8 and as many bytes.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if kernels is not None and kernels.split_planes(planes, elements):
        return
    checks.check_planes(planes, elements)
    use_numpy_form()
    reference.split_planes(planes, elements)


def join_planes(elements: Array, planes: Array) -> None:
    """Make ``elements`` of the planes that `split_planes` wrote.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if kernels is not None and kernels.join_planes(elements, planes):
        return
    checks.check_planes(planes, elements)
    use_numpy_form()
    reference.join_planes(elements, planes)


def find_largest(source: Array, positions: Array, *, block: int, keep: int) -> None:
    """Write where the ``keep`` largest magnitudes of each block are, counted from its first element, in order.

    NaN is above infinity, and that above all numbers; of equal magnitudes the first is taken.

    Args:
        source: float32; only read.
        positions: uint16: ``keep`` for each block, all of a last one that is shorter.
        block: Elements of a block, at most 65,536.
        keep: How many of them, at least one.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    if kernels is not None and kernels.find_largest(source, positions, block, keep):
        return
    checks.check_largest(source, positions, block, keep)
    use_numpy_form()
    reference.find_largest(source, positions, block, keep)
