"""`Sending`: who rounds gradients that travel as codes, and which ranks keep what that loses; over all copies.

    Wire(over="all")      each rank
    Wire(over="hosts")    each host, or each rank that shares memory with no other; of each copy of the model
    virtual_shards        each virtual shard, whichever rank computes it

A sender has a number, by which a checkpoint knows what coding has lost of its gradients (`persist/residuals.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerort.buffer import Leaves, Senders
from zerort.engine.wire.coding import Coding

__all__ = ["Sending"]


@dataclass(frozen=True, slots=True)
class Sending:
    """The senders of a runtime, as one rank sees them."""

    within: Senders
    """Those of this rank's copy of the model, by rank there."""
    holders: tuple[tuple[int, ...], ...]
    """For each sender of all copies, the ranks that code for it, in order."""
    numbers: tuple[int, ...]
    """The senders that this rank codes for, in the order of its micro-steps."""

    @classmethod
    def among(cls, coding: Coding, hosts: Sequence[int], *, copies: int, leaves: Leaves | None, rank: int) -> Sending:
        """Return who sends among ranks.

        Args:
            coding: What travels as codes.
            hosts: For each rank, a number that tells its host.
            copies: Copies of the model, each held by as many neighbouring ranks.
            leaves: Which virtual shards each rank computes; None: there are none.
            rank: This one.
        """
        size = len(hosts) // copies
        found = [coding.senders(hosts[first : first + size]) for first in range(0, len(hosts), size)]
        holders: tuple[tuple[int, ...], ...]
        if leaves is None:
            holders = tuple(
                tuple(copy * size + one for one in ranks) for copy, each in enumerate(found) for ranks in each.members
            )
        else:
            computed = {leaf: one for one in range(len(hosts)) for leaf in leaves.of(one)}
            holders = tuple((computed[leaf],) for leaf in range(leaves.total))
        numbers = tuple(number for number, ranks in enumerate(holders) if rank in ranks)
        return cls(found[rank // size], holders, numbers)

    @property
    def count(self) -> int:
        """How many there are, over all copies of the model."""
        return len(self.holders)

    def counts(self, sender: int, numel: int) -> list[int]:
        """Return how many of ``numel`` elements each rank codes for a sender, over all ranks."""
        ranks = self.holders[sender]
        alone = Senders((tuple(range(len(ranks))),), len(ranks), self.within.alignment)
        stretches = dict(zip(ranks, alone.stretches(numel), strict=True))
        size = max(map(max, self.holders)) + 1
        return [stretches[one].stop - stretches[one].start if one in stretches else 0 for one in range(size)]
