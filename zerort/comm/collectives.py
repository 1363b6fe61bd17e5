"""`Collectives`: the seven verbs of a `Group`, with their arguments. Each returns a Ticket.

    all_gather  reduce_scatter  all_reduce  broadcast  reduce  all_to_all  barrier

Every verb is one call of `Launcher.launch`, which looks one frame above the verb for the user's line: nothing may stand
between the two, and every further Python call would be a good part of what a small collective costs.
"""

# not-gpu: what a group over GPUs waits for is said where it is called
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerort.comm.guard import checks
from zerort.comm.launch import Launcher
from zerort.device import Ticket
from zerort.typing import Array

__all__ = ["Collectives"]


class Collectives:
    """The collective calls of a group, without its memory and its life."""

    _calls: Launcher

    def all_gather(
        self,
        source: Array,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        name: str = "",
        eager: bool = True,
    ) -> Ticket[Array]:
        """Put every rank's ``source`` side by side into every rank's ``out``.

        Args:
            source: This rank's shard. It may be its own place in ``out`` (in place).
            out: Where the whole goes; a new array if None. If it is `SharedShards.full`, a node holds it once and
                nothing is copied out.
            counts: Elements of each rank's shard, on every rank the same; None if all are equal.
            name: What to call this in errors and traces.
            eager: Whether a small call may wait for the other ranks here and now. False: it is queued like a large one.
        """
        return self._calls.launch("all_gather", checks.fill_all_gather, name, source, out, counts, eager=eager)

    def reduce_scatter(
        self,
        source: Array,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        reduction: str = "sum",
        name: str = "",
        eager: bool = True,
    ) -> Ticket[Array]:
        """Reduce every rank's ``source`` in rank order and give each rank its range of the result.

        Args:
            source: 1-D, as long as all ranges together.
            out: This rank's range; a new array if None. It may be the range's own place in ``source`` (in place).
            counts: Elements of each rank's range, on every rank the same; None splits evenly.
            reduction: ``"sum"``, ``"max"`` or ``"min"``. fp16 and bf16 are summed in fp32 and rounded once.
            name: What to call this in errors and traces.
            eager: As in `all_gather`.
        """
        fill = checks.fill_reduce_scatter
        return self._calls.launch("reduce_scatter", fill, name, source, out, counts, -1, reduction, eager=eager)

    def all_reduce(
        self,
        source: Array,
        *,
        out: Array | None = None,
        reduction: str = "sum",
        name: str = "",
        eager: bool = True,
        after: Ticket[Any] | None = None,
    ) -> Ticket[Array]:
        """Reduce every rank's ``source`` in rank order into every rank's ``out`` (``out=source`` works in place).

        The other arguments are those of `reduce_scatter`, but for ``after``: a call of another group that writes
        ``source``. This one waits for it, the caller does not; and it is made even if that one fails, because other
        ranks wait for it. Whoever waits for that one is told.
        """
        fill = checks.fill_all_reduce
        return self._calls.launch("all_reduce", fill, name, source, out, None, -1, reduction, eager=eager, after=after)

    def broadcast(self, source: Array, *, root: int = 0, out: Array | None = None, name: str = "") -> Ticket[Array]:
        """Copy root's ``source`` into every rank's ``out``; in place if ``out`` is None."""
        into = source if out is None else out
        return self._calls.launch("broadcast", checks.fill_broadcast, name, source, into, None, root)

    def reduce(
        self, source: Array, *, root: int = 0, out: Array | None = None, reduction: str = "sum", name: str = ""
    ) -> Ticket[Array | None]:
        """Reduce every rank's ``source`` in rank order into root's ``out``; the other ranks' result is None."""
        into = out if root == self._calls.rank else None  # another rank's is left alone
        return self._calls.launch("reduce", checks.fill_reduce, name, source, into, None, root, reduction)

    def all_to_all(
        self,
        source: Array,
        *,
        out: Array | None = None,
        counts: Sequence[Sequence[int]] | None = None,
        name: str = "",
        eager: bool = True,
        after: Ticket[Any] | None = None,
    ) -> Ticket[Array]:
        """Give each rank its part of ``source`` and put what comes from each rank side by side.

        Args:
            source: The parts for rank 0, 1, … one after the other.
            out: Where what arrives goes, in rank order; a new array if None. Not in place.
            counts: ``counts[s][d]`` elements go from rank s to rank d, on every rank the same; None splits evenly.
            name: What to call this in errors and traces.
            eager: As in `all_gather`.
            after: Work that writes ``source``, as in `all_reduce`.
        """
        fill = checks.fill_all_to_all
        return self._calls.launch("all_to_all", fill, name, source, out, counts, eager=eager, after=after)

    def barrier(
        self, *, name: str = "", after: Ticket[Any] | None = None, follows: Ticket[Any] | None = None
    ) -> Ticket[None]:
        """Wait until every rank is here.

        Args:
            name: What to call this in errors and traces.
            after: Work of this rank's, as in `all_reduce`. The barrier is queued, and the caller waits for neither.
            follows: A call of this group that it completes: if that fails, it does so on all ranks, and the barrier is
                not made. A rank that met the others with a complaint instead of that call then has nothing to add.
        """
        eager = after is None
        return self._calls.launch("barrier", checks.fill_barrier, name, eager=eager, after=after, follows=follows)
