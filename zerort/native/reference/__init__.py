"""The NumPy form of each kernel: what the compiled form is tested against, and what serves without a compiler.

The same names, signatures and files as in `zerort.native` (arrays.py, measure.py, optim.py, checksum.py), but nothing
is checked here: the facade has done that. Loops run over blocks that stay in cache, so that temporaries cost little.
"""

from __future__ import annotations

from zerort.native.reference.arrays import add_into, cast_into, copy_into, reduce_into, touch
from zerort.native.reference.checksum import bytes_of, crc32c, crc32c_combine, crc32c_grains
from zerort.native.reference.measure import copy_checked, first_nonfinite, square_sum, square_sums_into
from zerort.native.reference.optim import adamw_, lion_, sgd_

__all__ = [
    "adamw_",
    "add_into",
    "bytes_of",
    "cast_into",
    "copy_checked",
    "copy_into",
    "crc32c",
    "crc32c_combine",
    "crc32c_grains",
    "first_nonfinite",
    "lion_",
    "reduce_into",
    "sgd_",
    "square_sum",
    "square_sums_into",
    "touch",
]
