"""What a forked child may do with what it has inherited: nothing but end, at once and without a trace.

    follow(thing)        calls ``thing.disown()`` in every child, before anything else runs there
    inherited("…")       the error that such a thing raises from then on
    at_end(work)         what this process, and no child of it, does last

A child has its parent's memory, and none of its threads: waiting for one would be for ever. Its files, its place among
the ranks and its locks are its parent's: to close them would be in its parent's name (decision 0070). Imports errors
only.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from zerort.errors import ForkedError

__all__ = ["at_end", "follow", "generation", "inherited"]


class Followed(Protocol):
    """What knows that it is its parent's."""

    def disown(self) -> None:
        """Be of no use from here on, and closed: called once, in a child."""


_followed: weakref.WeakSet[Followed] = weakref.WeakSet()
_generation = 0
_last: list[tuple[int, Callable[[], object]]] = []


def follow(thing: Followed) -> None:
    """Have a thing disowned in every child that is forked while it lives."""
    _followed.add(thing)


def generation() -> int:
    """Return how many forks lie between this process and the one that was started as a program."""
    return _generation


def inherited(what: str) -> ForkedError:
    """Return that something is a parent's, with the cure.

    Args:
        what: What it is, as a noun phrase.
    """
    return ForkedError(
        f"Expected {what} to be used by the process that opened it, got a forked child of that (process "
        f"{os.getpid()}). A child can use nothing of what it inherited: fork before opening, or open another here. It "
        "may end in any way."
    )


def at_end(work: Callable[[], object]) -> None:
    """Do something when Python ends, after everything else of ours; not in a child that is forked from here."""
    _last.append((_generation, work))


def _disown_all() -> None:
    global _generation
    _generation += 1
    for thing in list(_followed):
        thing.disown()
    _followed.clear()


os.register_at_fork(after_in_child=_disown_all)


@atexit.register  # first of all that we register, so the last that is done
def _end() -> None:
    for made_in, work in reversed(_last):
        if made_in == _generation:
            work()
