"""`SharedBuffers`: with every step all ranks get rank 0's buffers, BatchNorm's running statistics among them.

A forward changes this rank's buffers, by this rank's part of the batch. Before a step the ranks say whose changed, on
any of them, and rank 0's are sent: between steps all ranks evaluate alike and have one `state_dict()`, the one that
DistributedDataParallel would have. Buffers that stay as they are (rotary tables, masks) are never sent. Checkpoints
have rank 0's, of those that `state_dict()` has (decision 0086).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from zerort.engine import Attachment, Runtime
from zerort.errors import CallError
from zerort.layout import FlatLayout, Partition
from zerort_torch.memory import as_array, as_tensor, torch_device

if TYPE_CHECKING:
    from zerort.checkpoint import Value
    from zerort.typing import Array

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
        rt: The runtime.
        model: The model; modules that own buffers now are watched.
        name: What to put before the buffers' names.
        lasting: Names of those that checkpoints hold.
    """

    def __init__(self, rt: Runtime, model: torch.nn.Module, *, name: str, lasting: set[str]) -> None:
        self._rt = rt
        self._prefix = f"{name}." if name else ""
        self._lasting = lasting
        self._model = model
        self._packed: list[tuple[FlatLayout, Array]] = []  # what a load fills
        self._owners = {name: module for name, module in model.named_modules() if list(_own(module))}
        self._seen = [_versions(module) for module in self._owners.values()]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def complete(self, verb: Literal["step", "discard"]) -> None:
        """Send rank 0's of those that changed; see `zerort.engine.Attachment`."""
        owners = list(self._owners.values())
        changed = [
            _changes_unseen(one) or not _is_same(_versions(one), seen)
            for one, seen in zip(owners, self._seen, strict=True)
        ]
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

    def values(self, *, loading: bool = False) -> Iterable[Value]:
        """Return what a checkpoint holds; see `zerort.engine.Attachment`. The first rank has all of it."""
        from zerort.checkpoint import Value  # here: it takes a third of the time that all of zerort takes to import

        group = self._rt.mesh.shard
        by_dtype: dict[str, dict[str, Array]] = {}
        for name, buffer in self._kept().items():
            array = as_array(buffer.cpu().contiguous(), self._rt.device)
            by_dtype.setdefault(array.dtype.name, {})[self._prefix + name] = array
        self._packed = []
        for dtype, arrays in by_dtype.items():
            layout = FlatLayout.build({name: array.shape for name, array in arrays.items()}, dtype=dtype)
            flat = np.zeros(layout.numel if group.rank == 0 else 0, next(iter(arrays.values())).dtype)
            for extent in layout.extents if flat.size else ():
                flat[extent.slice] = arrays[extent.name].reshape(-1)
            if loading:
                self._packed.append((layout, flat))
            partition = Partition.of_counts([layout.numel] + [0] * (group.size - 1))
            yield Value(kind="buffer", layout=layout, partition=partition, mine=flat)

    def take_loaded(self) -> None:
        """Take over what was loaded, on all ranks; see `zerort.engine.Attachment`."""
        kept = self._kept()
        with torch.no_grad():
            for layout, flat in self._packed:
                for extent in layout.extents if flat.size else ():
                    loaded = as_tensor(flat)[extent.slice].view(extent.shape)
                    kept[extent.name.removeprefix(self._prefix)].copy_(loaded)
        self._packed = []
        self.send()

    def _kept(self) -> dict[str, torch.Tensor]:
        return {name: buffer for name, buffer in self._model.named_buffers() if name in self._lasting}

    def send(self, modules: list[torch.nn.Module] | None = None) -> None:
        """Give every rank rank 0's buffers of ``modules``, or all that are watched. Every rank calls this."""
        chosen = self._owners.values() if modules is None else modules
        buffers = [buffer for module in chosen for buffer in _own(module)]
        if not buffers or self._rt.size == 1:
            return
        device = self._rt.device
        pieces = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]
        flat = torch.cat([piece.to(torch_device(device)) for piece in pieces])
        device.order_after(self._rt.world.broadcast(as_array(flat, device), name="buffers"))
        if self._rt.rank == 0:
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
