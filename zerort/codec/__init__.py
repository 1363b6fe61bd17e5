"""Fewer bytes for the same array: pure functions over 1-D arrays of the host or a GPU.

    INT8 INT4 BFLOAT16      formats.py      `Format`: float32 → a payload of bytes → float32, with a bound on the error
    LargestFormat           topk.py         the largest elements of each block, and where they are
    SummandFormat           summands.py     what both can do for gradients: feedback, and sums of several payloads
    ROWS                    rows.py         the same at rest: rows of bytes, cut between any two blocks
    Stochastic              rounding.py     rounding that depends on (seed, update, sender, global index) alone
    encode_delta            delta.py        lossless: elements whose bits changed; `apply_delta` puts them into a copy
    encode_sparse           sparse.py       lossless: elements that are not zero, and a bitmap of where they are
    split_planes            planes.py       lossless: byte b of all elements together, which compresses better

Host arrays go to the kernels of `zerort.native`, CuPy's to those of kernels_cuda.py and changes_cuda.py; all give the
same bits, whatever the machine. Blocks lie by global element index: a shard that begins at a multiple of `Format.block`
gives the codes that the whole array has there, so results do not depend on how ranks cut an array (decision 0123).
"""

from __future__ import annotations

from zerort.codec.delta import DeltaSize, apply_delta, delta_nbytes, encode_delta, measure_delta
from zerort.codec.formats import BFLOAT16, FORMATS, INT4, INT8, Format, find_format
from zerort.codec.planes import join_planes, split_planes
from zerort.codec.rounding import Stochastic
from zerort.codec.rows import ROWS, BlockRows
from zerort.codec.sparse import decode_sparse, encode_sparse, sparse_nbytes, write_sparse
from zerort.codec.summands import Coded, SummandFormat
from zerort.codec.topk import LARGEST_BLOCK, LargestFormat
from zerort.native.reference.changes import marks_nbytes

__all__ = [
    "BFLOAT16",
    "FORMATS",
    "INT4",
    "INT8",
    "LARGEST_BLOCK",
    "ROWS",
    "BlockRows",
    "Coded",
    "DeltaSize",
    "Format",
    "LargestFormat",
    "Stochastic",
    "SummandFormat",
    "apply_delta",
    "decode_sparse",
    "delta_nbytes",
    "encode_delta",
    "encode_sparse",
    "find_format",
    "join_planes",
    "marks_nbytes",
    "measure_delta",
    "sparse_nbytes",
    "split_planes",
    "write_sparse",
]
