"""The NumPy form of each kernel: what the compiled form is tested against, and what serves without a compiler.

The same names, signatures and files as in `zerort.native` (arrays.py, measure.py, optim.py, masters.py, moments.py,
checksum.py; the facade's codecs are here in blocks.py, changes.py and largest.py), but nothing is checked here: the
facade has done that. Loops run over blocks that stay in cache, so that temporaries cost little.
"""

from __future__ import annotations

from zerort.native.reference.arrays import add_into, cast_into, copy_into, put_rows, reduce_into, take_rows, touch
from zerort.native.reference.blocks import decode_blocks, encode_blocks
from zerort.native.reference.changes import (
    apply_changes,
    find_changes,
    join_planes,
    split_planes,
    write_changes,
)
from zerort.native.reference.checksum import bytes_of, crc32c, crc32c_combine, crc32c_grains
from zerort.native.reference.largest import find_largest
from zerort.native.reference.masters import join_master, split_master
from zerort.native.reference.measure import copy_checked, first_nonfinite, square_sum, square_sums_into
from zerort.native.reference.moments import decode_moments, encode_moments
from zerort.native.reference.optim import adamw_, adamw_rows_, late_adamw_, lion_, sgd_

__all__ = [
    "adamw_",
    "adamw_rows_",
    "add_into",
    "apply_changes",
    "bytes_of",
    "cast_into",
    "copy_checked",
    "copy_into",
    "crc32c",
    "crc32c_combine",
    "crc32c_grains",
    "decode_blocks",
    "decode_moments",
    "encode_blocks",
    "encode_moments",
    "find_changes",
    "find_largest",
    "first_nonfinite",
    "join_master",
    "join_planes",
    "late_adamw_",
    "lion_",
    "put_rows",
    "reduce_into",
    "sgd_",
    "split_master",
    "split_planes",
    "square_sum",
    "square_sums_into",
    "take_rows",
    "touch",
    "write_changes",
]
