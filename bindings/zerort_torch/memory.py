"""Arrays as tensors and back over DLPack: the same memory, nothing copied.

NumPy has no bfloat16 of its own: such memory crosses as int16 and is looked at as bfloat16 on the other side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from zerort.errors import CallError
from zerort.native.dtypes import BFLOAT16

if TYPE_CHECKING:
    from zerort.typing import Array

__all__ = ["as_array", "as_tensor", "check_device"]


def as_tensor(array: Array) -> torch.Tensor:
    """Return a writable array as a tensor over the same memory."""
    if array.dtype == BFLOAT16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array over the same memory; a sparse one is made dense first."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.dtype is torch.bfloat16:
        array: Array = plain.view(torch.int16).numpy().view(BFLOAT16)
    else:
        array = plain.numpy()
    return array


def check_device(name: str, device: torch.device) -> None:
    """Refuse a parameter that lies elsewhere than the runtime's buffers.

    Raises:
        CallError: It does.
    """
    if device.type not in ("cpu", "meta"):
        raise CallError(
            f"Expected {name!r} on the runtime's device, the CPU, got it on {device}. Move the model before it is "
            "sharded: model.to('cpu'); or build it on the meta device."
        )
