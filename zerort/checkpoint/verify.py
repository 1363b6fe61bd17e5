"""`verify`: read every byte of a checkpoint and say which are not those that were written.

One process, no group, nothing kept in memory but a few blocks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from zerort.checkpoint.failure import storage_error
from zerort.checkpoint.format.manifest import Manifest
from zerort.checkpoint.reader import Damage, Fetch, fetch_all, open_checkpoint
from zerort.storage.files.blocks import worker_count

__all__ = ["verify"]


def verify(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> list[Damage]:
    """Check every extent of the checkpoint at ``path`` and return the damaged ones, in the order of the files.

    Args:
        path: The checkpoint's directory.
        progress: Told how many bytes have been checked since the last call, one call at a time.

    Raises:
        CheckpointError: There is no checkpoint, an unfinished one, or one of a newer format.
        CorruptCheckpointError: The manifest itself is damaged.
        StorageError: The file system refused.
    """
    where = os.path.abspath(os.fspath(path))
    damages: list[Damage] = []
    lock = threading.Lock()

    def checked(nbytes: int) -> None:
        if progress is not None:
            with lock:
                progress(nbytes)

    try:
        _, files = open_checkpoint(where, _everything, on_damage=damages.append)
        try:
            fetch_all(files, threads=worker_count(1), on_damage=damages.append, on_read=checked)
        finally:
            files.close()
    except OSError as error:
        raise storage_error(error, path=where) from error
    return sorted(damages, key=lambda damage: (damage.file, damage.offset))


def _everything(manifest: Manifest) -> list[Fetch]:
    return [
        Fetch(kind, name, tensor.dtype, extent)
        for kind, tensors in manifest.tensors.items()
        for name, tensor in tensors.items()
        for extent in tensor.extents
    ]
