"""Hot loops in C++, each with a NumPy form that is its reference and its stand-in (decision 0008).

    reduce_into  add_into  cast_into  touch         arrays.py      (out, source)
    copy_into  copy_checked  take_rows  put_rows
    square_sum  square_sums_into  first_nonfinite   measure.py     a number about an array
    adamw_  adamw_rows_  sgd_  lion_  late_adamw_   optim.py       in place
    round_master  split_master  join_master         masters.py     of 16-bit parameters
    encode_moments  decode_moments  adamw_blocks_   moments.py     in 8 bits
    crc32c  crc32c_combine  crc32c_grains           checksum.py    any buffer
    encode_blocks  decode_blocks                    codecs.py      fewer bytes
    find_changes  write_changes  apply_changes
    split_planes  join_planes  find_largest
    open_rendezvous                                 rendezvous.py  ranks of a node meet
    start_messages  plan_rounds  prepare_hosts      wire.py        ranks of several hosts exchange messages
    Doorbell                                        doorbell.py    threads wake each other

checks.py, dtypes.py and scalars.py say what arguments may be; extension.py loads the compiled form.

The compiled form serves if it was built (`AVAILABLE`); otherwise the NumPy form does, and the first call says so once.
``ZERORT_NATIVE=0`` asks for the NumPy forms.
"""

# not-gpu: between threads and processes of the host
from __future__ import annotations

from zerort.native.arrays import (
    add_into,
    address_of,
    cast_into,
    copy_checked,
    copy_into,
    put_rows,
    reduce_into,
    take_rows,
    touch,
)
from zerort.native.checksum import crc32c, crc32c_combine, crc32c_grains
from zerort.native.codecs import (
    apply_changes,
    decode_blocks,
    encode_blocks,
    find_changes,
    find_largest,
    join_planes,
    split_planes,
    write_changes,
)
from zerort.native.doorbell import Doorbell
from zerort.native.dtypes import BFLOAT16, DTYPE_CODES, REDUCTION_CODES
from zerort.native.extension import AVAILABLE, describe, explain
from zerort.native.masters import join_master, round_master, split_master
from zerort.native.measure import first_nonfinite, square_sum, square_sums_into
from zerort.native.moments import adamw_blocks_, decode_moments, encode_moments
from zerort.native.optim import adamw_, adamw_rows_, late_adamw_, lion_, sgd_

__all__ = [
    "AVAILABLE",
    "BFLOAT16",
    "DTYPE_CODES",
    "REDUCTION_CODES",
    "Doorbell",
    "adamw_",
    "adamw_blocks_",
    "adamw_rows_",
    "add_into",
    "address_of",
    "apply_changes",
    "cast_into",
    "copy_checked",
    "copy_into",
    "crc32c",
    "crc32c_combine",
    "crc32c_grains",
    "decode_blocks",
    "decode_moments",
    "describe",
    "encode_blocks",
    "encode_moments",
    "explain",
    "find_changes",
    "find_largest",
    "first_nonfinite",
    "join_master",
    "join_planes",
    "late_adamw_",
    "lion_",
    "put_rows",
    "reduce_into",
    "round_master",
    "sgd_",
    "split_master",
    "split_planes",
    "square_sum",
    "square_sums_into",
    "take_rows",
    "touch",
    "write_changes",
]
