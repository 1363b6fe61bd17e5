"""Is there room for a save, and for the step after it?

    on the disk    the checkpoint before │ what rests there │ free
    a save         writes what is in memory, and links what rests there: no room yet
    from then on   the checkpoint before is deleted: its room is free
    the next step  writes what rests there to new files, as the linked ones stay as they are

So a run that saves after each step needs room for what rests on the disk twice, not three times, and for what is in
memory twice. A save elsewhere on that disk keeps its files for good, and the run needs as much once more.
"""

from __future__ import annotations

import os

from zerort.checkpoint.failure import free_nbytes, room_error
from zerort.checkpoint.files.directory import stale_names
from zerort.checkpoint.files.sweep import freed_nbytes, wait_for_sweeps
from zerort.storage.files.mounts import disk_of

__all__ = ["beside_nbytes", "expect_room"]


def expect_room(path: str, *, written: int, linked: int, kept: str | None = None) -> bool:
    """Raise unless a directory has room for a save, and return whether the next step needs that of the one before.

    Args:
        path: The checkpoint's directory.
        written: Bytes that the save writes.
        linked: Bytes of files that it links.
        kept: Another directory, in which the same values are saved after each step.

    Raises:
        StorageError: There is too little, with the numbers.
    """
    free = free_nbytes(path)
    needed, why = written + linked, "the disk is too full"
    if kept is not None and os.path.realpath(kept) != os.path.realpath(path) and disk_of(kept) == disk_of(path):
        needed += max(written, linked)  # for the next one there: the last will give nothing back
        why = f"it would hold on to the files of the last step in {kept}, so that the next ones need others"
    if free is None or free >= needed:
        return False
    if free < written or free + freed_nbytes(path, stale_names(path)) < needed:
        raise room_error(path, needed=needed, why=why)
    return True


def beside_nbytes(path: str, *, written: int, linked: int) -> int:
    """Return the bytes that a run which saves after each step takes beside what rests on the disk, and what is taken.

    Args:
        path: The checkpoint's directory. What an earlier run left there makes room, but not before the first save.
        written: Bytes that each save writes.
        linked: Bytes of files that it links.
    """
    wait_for_sweeps()  # or room that is about to be free would count twice
    return max(written, linked + 2 * written - freed_nbytes(path, stale_names(path)))
