"""`Mesh`: which ranks share a model's shards, and which hold copies of them.

    mesh(shard=4, replicate=2)          rank   0 1 2 3   4 5 6 7
                                        shard  └─────┘   └─────┘      parameters are cut in four
                                        copies 0 ─────── 4, 1 ─────── 5, …    shards are held twice

Hybrid sharding: gathers stay among ``shard`` neighbours (one host, say), and only shards of gradients cross between
copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerort.comm import Group, open_group
from zerort.errors import CallError, PlanError

__all__ = ["Mesh", "mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that one rank trains in. Made by `mesh`; closed by the runtime that uses it."""

    world: Group
    """All ranks that train together."""

    shard: Group
    """The ranks that hold one copy of the model between them."""

    replicate: Group | None = None
    """The ranks that hold the same shard as this one; None if there is one copy only."""

    owns_world: bool = False
    """Whether closing the mesh closes ``world``, too."""

    @property
    def copy(self) -> int:
        """Which copy of the model this rank holds a shard of."""
        return 0 if self.replicate is None else self.replicate.rank

    @property
    def beyond(self) -> Group | None:
        """All ranks, for what ranks of other copies of the model have to hear, too; None: there is one copy."""
        return None if self.replicate is None else self.world

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of the mesh, each once."""
        return tuple(dict.fromkeys(one for one in (self.shard, self.replicate, self.world) if one is not None))

    def complain(self, text: str) -> None:
        """Meet the other ranks with a complaint in every group in which they may wait for this one.

        All of them meet in ``world``, at the latest in their step. Whether they come to the other groups, nobody knows;
        but where calls do not run ahead, they wait for a reduction in ``shard``, and call for no other before the step.
        """
        if self.replicate is not None:
            if self.replicate.runs_ahead:
                self.replicate.complain(text, wait=False)
            self.shard.complain(text, wait=not self.shard.runs_ahead)
        self.world.complain(text)

    def close(self) -> None:
        """Close the groups that the mesh made."""
        for group in (self.replicate, self.shard):
            if group is not None and group is not self.world:
                group.close()
        if self.owns_world:
            self.world.close()


def mesh(*, shard: int | None = None, replicate: int = 1, group: Group | None = None) -> Mesh:
    """Arrange the ranks of a group: ``shard`` neighbours hold a copy of the model, ``replicate`` times.

    Args:
        shard: Ranks per copy; None: as many as there are.
        replicate: Copies.
        group: The ranks; all of the job's if None.

    Raises:
        PlanError: ``shard * replicate`` is not the number of ranks.
    """
    if not isinstance(group, (Group, type(None))):
        raise CallError(f"Expected group to be a Group, which zr.open_group() opens, got {group!r}.")
    world = open_group() if group is None else group
    if type(replicate) is not int or replicate < 1 or (shard is not None and (type(shard) is not int or shard < 1)):
        raise PlanError(f"Expected shard and replicate to be whole numbers above 0, got {shard!r} and {replicate!r}.")
    each = world.size // replicate if shard is None else shard
    if each * replicate != world.size:
        raise PlanError(
            f"Expected shard * replicate to be the number of ranks ({world.size}), got {each} * {replicate}. "
            f"Start {each * replicate or replicate} ranks, or change the mesh."
        )
    if replicate == 1:
        return Mesh(world, world, None, owns_world=group is None)
    copy, place = divmod(world.rank, each)
    mine = world.split(copy, name=f"{world.name}/shard{copy}")
    twins = world.split(place, name=f"{world.name}/copies{place}")
    assert mine is not None
    return Mesh(world, mine, twins, owns_world=group is None)
