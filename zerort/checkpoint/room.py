"""Is there room for a save, and for the step after it?

    on the disk    the checkpoint before │ what rests there │ free
    a save         writes what is in memory, and links what rests there: no room yet
    from then on   the checkpoint before is deleted: its room is free
    the next step  writes what rests there to new files, as the linked ones stay as they are

So a run that saves after each step needs room for what rests on the disk twice, not three times, and for what is in
memory twice. May import: checkpoint.directory, checkpoint.failure, checkpoint.sweep.
"""

from __future__ import annotations

from zerort.checkpoint.directory import stale_names
from zerort.checkpoint.failure import free_nbytes, room_error
from zerort.checkpoint.sweep import freed_nbytes, wait_for_sweeps

__all__ = ["beside_nbytes", "expect_room"]


def expect_room(path: str, *, written: int, linked: int) -> bool:
    """Raise unless a directory has room for a save, and return whether the next step needs that of the one before.

    Args:
        path: The checkpoint's directory.
        written: Bytes that the save writes.
        linked: Bytes of files that it links.

    Raises:
        StorageError: There is too little, with the numbers.
    """
    free = free_nbytes(path)
    if free is None or free >= written + linked:
        return False
    if free < written or free + freed_nbytes(path, stale_names(path)) < written + linked:
        raise room_error(path, needed=written + linked, why="the disk is too full")
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
