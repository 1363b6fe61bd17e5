"""`export`: the full tensors of one kind as one safetensors file, block by block.

However large the model, memory holds a few blocks. The file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from zerort.checkpoint.failure import free_nbytes, room_error, storage_error
from zerort.checkpoint.format.casts import FLOATS, can_convert, convert
from zerort.checkpoint.format.coded import CodedTensor, coded_tensors, parameter_kind, stored_tensors
from zerort.checkpoint.format.manifest import Manifest, StoredTensor
from zerort.checkpoint.format.safetensors import plan_file
from zerort.checkpoint.reader import Damage, Fetch, ShardFiles, damage_error, deliver, open_checkpoint, span_of
from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files import disk
from zerort.storage.files.blocks import aligned_buffer
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

    Frozen parameters that were saved as codes are decoded.

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
    if os.path.isdir(target) or (os.path.lexists(target) and not overwrite):
        cure = "Name a file." if os.path.isdir(target) else "Name another, or say --force (overwrite=True)."
        raise CallError(
            f"Expected nothing at {target}, got {'a directory' if os.path.isdir(target) else 'a file'}. {cure}"
        )

    def refuse(damage: Damage) -> None:
        raise damage_error(where, damage, touched=False)

    try:
        manifest, files = open_checkpoint(where, lambda found: _fetches(found, kind), on_damage=refuse)
    except OSError as error:
        raise storage_error(error, path=where) from error
    with contextlib.closing(files):
        tensors = stored_tensors(manifest, kind)
        dtypes = {name: _dtype_of(tensor, dtype) for name, tensor in tensors.items()}
        placed = [(name, dtypes[name], one.shape, one.numel * itemsize(dtypes[name])) for name, one in tensors.items()]
        head, order = plan_file(placed, _metadata(manifest))
        fetches = _fetches(manifest, kind, order=order)
        coded = coded_tensors(manifest) if kind == "parameter" else {}
        nbytes = len(head) + sum(row[3] for row in placed)
        try:
            free = free_nbytes(os.path.dirname(target))
            if free is not None and free < nbytes:
                raise room_error(target, needed=nbytes, why="the disk is too full")
            blocks = _blocks(files, fetches, dtypes, coded=coded, on_damage=refuse)
            _write(target, head, blocks, progress=progress)
        except OSError as error:
            raise storage_error(error, path=target, needed=nbytes) from error
    return nbytes


def _fetches(manifest: Manifest, kind: str, *, order: Sequence[str] | None = None) -> list[Fetch]:
    known = stored_tensors(manifest, kind)
    if not known and kind not in manifest.tensors:
        raise CallError(f"Expected a kind out of {', '.join(manifest.tensors) or '(none)'}, got {kind!r}.")
    stored = dict(manifest.tensors.get(kind, {}))
    kinds = dict.fromkeys(stored, kind)
    for name, one in coded_tensors(manifest).items() if kind == "parameter" else ():
        kinds[name] = parameter_kind(one.rows)
        stored[name] = manifest.tensors[kinds[name]][name]
    return [
        Fetch(kinds[name], name, stored[name].dtype, one) for name in order or known for one in stored[name].extents
    ]


def _write(
    target: str, head: bytes, blocks: Iterable[tuple[Fetch, Array]], *, progress: Callable[[int], None] | None
) -> None:
    """Write the file under another name, and rename it when all of it is on the disk."""
    draft = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = disk.create(draft)
        try:
            disk.write(descriptor, head, path=draft)
            for fetch, data in blocks:
                disk.write(descriptor, data.data, path=draft)
                if progress is not None:
                    progress(fetch.nbytes)
            disk.sync(descriptor, path=draft)
        finally:
            os.close(descriptor)
        disk.rename(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(draft)
        raise
    disk.sync_directory(os.path.dirname(target))


def _dtype_of(tensor: StoredTensor | CodedTensor, wanted: str | None) -> str:
    return wanted if wanted is not None and can_convert(tensor.dtype, to=wanted) else tensor.dtype


def _metadata(manifest: Manifest) -> dict[str, str]:
    updates = manifest.meta.get("updates")
    return {"format": "np"} | ({} if updates is None else {"updates": str(updates)})


def _blocks(
    files: ShardFiles,
    fetches: list[Fetch],
    dtypes: dict[str, str],
    *,
    coded: Mapping[str, CodedTensor],
    on_damage: Callable[[Damage], None],
) -> Iterator[tuple[Fetch, Array]]:
    """Yield the converted bytes of each fetch, which are valid until the next."""
    decoders = {name: _Decoder(one, dtypes[name]) for name, one in coded.items()}
    spans = [span_of([fetch]) for fetch in fetches]
    buffer = aligned_buffer(max((end - begin for begin, end in spans), default=0))
    widths = [fetch.extent.numel * itemsize(dtypes[fetch.tensor]) for fetch in fetches]
    converted: Array = np.empty(max(widths, default=0), np.uint8)
    for fetch, nbytes in zip(fetches, widths, strict=True):
        if fetch.tensor in decoders:
            octets: Array = np.empty(fetch.extent.numel, np.uint8)
            deliver(files, [fetch._replace(out=octets)], buffer, on_damage=on_damage)
            yield fetch, decoders[fetch.tensor].add(octets)
            continue
        out = converted[:nbytes]
        wanted = out.view(numpy_dtype(dtypes[fetch.tensor]))
        deliver(files, [fetch._replace(out=wanted)], buffer, on_damage=on_damage)
        yield fetch, out


class _Decoder:
    """Decodes the rows of one tensor, whose extents end anywhere.

    Args:
        tensor: What it is.
        dtype: What to convert it to.
    """

    def __init__(self, tensor: CodedTensor, dtype: str) -> None:
        self._tensor = tensor
        self._dtype = numpy_dtype(dtype)
        self._rest: Array = np.empty(0, np.uint8)  # of a row whose end has not come
        self._left = tensor.numel

    def add(self, octets: Array) -> Array:
        """Return the bytes of the elements of all rows that are complete by now."""
        rows = self._tensor.rows
        octets = np.concatenate([self._rest, octets])
        end = octets.size // rows.nbytes * rows.nbytes
        self._rest = octets[end:]
        values = np.empty(min(end // rows.nbytes * rows.numel, self._left), numpy_dtype(self._tensor.dtype))
        self._left -= values.size
        rows.decode(values, octets[:end])
        out = np.empty(values.size, self._dtype)
        convert(values, out=out)
        return out.view(np.uint8)
