"""Errors of a save or load: the same on every rank, with the file, needed and free bytes, and the cure.

fail_together(group, work)            run work() on this rank; if it fails on any rank, all raise
with_progress_watch(group, work)      the same for work that may take longer than a group waits for a rank
storage_error(error, …)               the StorageError for an OSError
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from zerort.comm.agreed import gather_json, raise_together
from zerort.comm.group import Group
from zerort.errors import StorageError
from zerort.storage.files import activity
from zerort.storage.files.failures import free_nbytes, no_room, storage_error_from
from zerort.storage.files.workers import lend

__all__ = ["fail_together", "free_nbytes", "room_error", "storage_error", "with_progress_watch"]

T = TypeVar("T")

_INTACT = "What was there before is intact."

_MEET_EVERY = 5.0
"""Seconds between the meetings of ranks at long work, or a quarter of their timeout if that is less."""


def fail_together(group: Group, work: Callable[[], T], *, path: str, name: str) -> T:
    """Run ``work`` on every rank and return what it gave; if one rank fails, all raise its error.

    Args:
        group: The ranks; all of them call this.
        work: What to do here. An OSError becomes a `StorageError`.
        path: What the work is about, for the message.
        name: What to call this in errors and traces.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except OSError as refused:
        error = storage_error(refused, path=path)
        error.__cause__ = refused
    except Exception as failed:
        error = failed
    raise_together(group, error, name=name)
    return result  # type: ignore[return-value]


def with_progress_watch(group: Group, work: Callable[[], T], *, path: str, name: str) -> T:
    """Run ``work`` of any length on every rank, as `fail_together` does, as long as something moves on each.

    A rank that has little to write would wait for one with much, and give up after the group's timeout. So the work
    runs on a thread, and the ranks meet every few seconds until all have done theirs. Work that is quick takes no more
    messages than with `fail_together`.

    What moves is counted in operations that end: blocks of some megabytes, opens, syncs. A long one is not stuck as
    long as others of its rank end. One that is alone for longer than the timeout is: nobody can see inside a sync, so a
    rank that writes gigabytes into the page cache of a slow disk needs a timeout as long as that takes.

    Raises:
        StorageError: On one rank no operation on a file has ended for as long as the group's timeout; on every rank,
            with that rank and the file, and with `is_stuck`. What is stuck there is left to itself.
    """
    task, every = _Task(work), min(_MEET_EVERY, group.timeout / 4)
    moved, since = activity.ended(), time.monotonic()
    while True:
        is_done = task.is_done(within=every)
        if moved != activity.ended():
            moved, since = activity.ended(), time.monotonic()
        # Each rank judges by its own timeout, and all by these judgements: they may have been given different ones.
        mine = np.array([is_done, is_done and task.has_failed, time.monotonic() - since >= group.timeout])
        done, failed, idle = group.all_gather(mine, name=f"{name} done").wait().reshape(-1, 3).T
        if done.all():
            return fail_together(group, task.result, path=path, name=name) if failed.any() else task.result()
        stuck = np.flatnonzero(idle & ~done)
        if stuck.size:
            rank = int(stuck[0])
            timeout, at = gather_json(group, [group.timeout, activity.under_way()], name=name)[rank]
            error = StorageError(
                f"{name}: Expected some progress on every rank within {timeout:.0f} s, got none on rank {rank}, "
                f"which is at: {at or path}. The disk is stuck, or its server does not answer. "
                "If it is only slow, raise the timeout: ZERORT_TIMEOUT=seconds."
            )
            error.is_stuck = True
            raise error


class _Task(Generic[T]):
    """Work on a thread that does not keep the process from ending."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = lend(self._run)

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error

    def is_done(self, *, within: float) -> bool:
        """Wait up to ``within`` seconds for the work to be done, and say whether it is."""
        return self._done.wait(within)

    @property
    def has_failed(self) -> bool:
        """Whether the work has raised; it is done."""
        return self._error is not None

    def result(self) -> T:
        """Return what the work gave, or raise what it raised; it is done."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def storage_error(error: OSError, *, path: str, needed: int | None = None) -> StorageError:
    """Return what the file system refused, with the cure.

    Args:
        error: What it said.
        path: What we wanted to read or write; the error's own file name is better known, if it has one.
        needed: The bytes that were to be written there, if known.
    """
    return storage_error_from(error, path=path, what="a checkpoint", needed=needed, intact=_INTACT)


def room_error(path: str, *, needed: int | None, why: str) -> StorageError:
    """Return that there is no room, with the numbers."""
    return no_room(path, what="a checkpoint", needed=needed, why=why, intact=_INTACT)
