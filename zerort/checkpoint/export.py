"""`export`: the full tensors of one kind as one safetensors file, block by block.

However large the model, memory holds a few blocks. The file appears whole or not at all. May import: checkpoint.*.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from zerort.checkpoint.blocks import aligned_buffer
from zerort.checkpoint.casts import FLOATS, can_convert
from zerort.checkpoint.directory import read_manifest, sync_directory, write_all
from zerort.checkpoint.failure import free_nbytes, room_error, storage_error
from zerort.checkpoint.manifest import Manifest, StoredTensor
from zerort.checkpoint.reader import Damage, Fetch, ShardFiles, damage_error, deliver, span_of
from zerort.checkpoint.safetensors import plan_file
from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array

__all__ = ["export"]


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kind: str = "parameter",
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write every tensor of one kind into a new safetensors file and return the file's bytes.

    Args:
        path: The checkpoint's directory.
        out: The file.
        kind: Which values.
        dtype: What to convert floats to; other tensors, and None, keep the dtype they were saved with.
        overwrite: Replace a file that is there.
        progress: Told how many stored bytes have been written since the last call.

    Raises:
        CallError: There is no such kind or dtype, or the file is there.
        CheckpointError: There is no checkpoint, or safetensors cannot hold its tensors.
        CorruptCheckpointError: The checkpoint is damaged; no file was written.
        StorageError: The file system refused; no file was written.
    """
    where, target = os.path.abspath(os.fspath(path)), os.path.abspath(os.fspath(out))
    if dtype is not None and dtype not in FLOATS:
        raise CallError(f"Expected dtype to be one of {', '.join(FLOATS)}, got {dtype!r}. Floats only are converted.")
    manifest = read_manifest(where)
    tensors = manifest.tensors.get(kind)
    if tensors is None:
        raise CallError(f"Expected a kind out of {', '.join(manifest.tensors) or '(none)'}, got {kind!r}.")
    if os.path.isdir(target) or (os.path.lexists(target) and not overwrite):
        cure = "Name a file." if os.path.isdir(target) else "Name another, or say --force (overwrite=True)."
        raise CallError(
            f"Expected nothing at {target}, got {'a directory' if os.path.isdir(target) else 'a file'}. {cure}"
        )
    dtypes = {name: _dtype_of(tensor, dtype) for name, tensor in tensors.items()}
    placed = [(name, dtypes[name], one.shape, one.numel * itemsize(dtypes[name])) for name, one in tensors.items()]
    head, order = plan_file(placed, _metadata(manifest))
    nbytes = len(head) + sum(row[3] for row in placed)
    draft = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        free = free_nbytes(os.path.dirname(target))
        if free is not None and free < nbytes:
            raise room_error(target, needed=nbytes, why="the disk is too full")
        try:
            with open(draft, "xb", buffering=0) as file:
                write_all(file.fileno(), head)
                fetches = [
                    Fetch(kind, name, tensors[name].dtype, extent) for name in order for extent in tensors[name].extents
                ]
                for fetch, data in _blocks(where, manifest, fetches, dtypes):
                    write_all(file.fileno(), data.data)
                    if progress is not None:
                        progress(fetch.nbytes)
                os.fsync(file.fileno())
            os.rename(draft, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        sync_directory(os.path.dirname(target))
    except OSError as error:
        raise storage_error(error, path=target, needed=nbytes) from error
    return nbytes


def _dtype_of(tensor: StoredTensor, wanted: str | None) -> str:
    return wanted if wanted is not None and can_convert(tensor.dtype, to=wanted) else tensor.dtype


def _metadata(manifest: Manifest) -> dict[str, str]:
    updates = manifest.meta.get("updates")
    return {"format": "np"} | ({} if updates is None else {"updates": str(updates)})


def _blocks(
    path: str, manifest: Manifest, fetches: list[Fetch], dtypes: dict[str, str]
) -> Iterator[tuple[Fetch, Array]]:
    """Yield the converted bytes of each fetch, which are valid until the next."""

    def refuse(damage: Damage) -> None:
        raise damage_error(path, damage, touched=False)

    files = ShardFiles(path, manifest, fetches, on_damage=refuse)
    try:
        spans = [span_of([fetch]) for fetch in fetches]
        buffer = aligned_buffer(max((end - begin for begin, end in spans), default=0))
        widths = [fetch.extent.numel * itemsize(dtypes[fetch.tensor]) for fetch in fetches]
        converted: Array = np.empty(max(widths, default=0), np.uint8)
        for fetch, nbytes in zip(fetches, widths, strict=True):
            out = converted[:nbytes]
            wanted = out.view(numpy_dtype(dtypes[fetch.tensor]))
            deliver(files, [fetch._replace(out=wanted)], buffer, on_damage=refuse)
            yield fetch, out
    finally:
        files.close()
