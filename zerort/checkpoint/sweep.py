"""Delete the files of earlier saves; many bytes of them in the background.

A save is over when its manifest is in place. Deleting a gigabyte can take a third as long again (a disk mounted with
``discard`` tells the device of every block), and nobody has to wait for it: small amounts are deleted at once, large
ones by a thread. The next save and the end of the process wait for that thread. May import: offload.disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Final

from zerort.offload import disk

__all__ = ["AT_ONCE_NBYTES", "freed_nbytes", "sweep", "wait_for_sweeps"]

AT_ONCE_NBYTES: Final = 32 * 1024**2
"""Up to this many bytes are deleted before `sweep` returns."""

_lock = threading.Lock()
_threads: list[threading.Thread] = []


def freed_nbytes(path: str, names: Sequence[str]) -> int:
    """Return the bytes that deleting files of a directory gives back: those of files that have no other name."""
    nbytes = 0
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(path, name))
            nbytes += status.st_size * (status.st_nlink == 1)
    return nbytes


def sweep(path: str, names: Sequence[str], *, now: bool = False) -> None:
    """Delete files of a directory, now or soon. What cannot be deleted is left: the next save finds it again.

    Args:
        path: The directory.
        names: The files.
        now: Return when they are gone, however large they are: their room is needed.
    """
    paths = [os.path.join(path, name) for name in names]
    if now or freed_nbytes(path, names) <= AT_ONCE_NBYTES:
        _delete(paths)
        return
    thread = threading.Thread(target=_delete, args=(paths,), name="checkpoint sweep")
    with _lock:
        _threads[:] = [one for one in _threads if one.is_alive()]
        _threads.append(thread)
        thread.start()


def wait_for_sweeps() -> None:
    """Return when everything that `sweep` was given in this process is deleted."""
    with _lock:
        waiting = list(_threads)
    for thread in waiting:
        thread.join()


def _delete(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            disk.unlink(path)
