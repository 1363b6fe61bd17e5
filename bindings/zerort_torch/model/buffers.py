"""`SharedBuffers`: with every step all ranks get rank 0's buffers, BatchNorm's running statistics among them.

A forward changes this rank's buffers, by this rank's part of the batch. Before a step the ranks say whose changed, on
any of them, and rank 0's are sent: between steps all ranks evaluate alike and have one `state_dict()`, the one that
DistributedDataParallel would have. Buffers that stay as they are (rotary tables, masks) are never sent. Checkpoints
have rank 0's, of those that `state_dict()` has (decision 0086).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from zerort.engine.binding import Attachment, Binding, PackedValues, Record, Verb
from zerort.errors import CallError
from zerort.typing import Array
from zerort_torch.model.compiled import plain_name
from zerort_torch.parameters.memory import as_array, as_tensor, torch_device

__all__ = ["SharedBuffers"]


class _Version(NamedTuple):
    """What a buffer was when it was looked at."""

    buffer: torch.Tensor
    """Itself: while it is kept, no new one gets its address."""
    address: int
    """Where its values lay: ``buffer.data = …`` raises no version."""
    number: int


class SharedBuffers(Attachment):
    """The buffers of one sharded model.

    Args:
        binding: What torch uses of the runtime.
        model: The model; modules that own buffers now are watched.
        name: What to put before the buffers' names.
        persistent: Names of those that checkpoints hold.
    """

    def __init__(self, binding: Binding, model: torch.nn.Module, *, name: str, persistent: set[str]) -> None:
        self._binding = binding
        self._rt = binding.rt
        self._prefix = f"{name}." if name else ""
        self._persistent = persistent
        self._model = model
        self._packed: PackedValues | None = None  # what a load fills
        self._owners = {name: module for name, module in model.named_modules() if list(_own(module))}
        self._seen = [_versions(module) for module in self._owners.values()]
        self._changed: list[torch.nn.Module] = []  # on any rank, since the last step
        self._root = 0  # whose buffers all ranks take: the first of those with most batches of their own

    def __bool__(self) -> bool:
        return bool(self._owners)

    def announce(self, verb: Verb, record: Record) -> None:
        """Tell which changed on this rank, and how large they are; see `Attachment`."""
        owners = list(self._owners.values())
        changed = [
            _changes_unseen(one) or not _is_same(_versions(one), seen)
            for one, seen in zip(owners, self._seen, strict=True)
        ]
        nbytes = [sum(buffer.nbytes for buffer in _own(one)) for one in owners]
        record.add(f"{self._prefix}changed buffers", changed, "or", then=self._take_changed)
        record.add(f"{self._prefix}bytes of buffers", nbytes, "each", then=self._take_sizes)
        own = self._binding.own_micro_batches
        record.add(f"{self._prefix}batches of buffers", own, "each", then=self._take_root)

    def _take_changed(self, changed: Array) -> None:
        self._changed = [one for one, here in zip(self._owners.values(), changed, strict=True) if here]

    def _take_root(self, batches: Array) -> None:
        self._root = int(batches[:, 0].argmax())

    def _take_sizes(self, sizes: Array) -> None:
        if (sizes != sizes[0]).any():
            odd = int(np.flatnonzero((sizes != sizes[0]).any(0))[0])
            raise CallError(
                f"Expected buffers of {list(self._owners)[odd]!r} of one size on all ranks, got "
                f"{', '.join(map(str, sizes[:, odd]))} bytes on ranks 0 … {self._rt.size - 1}. Keep what differs "
                "between ranks in a plain attribute instead."
            )

    def complete(self, verb: Verb) -> None:
        """Send one rank's of those that changed on any rank; see `Attachment`."""
        self.send(self._changed, root=self._root)
        self._seen = [_versions(module) for module in self._owners.values()]

    def values(self, *, loading: bool = False) -> PackedValues:
        """Return what a checkpoint holds; see `Attachment`. The first rank has all of it."""
        device = self._rt.device
        packed = self._binding.packed(
            {self._prefix + name: as_array(buffer.cpu().contiguous(), device) for name, buffer in self._kept().items()}
        )
        if loading:
            self._packed = packed
        return packed

    def take_loaded(self) -> None:
        """Take over what was loaded, on all ranks; see `Attachment`."""
        kept = self._kept()
        loaded = {} if self._packed is None else self._packed.arrays()
        with torch.no_grad():
            for name, array in loaded.items():
                kept[name.removeprefix(self._prefix)].copy_(as_tensor(array))
        self._packed = None
        self.send()

    def _kept(self) -> dict[str, torch.Tensor]:
        named = ((plain_name(name), buffer) for name, buffer in self._model.named_buffers())
        return {name: buffer for name, buffer in named if name in self._persistent}

    def send(self, modules: list[torch.nn.Module] | None = None, *, root: int = 0) -> None:
        """Give every rank one rank's buffers of ``modules``, or all that are watched. Every rank calls this."""
        chosen = self._owners.values() if modules is None else modules
        buffers = [buffer for module in chosen for buffer in _own(module)]
        if not buffers or self._rt.size == 1:
            return
        device = self._rt.device
        pieces = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]
        flat = torch.cat([piece.to(torch_device(device)) for piece in pieces])
        device.order_after(self._rt.group.broadcast(as_array(flat, device), root=root, name="buffers"))
        if self._rt.rank == root:
            return
        with torch.no_grad():
            for buffer, part in zip(buffers, flat.split([buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a clone is aligned


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (buffer for buffer in module.buffers(recurse=False) if buffer.layout is torch.strided and buffer.numel())


def _versions(module: torch.nn.Module) -> list[_Version]:
    return [_Version(buffer, buffer.data_ptr(), buffer._version) for buffer in _own(module)]


def _is_same(versions: list[_Version], seen: list[_Version]) -> bool:
    return len(versions) == len(seen) and all(
        one.buffer is other.buffer and one[1:] == other[1:] for one, other in zip(versions, seen, strict=True)
    )


def _changes_unseen(module: torch.nn.Module) -> bool:
    """Say whether the module changes its buffers without raising their version: torch's norms do, in native code."""
    return module.training and getattr(module, "running_mean", None) is not None
