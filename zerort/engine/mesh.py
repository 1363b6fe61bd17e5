"""`MeshShape`: how ranks are arranged, a value; `Mesh`: the groups that `zr.open` makes of it.

    mesh(shard=4, replicate=2)          rank   0 1 2 3   4 5 6 7
                                        shard  └─────┘   └─────┘      parameters are cut in four
                                        copies 0 ─────── 4, 1 ─────── 5, …    shards are held twice

Hybrid sharding: gathers stay among ``shard`` neighbours (one host, say), and only shards of gradients cross between
copies. Why a shape opens nothing: decision 0094.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerort.comm import Group
from zerort.comm.agreed import Copies
from zerort.errors import CallError, PlanError

__all__ = ["Mesh", "MeshShape", "mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that one rank trains in. Made by `MeshShape.build`; closed by the runtime that uses it."""

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
    def data_parallel(self) -> tuple[int, int]:
        """This rank's coordinate among ranks that are given different samples, and how many there are: all ranks."""
        return self.world.rank, self.world.size

    @property
    def beyond(self) -> Copies | None:
        """Where ranks of other copies of the model are, for what they have to hear, too; None: there is one copy."""
        return None if self.replicate is None else Copies(self.world, self.replicate)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How ranks are arranged. Nothing is opened before `zr.open` makes groups of it."""

    shard: int | None = None
    """Ranks per copy of the model; None: as many as there are."""
    replicate: int = 1
    """Copies."""
    group: Group | None = None
    """The ranks, if they are a group of the caller's; None: those that `zr.open` is given, or opens."""

    def __post_init__(self) -> None:
        if not isinstance(self.group, (Group, type(None))):
            raise CallError(f"Expected group to be a Group, which zr.open_group() opens, got {self.group!r}.")
        for size in (self.replicate, 1 if self.shard is None else self.shard):
            if type(size) is not int or size < 1:
                raise PlanError(
                    f"Expected shard and replicate to be whole numbers above 0, got {self.shard!r} and "
                    f"{self.replicate!r}."
                )
        if self.group is not None:
            self.ranks_per_copy(self.group.size)

    def ranks_per_copy(self, size: int) -> int:
        """Return how many of ``size`` ranks hold a copy of the model between them.

        Raises:
            PlanError: ``shard * replicate`` is not the number of ranks.
        """
        each = size // self.replicate if self.shard is None else self.shard
        if each * self.replicate != size:
            raise PlanError(
                f"Expected shard * replicate to be the number of ranks ({size}), got {each} * {self.replicate}. "
                f"Start {each * self.replicate or self.replicate} ranks, or change the mesh."
            )
        return each

    def build(self, world: Group, *, owns_world: bool) -> Mesh:
        """Make the groups, over the ranks of ``world`` and on its device. Every rank calls this.

        Args:
            world: All ranks.
            owns_world: Whether closing the mesh closes it, too.
        """
        each = self.ranks_per_copy(world.size)
        if self.replicate == 1:
            return Mesh(world, world, None, owns_world=owns_world)
        copy, place = divmod(world.rank, each)
        mine = world.split(copy, name=f"{world.name}/shard{copy}")
        twins = world.split(place, name=f"{world.name}/copies{place}")
        assert mine is not None
        return Mesh(world, mine, twins, owns_world=owns_world)


def mesh(*, shard: int | None = None, replicate: int = 1, group: Group | None = None) -> MeshShape:
    """Arrange ranks: ``shard`` neighbours hold a copy of the model, ``replicate`` times. Opens nothing.

    Args:
        shard: Ranks per copy; None: as many as there are.
        replicate: Copies.
        group: The ranks; those that ``zr.open(mesh=…)`` is given, or opens, if None.

    Raises:
        PlanError: ``shard * replicate`` is not the number of ranks; `zr.open` says so if there is no group yet.
    """
    return MeshShape(shard=shard, replicate=replicate, group=group)
