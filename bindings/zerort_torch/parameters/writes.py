"""Writes to parameters that were gathered to be read: nobody would keep them, or all ranks at once. They are refused.

in place          torch counts versions: compared whenever a unit is released
through ``.data``  no version tells: after a `gathered` block, addresses and samples of values are compared, too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerort.errors import CallError

__all__ = ["Look", "written_error"]

_SAMPLES = 4096  # values of a tensor that are compared: all of a smaller one


class Look(NamedTuple):
    """What a parameter was when it was looked at."""

    address: int
    sample: torch.Tensor

    @classmethod
    def at(cls, parameter: torch.Tensor) -> Look:
        """Look at a parameter."""
        flat = parameter.detach().reshape(-1)
        return cls(parameter.data_ptr(), flat[:: -(-flat.numel() // _SAMPLES) or 1].clone())

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Say whether the parameter is still what it was."""
        now = Look.at(parameter)
        if now.address != self.address or now.sample.dtype is not self.sample.dtype:
            return False
        same: bool = torch.equal(now.sample.view(torch.uint8), self.sample.view(torch.uint8))  # bytes: NaN is itself
        return same


def written_error(names: Sequence[str]) -> CallError:
    """Return the error for parameters that were written to."""
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CallError(
        f"Expected {shown} to be read while gathered, got a write. Write between steps, on every rank: `with "
        "zt.gathered(module, write=True):`. A forward that writes to its weights cannot be sharded: "
        "nn.Embedding(max_norm=…) does, so rescale after rt.step() instead."
    )
