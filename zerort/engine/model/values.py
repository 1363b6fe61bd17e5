"""`agree_on_values`: parameters get the same values on every rank, or all raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from zerort import native
from zerort.buffer import unit_title
from zerort.comm.agreed import gather_json
from zerort.engine.context import Context
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["agree_on_values"]


def agree_on_values(
    context: Context, name: str, declared: Mapping[str, TensorSpec], values: dict[str, Array], *, broadcast: bool
) -> dict[str, Array]:
    """Return the values that every rank packs: the same on all of them, or rank 0's. Every rank calls this."""
    if not broadcast:
        mine = {
            local: native.crc32c(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            for local, value in values.items()
        }
        found = gather_json(context.world, mine, name="initial values")
        for rank, other in enumerate(found):
            odd = next((local for local in declared if other.get(local) != found[0].get(local)), None)
            if odd is not None:
                raise CallError(
                    f"Expected the same initial values of {unit_title(name)} on every rank, got others of {odd!r} on "
                    f"rank {rank} than on rank 0. Seed all ranks alike, or pass broadcast=True to take rank 0's."
                )
        return values
    sent: dict[str, Array] = {}
    for local in _names_on_root(context, values):
        spec = declared[local]
        given = values.get(local)
        whole = np.zeros(spec.shape, numpy_dtype(spec.dtype)) if given is None else np.array(given, order="C")
        context.world.broadcast(whole.reshape(-1), name="initial values").wait()  # not-gpu: between arrays of the host
        sent[local] = whole
    return sent


def _names_on_root(context: Context, values: Iterable[str]) -> list[str]:
    found: list[str] = gather_json(context.world, list(values), name="initial values")[0]
    return found
