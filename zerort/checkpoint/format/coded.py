"""`CodedTensor`: frozen parameters that a checkpoint holds as rows of codes; `coded_tensors` finds them.

Their kind is ``parameter.int8`` or ``parameter.int4``, each tensor an array of bytes with a row for each block. What
they are when decoded stands in the manifest's meta.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from zerort.checkpoint.format.casts import FLOATS
from zerort.checkpoint.format.manifest import Manifest, StoredTensor
from zerort.checkpoint.format.schema import COUNT, Each, Where, expect
from zerort.codec import ROWS, BlockRows
from zerort.errors import CheckpointError

__all__ = ["CodedTensor", "coded_tensors", "parameter_kind", "stored_tensors"]

_SCHEMA: Final = Each(
    (
        Where(lambda name: type(name) is str and name in ROWS, "a format of codes"),
        Where(lambda dtype: type(dtype) is str and dtype in FLOATS, "a dtype of floats"),
        [COUNT],
    )
)


class CodedTensor(NamedTuple):
    """What a tensor is that is stored as rows of codes."""

    rows: BlockRows
    dtype: str
    """What it is decoded to."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.rows.nbytes_of(self.numel)


def parameter_kind(rows: BlockRows | None) -> str:
    """Return the kind of values that parameters are in a checkpoint.

    >>> parameter_kind(None), parameter_kind(ROWS["int4"])
    ('parameter', 'parameter.int4')
    """
    return "parameter" if rows is None else f"parameter.{rows.name}"


def coded_tensors(manifest: Manifest) -> dict[str, CodedTensor]:
    """Return what the parameters are that a checkpoint holds as codes, by full name.

    Raises:
        CheckpointError: It does not say so as it should.
    """
    said = manifest.meta.get("coded", {})
    try:
        expect(said, _SCHEMA, at="meta.coded")
        found = {name: CodedTensor(ROWS[format], dtype, tuple(shape)) for name, (format, dtype, shape) in said.items()}
        for rows in ROWS.values():
            for name, stored in manifest.tensors.get(parameter_kind(rows), {}).items():
                one = found.get(name)
                if one is None or one.rows is not rows or stored.numel != rows.nbytes_of(one.numel):
                    raise ValueError(f"Expected to be told what {name!r} is, stored in rows of {rows.name}")
    except ValueError as error:
        raise CheckpointError(
            f"Expected the checkpoint of a runtime, got one whose codes are not described: {error}. Nothing was "
            "changed. Name one that rt.save has written."
        ) from None
    return found


def stored_tensors(manifest: Manifest, kind: str) -> dict[str, StoredTensor | CodedTensor]:
    """Return the tensors of a kind by full name; ``parameter``: those that are stored as codes among them."""
    found: dict[str, StoredTensor | CodedTensor] = dict(manifest.tensors.get(kind, {}))
    return found | (coded_tensors(manifest) if kind == "parameter" else {})
