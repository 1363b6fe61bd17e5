"""The end of a process that still has open groups: the other ranks hear of it, and are given time to end as well.

`Group` adds its transport here when it opens and takes it out when it closes; what is left is ended at exit.
"""

from __future__ import annotations

import atexit
import os
import weakref

from zerort.comm.guard import failure
from zerort.comm.transport import Transport

__all__ = ["add", "discard", "remove"]

_END_WITHIN = 10.0
"""Seconds that a rank whose group broke waits at its end for the others to come to theirs."""

_open: weakref.WeakSet[Transport] = weakref.WeakSet()
_broken: dict[str, int] = {}
"""Groups between processes that broke before they were closed: how many ranks each had, by its title."""


def add(transport: Transport) -> None:
    """Note that a group has opened."""
    _open.add(transport)
    for title in [title for title, size in _broken.items() if size <= transport.size]:
        del _broken[title]  # as many ranks as broke it have come to this one: the job goes on


def remove(transport: Transport) -> None:
    """Note that a group has been closed, and whether it was broken by then."""
    _note_if_broken(transport)
    _open.discard(transport)


def discard(transport: Transport) -> None:
    """Forget a group that belongs to the parent of this process."""
    _open.discard(transport)


def _note_if_broken(transport: Transport) -> None:
    if transport.broken is not None and transport.kind != "threads":
        _broken[transport.title] = transport.size


# A forked child has none of these ranks' places.
os.register_at_fork(after_in_child=_broken.clear)


@atexit.register
def _leave_all() -> None:
    """Tell the ranks that may wait for this one that it has ended, and do not wait for one that cannot."""
    for transport in list(_open):
        _note_if_broken(transport)
        transport.standing.code = transport.standing.code or failure.code_of_exit()
        transport.end()
    if _broken:
        failure.see_others_out(broken=next(iter(_broken)), patience=_END_WITHIN)
    else:
        failure.see_others_out()
