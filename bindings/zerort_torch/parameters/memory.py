"""Arrays as tensors and back over DLPack: the same memory, nothing copied. All that knows of torch.cuda is here.

NumPy has no bfloat16 of its own: such memory crosses as int16 and is looked at as bfloat16 on the other side.

[Note: whose stream] (decision 0057)
On a GPU the runtime works after what its caller has on CuPy's current stream, and before what the caller puts there
next. torch has a current stream of its own, for each thread: backward and its hooks run on autograd's threads. So
whoever enters the runtime does so within `on_torchs_stream`, which makes torch's stream CuPy's, on that thread and for
that long; and where the runtime calls torch, an optimizer say, torch takes CuPy's (`on_stream_of`). DLPack hands a
stream over with every export: it then finds one stream on both sides, and nothing to wait for.

[Note: who keeps what]
A tensor over the runtime's array keeps that array alive, and an array over a tensor keeps the tensor: torch's allocator
gets memory back when the runtime has let go of it. It copies gradients on torch's own stream, where the allocator knows
of them; what it reads on another stream it holds until the event behind that has fired.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from zerort.engine.binding import BFLOAT16, Tensors, accept_tensors
from zerort.errors import CallError
from zerort.typing import Array, Device

__all__ = [
    "as_array",
    "as_tensor",
    "check_device",
    "check_torch",
    "on_stream_of",
    "on_torchs_stream",
    "outside_transforms",
    "share_memory",
    "torch_device",
]

_LEGACY_STREAM = 1  # the default stream, as protocols between frameworks call it


def as_tensor(array: Array) -> torch.Tensor:
    """Return a writable array, of NumPy or of CuPy, as a tensor over the same memory."""
    if array.dtype == BFLOAT16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_array(tensor: torch.Tensor, device: Device) -> Array:
    """Return a tensor as an array over the same memory; a sparse one is made dense first.

    Args:
        tensor: One of the host's, or of the runtime's device.
        device: The runtime's.
    """
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.dtype is torch.bfloat16:
        return _plain_array(plain.view(torch.int16), device).view(BFLOAT16)
    return _plain_array(plain, device)


def _host_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as a group's collectives take it: the array that it lies on."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise CallError(
            f"Expected a dense tensor of the host, got a {tensor.layout} one on {tensor.device}. Hand over x.cpu(), "
            "x.to_dense(); a GPU's memory in a group of NCCL's: cupy.from_dlpack(x)."
        )
    plain = tensor.detach()
    array: Array = plain.view(torch.int16).numpy().view(BFLOAT16) if plain.dtype is torch.bfloat16 else plain.numpy()
    return array


accept_tensors(torch.Tensor, Tensors(_host_array, as_tensor))


def _plain_array(tensor: torch.Tensor, device: Device) -> Array:
    array: Array
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):  # torch exports what is on its current device, and nothing else
            array = _gpu(device).from_dlpack(tensor)
    else:
        array = tensor.numpy()
    return array


def torch_device(device: Device) -> torch.device:
    """Return what torch calls the runtime's device."""
    return torch.device("cpu" if device.in_host_memory else device.name)


def on_torchs_stream(device: Device) -> AbstractContextManager[None]:
    """Return what to enter the runtime within: its work then has its place among torch's; see [Note: whose stream]."""
    if device.in_host_memory:
        return nullcontext()
    entered: AbstractContextManager[None] = _gpu(device).on_stream(torch.cuda.current_stream(torch_device(device)))
    return entered


def outside_transforms() -> AbstractContextManager[object]:
    """Return what parameters get new memory within: what a transform of `torch.func` makes is the transform's own."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # here: few need it

    cleared: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return cleared


def on_stream_of(array: Any) -> AbstractContextManager[object]:
    """Return what to compute with ``array`` in torch within: torch's work then has its place among its owner's."""
    if isinstance(array, np.ndarray):
        return nullcontext()
    handle, ordinal = array.__cuda_array_interface__["stream"], array.device.id
    is_default = handle == _LEGACY_STREAM
    stream = torch.cuda.default_stream(ordinal) if is_default else torch.cuda.ExternalStream(handle, ordinal)
    entered: AbstractContextManager[object] = torch.cuda.stream(stream)
    return entered


def check_torch(device: Device) -> None:
    """Refuse a torch that has no GPUs for a runtime on one.

    Raises:
        CallError: It has none.
    """
    if not device.in_host_memory and not torch.cuda.is_available():
        raise CallError(
            f"Expected a torch that can use GPUs, as the runtime is on {device.name}, got {torch.__version__}, which "
            "cannot. Install one that is built for CUDA, or open the runtime on the host: without group=."
        )


def share_memory(device: Device) -> None:
    """Let a runtime on a GPU take what torch's allocator keeps for later, before it is out of memory."""
    if not device.in_host_memory:
        _gpu(device).share_with(torch.cuda.empty_cache)


def check_device(name: str, found: torch.device, expected: torch.device) -> None:
    """Refuse a parameter that lies elsewhere than the runtime's buffers.

    Args:
        name: Its name.
        found: Where it lies.
        expected: What torch calls the runtime's device.

    Raises:
        CallError: It does.
    """
    if found in (expected, torch.device("meta")):
        return
    cure = f"Move the model before it is sharded: model.to({str(expected)!r}); or build it on the meta device."
    if found.type == "cuda" and expected.type == "cpu":
        cure += " To train on GPUs, open the runtime there: zr.open(group=zr.open_group(kind='nccl'))."
    raise CallError(f"Expected {name!r} on the runtime's device, {expected}, got it on {found}. {cure}")


def _gpu(device: Device) -> Any:
    """Return a device of a GPU, which has more verbs than others."""
    return device
