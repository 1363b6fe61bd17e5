"""Moments of an optimizer in 8 bits: blocks with a signed or unsigned logarithmic code, rounded by chance.

    encode_moments  decode_moments      float32 and blocks of 260 bytes; the code is defined in `reference.moments`
    adamw_blocks_                       a step of AdamW whose moments are such blocks

Arrays are 1-D and contiguous. Blocks lie by global element index and chance is a function of that index, so neither
ranks nor chunks show in the bits (decision 0131). Imports the siblings of this folder only.
"""

from __future__ import annotations

import numpy as np

from zerort.native import checks, reference
from zerort.native.dtypes import Array
from zerort.native.extension import kernels, use_numpy_form
from zerort.native.optim import adamw_
from zerort.native.reference.moments import MOMENT_BLOCK, MOMENT_NBYTES, moment_nbytes

__all__ = ["adamw_blocks_", "decode_moments", "encode_moments"]

_TILE = 64
"""Blocks that are decoded at once: two float32 tiles of them stay in a second-level cache."""


def encode_moments(payload: Array, source: Array, *, start: int, is_signed: bool, keys: tuple[int, int]) -> None:
    """Write ``source`` as blocks.

    Args:
        payload: uint8, 260 bytes for each 256 elements and a rest; aligned to 4 bytes.
        source: float32; only read.
        start: Global index of its first element, a multiple of a block.
        is_signed: Whether elements have a sign; else none is below 0.
        keys: Two numbers below 2**32 that choose how each element is rounded.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    if kernels is not None and kernels.encode_moments(payload, source, is_signed, start, *keys):
        return
    checks.check_moments("source", source, payload, start, encodes=True)
    use_numpy_form()
    reference.encode_moments(payload, source, start, is_signed=is_signed, keys=keys)


def decode_moments(out: Array, payload: Array, *, is_signed: bool) -> None:
    """Write the values of blocks to ``out``, float32.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if kernels is not None and kernels.decode_moments(out, payload, is_signed):
        return
    checks.check_moments("out", out, payload, 0, encodes=False)
    use_numpy_form()
    reference.decode_moments(out, payload, is_signed=is_signed)


def adamw_blocks_(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    start: int,
    keys: tuple[tuple[int, int], tuple[int, int]],
    grad_scale: float = 1.0,
    copy_out: Array | None = None,
) -> None:
    """Make one step of AdamW over moments in blocks: decode, `adamw_`, encode, a few blocks at a time.

    Args:
        param: As in `adamw_`; not float64.
        grad: As in `adamw_`.
        exp_avg: Blocks of the running mean, uint8.
        exp_avg_sq: Blocks of the running mean of squares, uint8.
        lr: As in `adamw_`, like all that is not said here.
        beta1: See `adamw_`.
        beta2: See `adamw_`.
        eps: See `adamw_`.
        weight_decay: See `adamw_`.
        step: See `adamw_`.
        start: Global index of the first element, a multiple of a block.
        keys: How each of the two moments is rounded; see `encode_moments`.
        grad_scale: See `adamw_`.
        copy_out: See `adamw_`.

    Raises:
        ValueError: If an array is not what it can work on, or a number out of range.
    """
    numel = param.size
    tile = MOMENT_BLOCK * _TILE
    first, second = np.empty(min(tile, numel), np.float32), np.empty(min(tile, numel), np.float32)
    checks.check_moments("param", first[:0], exp_avg[:0], start, encodes=True)
    for begin in range(0, numel, tile):
        end = min(begin + tile, numel)
        m, v = first[: end - begin], second[: end - begin]
        blocks = slice(begin // MOMENT_BLOCK * MOMENT_NBYTES, moment_nbytes(end))
        decode_moments(m, exp_avg[blocks], is_signed=True)
        decode_moments(v, exp_avg_sq[blocks], is_signed=False)
        adamw_(
            param[begin:end],
            grad[begin:end],
            m,
            v,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
            copy_out=None if copy_out is None else copy_out[begin:end],
        )
        encode_moments(exp_avg[blocks], m, start=start + begin, is_signed=True, keys=keys[0])
        encode_moments(exp_avg_sq[blocks], v, start=start + begin, is_signed=False, keys=keys[1])
