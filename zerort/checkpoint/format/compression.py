"""Compressed extents: the byte planes of a piece of a tensor, as one zstd frame. Lossless, for slow storage.

An extent that does not shrink is stored as it is. The zstandard package is imported when it is needed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from zerort.codec import join_planes, split_planes
from zerort.errors import CallError, CheckpointError
from zerort.typing import Array

__all__ = ["COMPRESSIONS", "check_compression", "compressed", "decompressed", "expect_reader"]

COMPRESSIONS: Final = ("zstd",)
"""What `save` takes as ``compress``."""

_LEVEL: Final = 3
"""zstd's own default: higher levels find nothing more in the bytes of weights."""

_MISSING = "the zstandard package, got none. Install it: pip install zstandard"


def check_compression(name: str | None) -> None:
    """Raise unless a checkpoint can be compressed in that way here.

    Raises:
        CallError: It is not known, or its package is missing.
    """
    if name is None:
        return
    if name not in COMPRESSIONS:
        raise CallError(f"Expected compress to be None or {', '.join(map(repr, COMPRESSIONS))}, got {name!r}.")
    if _zstandard() is None:
        raise CallError(f"Expected {_MISSING}; or save without compress.")


def expect_reader() -> None:
    """Raise unless compressed extents can be read here.

    Raises:
        CheckpointError: The package is missing.
    """
    if _zstandard() is None:
        raise CheckpointError(f"Expected, for a compressed checkpoint, {_MISSING}. Nothing was changed.")


def compressed(elements: Array) -> bytes | None:
    """Return a 1-D array as a frame; None if that is no shorter."""
    frame: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(split_planes(elements))
    return frame if len(frame) < elements.nbytes else None


def decompressed(frame: Array, *, dtype: np.dtype[Any], numel: int) -> Array:
    """Return the elements of a frame whose checksum was right.

    Raises:
        ValueError: It holds something else.
    """
    zstandard = _zstandard()
    elements = np.empty(numel, dtype)
    try:
        octets = zstandard.ZstdDecompressor().decompress(frame.data, max_output_size=elements.nbytes)
    except zstandard.ZstdError as error:
        raise ValueError(f"a zstd frame of {elements.nbytes} bytes, got: {error}") from None
    if len(octets) != elements.nbytes:
        raise ValueError(f"a zstd frame of {elements.nbytes} bytes, got one of {len(octets)}")
    join_planes(elements, np.frombuffer(octets, np.uint8))
    return elements


def _zstandard() -> Any:
    """Return the package, or None."""
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
