"""Read a checkpoint without zerort: plain files, JSON, NumPy, and the format as ``manifest.py`` describes it.

python tests/oracles/read_checkpoint.py DIRECTORY      lists what is in it
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from crc import crc32c

__all__ = ["read_checkpoint"]

Array = np.ndarray[Any, np.dtype[Any]]

FORMATS = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "uint8": "B", "bfloat16": "H"}


def decode(dtype: str, data: bytes) -> Array:
    """Return the numbers that little-endian bytes stand for; a bfloat16 is the upper half of a float32."""
    code = FORMATS[dtype]
    numbers = struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    if dtype == "bfloat16":
        return (np.array(numbers, np.uint32) << 16).view(np.float32)
    return np.array(numbers, dtype)


def from_planes(frame: bytes, width: int) -> bytes:
    """Return the elements of a zstd frame that has their first bytes, then their second ones, and so on."""
    import zstandard

    planes = zstandard.ZstdDecompressor().decompress(frame)
    numel = len(planes) // width
    return bytes(planes[byte * numel + element] for element in range(numel) for byte in range(width))


def from_bitmap(data: bytes, numel: int, width: int) -> bytes:
    """Return elements of which those that are not zero stand first, and then a bit for each: whether it is one."""
    bitmap = len(data) - (numel + 7) // 8
    parts, at = [], 0
    for element in range(numel):
        is_there = data[bitmap + element // 8] >> element % 8 & 1
        parts.append(data[at : at + width] if is_there else bytes(width))
        at += width * is_there
    assert at == bitmap, (at, bitmap)
    return b"".join(parts)


def read_checkpoint(directory: str | Path) -> tuple[dict[str, Any], dict[tuple[str, str], Array]]:
    """Return the manifest's body and every tensor, by kind and name; every checksum is compared."""
    text = (Path(directory) / "manifest.json").read_bytes()
    head = re.match(rb'\{"format":"zerort-checkpoint","version":[123],"crc32c":"([0-9a-f]{8})",\n', text)
    assert head is not None, text[:80]
    assert crc32c(text[: head.start(1)] + b"00000000" + text[head.end(1) :]) == int(head[1], 16), "manifest.json"
    body = json.loads(text)["body"]
    files = [(Path(directory) / name).read_bytes() for name, _ in body["files"]]
    assert [len(data) for data in files] == [nbytes for _, nbytes in body["files"]]
    tensors = {}
    for kind, named in body["kinds"].items():
        for name, (dtype, shape, extents) in named.items():
            parts, at = [], 0
            for file, offset, first, numel, checksum, *compressed in extents:
                nbytes = numel * struct.calcsize(FORMATS[dtype])
                data = files[file][offset : offset + (compressed[0] if compressed else nbytes)]
                assert first == at, (kind, name, "has a gap or an overlap", extents)
                assert crc32c(data) == checksum, (kind, name, first)
                if compressed[1:] == [1]:
                    parts.append(from_bitmap(data, numel, nbytes // numel))
                else:
                    parts.append(from_planes(data, nbytes // numel) if compressed else data)
                at += numel
            assert at == math.prod(shape), (kind, name, "is not whole")
            tensors[kind, name] = decode(dtype, b"".join(parts)).reshape(shape)
    return body, tensors


if __name__ == "__main__":
    for (kind, name), values in read_checkpoint(sys.argv[1])[1].items():
        print(f"{kind:12} {name:30} {values.dtype} {values.shape}")
