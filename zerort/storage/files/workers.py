"""Threads that are lent out for a while and kept: a run that saves after every step starts none after the first.

Not only for the time that it takes to start one. glibc gives a thread's stack back when it ends, and a library that
watches memory (UCX, below MPICH) takes a note of whatever is given back, and keeps the note: with `last_step` a rank
grew by some kilobytes in every step. Imports the standard library only.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

__all__ = ["lend"]


class _Worker:
    """A thread that does what it is given, one thing after another."""

    __slots__ = ("_inbox",)

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        # A daemon: one that is stuck in a system call must not keep the process from ending.
        threading.Thread(target=self._serve, name="zerort-worker", daemon=True).start()

    def give(self, work: Callable[[], object]) -> threading.Event:
        done = threading.Event()
        self._inbox.put((work, done))
        return done

    def _serve(self) -> None:
        while True:
            work, done = self._inbox.get()
            try:
                work()
                _idle.append(self)  # unless it raised: then this thread ends
            finally:
                del work  # and what it holds: the next may be long in coming
                done.set()


_idle: list[_Worker] = []


def lend(work: Callable[[], object]) -> threading.Event:
    """Do ``work``, which raises nothing, on a thread of its own, and return what is set when it is done."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    return worker.give(work)


os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads
