"""`SharedBuffers`: with every step all ranks get rank 0's buffers, BatchNorm's running statistics among them.

A forward changes this rank's buffers, by this rank's part of the batch. Before a step the ranks say whose changed, on
any of them, and rank 0's are sent: between steps all ranks evaluate alike and have one `state_dict()`, the one that
DistributedDataParallel would have. Buffers that stay as they are (rotary tables, masks) are never sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from zerort.engine import Runtime
from zerort.errors import CallError

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The buffers of one sharded model. An `Attachment` of its runtime.

    Args:
        rt: The runtime.
        model: The model; modules that own buffers now are watched.
    """

    def __init__(self, rt: Runtime, model: torch.nn.Module) -> None:
        self._rt = rt
        self._owners = {name: module for name, module in model.named_modules() if list(_own(module))}
        self._seen = [_versions(module) for module in self._owners.values()]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def complete(self, verb: Literal["step", "discard"]) -> None:
        """Send rank 0's of those that changed; see `zerort.engine.Attachment`."""
        owners = list(self._owners.values())
        changed = [_changes_unseen(one) or _versions(one) != seen for one, seen in zip(owners, self._seen, strict=True)]
        nbytes = [sum(buffer.nbytes for buffer in _own(one)) for one in owners]
        everyone = self._rt.world.all_gather(np.array([*changed, *nbytes], np.int64), name="buffers").wait()
        everyone = everyone.reshape(self._rt.size, 2, len(owners))
        sizes = everyone[:, 1]
        if (sizes != sizes[0]).any():
            odd = int(np.flatnonzero((sizes != sizes[0]).any(0))[0])
            raise CallError(
                f"Expected buffers of {list(self._owners)[odd]!r} of one size on all ranks, got "
                f"{', '.join(map(str, sizes[:, odd]))} bytes on ranks 0 … {self._rt.size - 1}. Keep what differs "
                "between ranks in a plain attribute instead."
            )
        self.send([one for one, here in zip(owners, everyone[:, 0].max(0), strict=True) if here])
        self._seen = [_versions(module) for module in owners]

    def forget(self) -> None:
        """Do nothing: buffers do not end with a step. See `zerort.engine.Attachment`."""

    def send(self, modules: list[torch.nn.Module] | None = None) -> None:
        """Give every rank rank 0's buffers of ``modules``, or all that are watched. Every rank calls this."""
        chosen = self._owners.values() if modules is None else modules
        buffers = [buffer for module in chosen for buffer in _own(module)]
        if not buffers or self._rt.size == 1:
            return
        flat = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
        self._rt.world.broadcast(flat.numpy(), name="buffers").wait()
        if self._rt.rank == 0:
            return
        with torch.no_grad():
            for buffer, part in zip(buffers, flat.split([buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a clone is aligned


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (buffer for buffer in module.buffers(recurse=False) if buffer.layout is torch.strided and buffer.numel())


def _versions(module: torch.nn.Module) -> list[tuple[int, int]]:
    return [(buffer.data_ptr(), buffer._version) for buffer in _own(module)]


def _changes_unseen(module: torch.nn.Module) -> bool:
    """Say whether the module changes its buffers without raising their version: torch's norms do, in native code."""
    return module.training and getattr(module, "running_mean", None) is not None
