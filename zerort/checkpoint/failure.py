"""Say what a file system refused, and let no rank fail alone.

    together(group, work)      work() on this rank; if it fails on any rank, all raise
    patiently(group, work)     the same for work that may take longer than a group waits for a rank
    storage_error(error, …)    an OSError in our words: the path, needed and free bytes, and the cure

May import: comm, errors, offload.refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

from zerort.comm.agreement import raise_together
from zerort.comm.group import Group
from zerort.errors import StorageError
from zerort.offload.refusal import free_nbytes, no_room, refusal

__all__ = ["free_nbytes", "patiently", "room_error", "storage_error", "together"]

T = TypeVar("T")

_INTACT = "What was there before is intact."

_MEET_EVERY = 5.0
"""Seconds between the meetings of ranks at long work; far below any timeout that makes sense."""


def together(group: Group, work: Callable[[], T], *, path: str, name: str) -> T:
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


def patiently(group: Group, work: Callable[[], T], *, path: str, name: str) -> T:
    """Do what `together` does, for work of any length.

    A rank that has little to write would wait for one with much, and give up after the group's timeout. So the work
    runs on a thread, and the ranks meet every few seconds until all have done theirs.
    """

    def meet_meanwhile() -> T:
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as pool:
            future = pool.submit(work)
            while True:
                wait([future], timeout=_MEET_EVERY)
                done = group.all_gather(np.array([future.done()]), name=f"{name} done").wait()
                if done.all():
                    return future.result()

    return together(group, meet_meanwhile, path=path, name=name)


def storage_error(error: OSError, *, path: str, needed: int | None = None) -> StorageError:
    """Return what the file system refused, with the cure.

    Args:
        error: What it said.
        path: What we wanted to read or write; the error's own file name is better known, if it has one.
        needed: The bytes that were to be written there, if known.
    """
    return refusal(error, path=path, what="a checkpoint", needed=needed, intact=_INTACT)


def room_error(path: str, *, needed: int | None, why: str) -> StorageError:
    """Return that there is no room, with the numbers."""
    return no_room(path, what="a checkpoint", needed=needed, why=why, intact=_INTACT)
