"""The head of a safetensors file: an 8-byte length, JSON, then the tensors' bytes without a gap.

Written by hand because the library wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from zerort.errors import CheckpointError
from zerort.layout import itemsize

__all__ = ["DTYPES", "MOST_HEAD", "Placed", "plan_file"]

DTYPES: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}
"""What safetensors calls the dtypes."""

MOST_HEAD = 100_000_000
"""Bytes: safetensors refuses to read a longer head."""

Placed = tuple[str, str, tuple[int, ...], int]
"""A tensor in the file: name, dtype, shape, bytes."""


def plan_file(tensors: Sequence[Placed], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the head of a file, and the tensors' names in the order in which their bytes follow.

    Wide dtypes come first, so that every tensor is aligned for its dtype.

    Raises:
        CheckpointError: A tensor's name or dtype, or the number of tensors, is more than the format can hold.
    """
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    order = sorted(tensors, key=lambda tensor: -itemsize(tensor[1]))
    offset = 0
    for name, dtype, shape, nbytes in order:
        if name in head or dtype not in DTYPES:
            got = f"the name {name!r}" if name in head else f"{dtype} for {name!r}"
            raise CheckpointError(
                f"Expected tensors that safetensors can hold, got {got}. It has no complex128 and keeps the name "
                "'__metadata__' for itself: load the checkpoint and write this tensor in another way."
            )
        head[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEAD:
        raise CheckpointError(
            f"Expected a head of at most {MOST_HEAD} bytes, as safetensors reads it, got {len(text)} for "
            f"{len(tensors)} tensors. Export fewer tensors: name one kind."
        )
    return struct.pack("<Q", len(text)) + text, [name for name, *_ in order]
