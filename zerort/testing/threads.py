"""`run_threads`: a body run by N ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from zerort.comm.group import Group
from zerort.config import GroupOptions
from zerort.testing.threads_transport import Meeting, ThreadsTransport

__all__ = ["run_threads"]

T = TypeVar("T")


def run_threads(size: int, body: Callable[[Group], T], *, options: GroupOptions | None = None) -> list[T]:
    """Call ``body(group)`` on ``size`` ranks at once and return what each of them returned, in rank order.

    Args:
        size: How many ranks.
        body: What every rank does.
        options: The group's; a timeout of 30 s if None, for a rank that raises leaves the others waiting.

    Raises:
        BaseException: What the lowest rank that raised, raised.

    >>> import numpy as np
    >>> run_threads(3, lambda group: int(group.all_reduce(np.array([group.rank])).wait()[0]))
    [3, 3, 3]
    """
    options = GroupOptions(timeout=30.0) if options is None else options
    meeting = Meeting(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def rank_body(rank: int) -> None:
        group = Group(ThreadsTransport(meeting, rank, name="threads", options=options))
        try:
            results[rank] = body(group)
        except BaseException as error:
            errors[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=rank_body, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results  # type: ignore[return-value]
