"""Master weights of 16-bit parameters: rounded to them, or kept as the 16 bits that a bfloat16 parameter lacks.

    round_master(param, master)                 bfloat16: half away from zero; float16: to nearest, ties to even
    split_master(param, remainder, master)      bfloat16 and the lower 16 bits of the master, uint16
    join_master(master, param, remainder)       exactly the master that was split; of a NaN not its payload

Half away from zero is what makes the pair exact: then the sign of the remainder says whether the parameter was rounded
up, which nearest even does not (decision 0130). Arrays are 1-D, contiguous, of one length. Imports the siblings of this
folder only.
"""

from __future__ import annotations

from zerort.native import checks, reference
from zerort.native.arrays import cast_into
from zerort.native.dtypes import FLOAT16, Array
from zerort.native.extension import kernels, use_numpy_form

__all__ = ["join_master", "round_master", "split_master"]


def round_master(param: Array, master: Array) -> None:
    """Round float32 master weights to their parameters, as every update does.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if param.dtype == FLOAT16:
        cast_into(param, master)
    else:
        _split(param, None, master)


def split_master(param: Array, remainder: Array, master: Array) -> None:
    """Write the bfloat16 parameters that master weights round to, and the 16 bits that these lack.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    _split(param, remainder, master)


def _split(param: Array, remainder: Array | None, master: Array) -> None:
    if kernels is not None and kernels.split_master(param, remainder, master):
        return
    checks.check_master(param, remainder, master, splits=True)
    use_numpy_form()
    reference.split_master(param, remainder, master)


def join_master(master: Array, param: Array, remainder: Array) -> None:
    """Write the float32 master weights that ``param`` and ``remainder`` were made of.

    Raises:
        ValueError: If an array is not what it can work on.
    """
    if kernels is not None and kernels.join_master(master, param, remainder):
        return
    checks.check_master(param, remainder, master, splits=False)
    use_numpy_form()
    reference.join_master(master, param, remainder)
