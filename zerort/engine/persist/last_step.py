"""`last_step`: every step ends with a checkpoint, so that the last completed one outlives whatever ends the next.

    step n         update: what rests on the disk is written to new files; those of step n - 1 stay as they are
                   save: sync, link, put the manifest in place; then the files of step n - 1 are deleted
    EIO, ENOSPC,   at any moment: the manifest names all of step n - 1, or all of step n
    a kill
    resume         loads what it names, in this run or in the next

Nothing but `save`, `load` and links (decisions 0032, 0060), put together; here is also what room that takes.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from zerort import checkpoint
from zerort.checkpoint.failure import storage_error, with_progress_watch
from zerort.checkpoint.files.directory import make_directory
from zerort.checkpoint.files.lease import LEASE_SECONDS, Lease
from zerort.checkpoint.files.room import beside_nbytes
from zerort.comm.agreed import gather_json
from zerort.engine.context import Context
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.persist.residuals import saved_residuals
from zerort.engine.persist.saving import load, save
from zerort.engine.persist.snapshot import values_in
from zerort.engine.report import Restored
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.storage.files.mounts import disk_of, nearest
from zerort.storage.opening import expect_room

__all__ = ["keep", "lease_of", "objection", "resume", "room_beside"]


def objection(context: Context, *, progress: Any) -> Exception | None:
    """Return why a step cannot be kept, as far as this rank knows, before anything changes. Every rank calls this.

    That is what its caller wants to be kept with it, or a run that keeps its steps there at the same time, or another
    run's last step, which would be lost, or a directory that cannot be written to.

    Raises:
        StorageError: The disk does not answer; on every rank.
    """

    def look() -> Exception | None:
        try:
            checkpoint.as_json(progress, what="progress")
            if context.rank == 0:
                _expect_usable(context)
                if context.run.is_new and checkpoint.exists(_directory(context)):
                    raise CallError(
                        f"Expected rt.resume() before the first step, got none, and {_directory(context)} holds the "
                        "last step of another run. Call rt.resume() once all units are registered, or name another "
                        "directory."
                    )
        except Exception as error:
            return error
        return None

    return with_progress_watch(context.world, look, path=_directory(context), name="last step")


def _expect_usable(context: Context, *, patience: float = 0.0, anew: bool = False) -> None:
    """Make the directory if need be, and raise unless files can be put there, and nobody else puts some there."""
    lease, directory = lease_of(context), _directory(context)
    try:
        if lease.is_held:
            return
        make_directory(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
        lease.hold(patience=patience, anew=anew)
    except OSError as error:
        raise storage_error(error, path=directory) from error


def keep(context: Context, units: Units, *, progress: Any) -> None:
    """Keep the step that was just done, instead of the one before. Every rank calls this."""
    save(context, units, _directory(context), progress=progress)


def resume(context: Context, units: Units) -> Restored | None:
    """Load the last step that was kept; see `Runtime.resume`. Every rank calls this."""
    if context.options.last_step is None:
        raise CallError("Expected a runtime that keeps its last step, got one without. zr.open(last_step=directory).")

    def find() -> bool:
        """Whoever goes on from a step will keep the next there: the run before must be over."""
        if context.rank or not (checkpoint.exists(_directory(context)) or lease_of(context).is_lost):
            return False
        _expect_usable(context, patience=LEASE_SECONDS, anew=True)
        return checkpoint.exists(_directory(context))

    found = with_progress_watch(context.world, find, path=_directory(context), name="resume")
    if not gather_json(context.world, found, name="resume")[0]:
        return None
    return load(context, units, _directory(context), optimizer=True, strict=True)


def lease_of(context: Context) -> Lease:
    """Return the right to keep steps; rank 0 holds it, from the first step or `resume` until the runtime is closed."""
    if context.run.lease is None:
        context.run.lease = Lease(_directory(context))
    return context.run.lease


def room_beside(context: Context, units: Units, sections: Sequence[Section], *, offloaded: int) -> int:
    """Return the bytes that steps take on the disk of scratch beside what rests there. Every rank calls this.

    Less what is kept already, by this run or the one before. Rank 0 asks for all ranks, the others for nothing: it is
    one directory. If that is on another disk, or on one of several, its room is looked at here.

    Args:
        context: What the runtime's parts share; its store is open.
        units: All units.
        sections: What is about to be registered.
        offloaded: Bytes of it, and for its gradients, that are about to rest there.

    Raises:
        StorageError: That disk has too little room, or the file system refused; on every rank.
    """
    directory = _directory(context)
    mine = with_progress_watch(
        context.world, lambda: _count(context, units, sections, offloaded, directory), path=directory, name="last step"
    )
    told = [_Counted(*one) for one in gather_json(context.world, mine, name="last step")]

    def ask() -> int:
        if context.rank:
            return 0
        _expect_usable(context, patience=LEASE_SECONDS)
        copied = next((one.copied for one in told if any(one.copied)), None)
        if copied is not None and not any(section.tiers.streams for section in units.sections()):
            _warn_of_copies(context, directory, copied)  # once: nothing rested before
        linked, written = sum(one.linked for one in told), sum(one.written for one in told)
        beside = beside_nbytes(directory, written=written, linked=linked)
        if {disk_of(one) for one in context.storage.directories} == {disk_of(directory)}:
            return beside
        needed = beside + sum(one.offloaded for one in told)
        expect_room([directory], needed, what="the last step and the one before")
        return 0

    return with_progress_watch(context.world, ask, path=directory, name="last step")


class _Counted(NamedTuple):
    """What one rank takes on the disk of its last step."""

    linked: int
    """Bytes of a checkpoint that rest there, and get a second name."""
    written: int
    """The other bytes of a checkpoint."""
    offloaded: int
    """Bytes that are about to rest there."""
    copied: list[float]
    """For each scratch directory its part of what rests on disks, if its files cannot be linked."""


def _count(context: Context, units: Units, sections: Sequence[Section], new: int, directory: str) -> _Counted:
    copied = context.storage.copied_parts(nearest(directory))
    here = 1 - sum(copied)
    total = offloaded = 0
    if context.mesh.copy == 0:  # the first copy of the model saves
        for section in (*units.sections(), *sections):
            for value in values_in(section, context.mesh.shard.rank):
                total += value.mine.size * itemsize(value.layout.dtype)
                offloaded += value.mine.offloaded_nbytes if isinstance(value.mine, ChunkedArray) else 0
    for value in saved_residuals(context, (*units.sections(), *sections)):
        total += value.mine.size * itemsize(value.layout.dtype)
    linked = round(here * offloaded)
    return _Counted(linked, total - linked, round(here * new), copied)


def _directory(context: Context) -> str:
    assert context.options.last_step is not None
    return os.fspath(context.options.last_step)  # absolute since the runtime was opened


def _warn_of_copies(context: Context, directory: str, copied: Sequence[float]) -> None:
    where = (
        "below the mount of scratch"
        if context.storage.options.checksum
        else "in a run that keeps checksums of its files"
    )
    apart = ", ".join(one for one, part in zip(context.storage.directories, copied, strict=True) if part)
    warnings.warn(
        f"Expected last_step {where}, so that keeping a step costs a sync and links, got {directory}: parameters and "
        f"state that rest in {apart}, {sum(copied):.0%} of all that rest on disks, are written there in every step.",
        RuntimeWarning,
        stacklevel=2,
    )
