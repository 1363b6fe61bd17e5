"""`last_step`: every step ends with a checkpoint, so that the last completed one outlives whatever ends the next.

    step n         update: what rests on the disk is written to new files; those of step n - 1 stay as they are
                   save: sync, link, put the manifest in place; then the files of step n - 1 are deleted
    EIO, ENOSPC,   at any moment: the manifest names all of step n - 1, or all of step n
    a kill
    resume         loads what it names, in this run or in the next

Nothing but `save`, `load` and links (decision 32), put together; here is also what room that takes. May import:
checkpoint, comm, layout, offload, engine.*.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerort import checkpoint
from zerort.comm.agreement import gather_json, raise_together
from zerort.engine.column import Column
from zerort.engine.report import Restored
from zerort.engine.saving import load, save
from zerort.engine.scratch_store import disk_of, expect_room
from zerort.engine.section import Section
from zerort.engine.snapshot import values_in
from zerort.errors import CallError
from zerort.layout import itemsize

if TYPE_CHECKING:
    from zerort.engine.runtime import Runtime

__all__ = ["keep", "prepare", "resume", "room_beside"]


def prepare(rt: Runtime, *, progress: Any) -> None:
    """Look at what will be kept with a step, before anything changes. Every rank calls this.

    Raises:
        CallError: ``progress`` cannot be kept, or another run's last step would be lost; on every rank.
    """
    error: Exception | None = None
    try:
        checkpoint.as_json(progress, what="progress")
        if rt.is_new and rt.rank == 0 and checkpoint.exists(_directory(rt)):
            raise CallError(
                f"Expected rt.resume() before the first step, got none, and {_directory(rt)} holds the last step of "
                "another run. Call rt.resume() once all units are registered, name another directory, or delete it."
            )
    except Exception as caught:
        error = caught
    raise_together(rt.world, error, name="last step")


def keep(rt: Runtime, *, progress: Any) -> None:
    """Keep the step that was just done, instead of the one before. Every rank calls this."""
    save(rt, _directory(rt), progress=progress)


def resume(rt: Runtime) -> Restored | None:
    """Load the last step that was kept; see `Runtime.resume`. Every rank calls this."""
    if rt.options.last_step is None:
        raise CallError("Expected a runtime that keeps its last step, got one without. zr.open(last_step=directory).")
    found, error = False, None
    try:
        found = rt.rank == 0 and checkpoint.exists(_directory(rt))
    except Exception as caught:
        error = caught
    raise_together(rt.world, error, name="resume")
    if not gather_json(rt.world, found, name="resume")[0]:
        return None
    return load(rt, _directory(rt), optimizer=True, strict=True)


def room_beside(rt: Runtime, sections: Sequence[Section]) -> int:
    """Return the bytes that steps of this rank take on its scratch disks beside what rests there.

    While a step is written, all of the one before is still there: what rests on the disk once more, and what is in
    memory twice, as a save writes it before the old one goes. A directory on another disk has to hold everything twice,
    and is looked at here. Every rank calls this.

    Args:
        rt: The runtime.
        sections: What is about to be registered.

    Raises:
        StorageError: Another disk has too little room; on every rank.
    """
    directory = _directory(rt)
    linked = written = 0
    for section in (*rt.units.sections(), *sections):
        for value in values_in(section, rt.mesh.shard.rank):
            resting = value.mine.resting_nbytes if isinstance(value.mine, Column) else 0
            linked += resting
            written += value.mine.size * itemsize(value.layout.dtype) - resting
    if rt.mesh.copy:  # the first copy of the model saves
        linked = written = 0
    is_linked = _is_linked(rt, directory)
    copied = sum(gather_json(rt.world, 0 if is_linked else linked + written, name="last step"))
    error: Exception | None = None
    if copied and rt.rank == 0:
        try:
            _warn_of_copies(rt, directory)
            expect_room([directory], 2 * copied, what="the last step and the one before")
        except Exception as caught:
            error = caught
    raise_together(rt.world, error, name="last step")
    return linked + 2 * written if is_linked else 0


def _directory(rt: Runtime) -> str:
    assert rt.options.last_step is not None
    return os.fspath(rt.options.last_step)  # absolute since the runtime was opened


def _is_linked(rt: Runtime, directory: str) -> bool:
    """Say whether all files of the scratch directories can have second names in a directory."""
    disks = {disk_of(one) for one in (directory, *rt.tiers.directories)}
    return rt.tiers.options.checksum and len(disks) == 1


def _warn_of_copies(rt: Runtime, directory: str) -> None:
    where = "on the disk of scratch" if rt.tiers.options.checksum else "in a run that keeps checksums of its files"
    warnings.warn(
        f"Expected last_step {where}, so that keeping a step costs a sync and links, got {directory}: parameters and "
        "state are written there in every step.",
        RuntimeWarning,
        stacklevel=2,
    )
