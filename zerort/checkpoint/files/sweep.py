"""Delete the files of earlier saves; many bytes of them in the background.

A save is over when its manifest is in place. Deleting a gigabyte can take a third as long again (a disk mounted with
``discard`` tells the device of every block), and nobody has to wait for it: small amounts are deleted at once, large
ones by a thread. The next save waits for that thread, and so does the end of the process, but not for ever: what is
left then, the next save finds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from zerort.storage.files import disk
from zerort.storage.files.workers import lend

__all__ = ["AT_ONCE_NBYTES", "freed_nbytes", "sweep", "wait_for_sweeps"]

AT_ONCE_NBYTES: Final = 32 * 1024**2
"""Up to this many bytes are deleted before `sweep` returns."""

_END_SECONDS: Final = 30.0
"""How long the end of the process waits."""

_under_way: list[threading.Event] = []  # changed by single calls, which need no lock


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
    _under_way.append(lend(lambda: _delete(paths)))


def wait_for_sweeps(*, within: float = threading.TIMEOUT_MAX) -> None:
    """Return when everything that `sweep` was given in this process is deleted, or after so many seconds."""
    began = time.monotonic()
    for done in list(_under_way):
        if done.wait(max(0.0, within - (time.monotonic() - began))):
            with contextlib.suppress(ValueError):  # another thread has waited, too
                _under_way.remove(done)


def _delete(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            disk.unlink(path)


atexit.register(lambda: wait_for_sweeps(within=_END_SECONDS))
os.register_at_fork(after_in_child=_under_way.clear)  # they are the parent's, whose threads a child has not
