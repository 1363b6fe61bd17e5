"""In which blocks frozen parameters rest (``zr.open(frozen_format=)``), by dtype, and where they cannot."""

from __future__ import annotations

from typing import Final

from zerort.codec import ROWS, BlockRows
from zerort.errors import CallError

__all__ = ["check_frozen_format", "rows_of"]

_RESTING: Final = {
    "float32": ("int8", "int4"),
    "bfloat16": ("int8", "int4"),
    "float16": ("int8",),  # the scale of int4 is rounded up: its largest values would overflow
}
"""The formats that frozen parameters of a dtype can rest in."""


def rows_of(frozen_format: str | None, dtype: str, *, what: str) -> BlockRows | None:
    """Return the blocks that frozen parameters of a dtype rest in; None: as they are, being no floating-point numbers.

    Args:
        frozen_format: What was asked for.
        dtype: Theirs.
        what: What they are called, in errors.

    Raises:
        CallError: Numbers of this dtype cannot rest in that format.
    """
    if frozen_format is None or dtype.startswith(("int", "uint", "bool")):
        return None
    legal = _RESTING.get(dtype, ())
    if frozen_format in legal:
        return ROWS[frozen_format]
    also = f" or open the runtime with frozen_format={legal[0]!r}," if legal else ""
    raise CallError(
        f"Expected frozen parameters in a dtype that frozen_format={frozen_format!r} can hold, got {what} in {dtype}. "
        f"Convert it, array.astype('float32'),{also} or leave frozen_format= out."
    )


def check_frozen_format(frozen_format: str | None) -> None:
    """Refuse a format that there is not.

    Raises:
        CallError: There is no such format.
    """
    if frozen_format is not None and frozen_format not in ROWS:
        raise CallError(
            f"Expected frozen_format to be one of None, {', '.join(map(repr, ROWS))}; got {frozen_format!r}."
        )
