"""`ModelSpec`: what every section of a model takes on a rank, from shapes alone. No memory is touched.

    ModelSpec(units, plan=…, optimizer=…, size=8).sections(rank=0)   ->   one SectionSize for each section

The same layouts, partitions and divisions that a runtime is built from, so the numbers are exact, padding and uneven
weights included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zerort.buffer import Leaves, Routes, Senders, room_nbytes, sent_nbytes, unit_title
from zerort.config import Plan
from zerort.engine.model.division import Division, cut_over, divide, needs_whole_tensors
from zerort.engine.model.tensors import Frozen, TensorSpec, frozen_in, full_name, is_frozen
from zerort.engine.options import Accumulate, keeps_whole_gradients
from zerort.engine.rows.checks import RowSettings, check_rows, check_tie, declared_rows
from zerort.engine.rows.table import row_bounds, touched_nbytes
from zerort.engine.sizing.section_size import PARTS, SectionSize
from zerort.engine.sizing.state_sizes import fixed_nbytes, state_columns, state_nbytes
from zerort.engine.wire.coding import Coding, range_codec
from zerort.errors import CallError
from zerort.layout import FlatLayout, Partition, Placement, itemsize
from zerort.layout.dtypes import TRAINABLE, gradient_dtype
from zerort.layout.flat import ALIGNMENT
from zerort.optim import Optimizer, ParameterGroup, resolve
from zerort.optim.late import late_updates

__all__ = ["Lazy", "ModelSpec", "Rows", "Ties", "UnitTies", "checked_rows", "lazy_in"]

Ties = Mapping[str, Mapping[str, tuple[str, str]]]
"""Parameters that another unit holds: the unit and the name there, by unit and name."""

Rows = Mapping[str, Sequence[str]]
"""Tables that are gathered and updated by rows, by unit: ``{"embed": ("table",)}``."""

Lazy = bool | Mapping[str, bool]
"""Whether rows of tables stay as they are without a gradient: in every unit, or by unit."""


class UnitTies(NamedTuple):
    """What a unit uses of others."""

    owners: frozenset[str]
    """Units that hold its tied parameters: gathered with it."""
    trained: frozenset[tuple[str, str]]
    """Units and names of the trainable ones: it has gradients of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that fixes how many bytes a model takes."""

    units: Mapping[str, Mapping[str, TensorSpec]]
    """What will be registered: shapes and dtypes by name, by unit."""
    plan: Plan
    """How parts lie over the ranks; tiers do not matter here."""
    optimizer: Optimizer
    """Whose state is kept."""
    size: int
    """Ranks that share the model."""
    param_groups: Sequence[ParameterGroup] = ()
    """Other settings for some parameters."""
    frozen: Frozen | Mapping[str, Frozen] = False
    """Which parameters take no gradient: in every unit, or by unit."""
    shard_weights: Sequence[float] | None = None
    """How much of every shard each rank takes."""
    equal_shards: bool = False
    """Whether shards are padded to one length, as NCCL wants them."""
    gradient_dtype: str | None = None
    """What gradients are summed in; None: as `gradient_dtype` says."""
    over_nccl: bool = False
    """Whether NCCL sums them."""
    one_host: bool = False
    """Whether all ranks are on one host."""
    micro_steps: int = 1
    """Calls of reduce per unit and step."""
    accumulate: Accumulate | None = None
    """How their gradients are summed, as in `RuntimeOptions`."""
    virtual_shards: int | None = None
    """Micro-batches of a step in deterministic mode."""
    digest: bool | None = None
    """Whether every step's report has a checksum of all parameters; None: in deterministic mode."""
    ties: Ties = field(default_factory=dict)
    """Parameters that another unit holds, by unit: ``{"head": {"w": ("embed", "table")}}``."""
    coding: Coding | None = None
    """What travels as codes; None: nothing."""
    replicate: int = 1
    """Copies of the model."""
    hosts: tuple[int, ...] = ()
    """For each rank, a number that tells its host; empty: each has one of its own."""
    frozen_format: str | None = None
    """What frozen parameters rest in; None: as they are."""
    rows: Rows = field(default_factory=dict)
    """Tables that are gathered and updated by rows."""
    lazy: Lazy = False
    """Whether their rows stay as they are without a gradient."""

    def sections(self, *, rank: int | None = None) -> list[SectionSize]:
        """Return what each section takes on ``rank``; None: the most that it takes on any."""
        ranks = range(self.size) if rank is None else (rank,)
        return [self._size(unit, part, ranks) for unit in self.units for part in self._divisions(unit)]

    @property
    def keeps_whole(self) -> bool:
        """Whether each rank keeps whole gradients."""
        return keeps_whole_gradients(
            self.plan,
            micro_steps=self.micro_steps,
            accumulate=self.accumulate,
            in_tree=self.virtual_shards is not None,
        )

    def check_rows(self, *, has_budget: bool, on_gpus: bool) -> None:
        """Refuse tables by rows that a runtime refuses, with its words (`engine.rows.checks`).

        Args:
            has_budget: Whether a budget says the tiers, instead of the plan.
            on_gpus: Whether ranks compute on GPUs.

        Raises:
            CallError: A tensor, its optimizer or a tie to it cannot have rows.
            PlanError: The plan cannot.
        """
        settings = RowSettings(
            plan=self.plan,
            has_budget=has_budget,
            optimizer=self.optimizer,
            param_groups=self.param_groups,
            on_gpus=on_gpus,
            has_copies=self.replicate > 1,
        )
        for unit, tables in self.rows.items():
            tensors = self.units[unit]
            cold = {name for name in tensors if is_frozen(frozen_in(unit, self.frozen), name)}
            check_rows(settings, unit, tables, tensors, frozen=cold, shared=(), lazy=lazy_in(unit, self.lazy))
        for unit, names in self.ties.items():
            for local in names:
                home, name = self._place_of(unit, local)
                check_tie(unit, local, full_name(home, name), by_rows=name in self.rows.get(home, ()))

    def tied_to(self) -> dict[str, UnitTies]:
        """Return what each unit with tied parameters uses of others.

        Raises:
            CallError: A tie leads nowhere.
        """
        found = {}
        for unit, names in self.ties.items():
            places = [self._place_of(unit, local) for local in names]
            trained = {(home, name) for home, name in places if not is_frozen(frozen_in(home, self.frozen), name)}
            found[unit] = UnitTies(frozenset(home for home, _ in places), frozenset(trained))
        return found

    def _tied_names(self) -> set[str]:
        """Return the full names of trainable tensors that other units have gradients of."""
        return {full_name(home, name) for one in self.tied_to().values() for home, name in one.trained}

    def _place_of(self, unit: str, local: str) -> tuple[str, str]:
        """Return the unit that holds a tied parameter, and its name there."""
        seen = {(unit, local)}
        home, name = self.ties[unit][local]
        while name not in self.units.get(home, {}):
            if (home, name) in seen or name not in self.ties.get(home, {}):
                raise CallError(
                    f"Expected to tie {local!r} of {unit_title(unit)} to a parameter of a unit, got {name!r} of "
                    f"{home!r}. Name a unit and one of its tensors: ties={{'head': {{'w': ('embed', 'table')}}}}."
                )
            seen.add((home, name))
            home, name = self.ties[home][name]
        return home, name

    def _divisions(self, unit: str) -> Iterator[Division]:
        tensors = self.units[unit]
        cold = {full_name(unit, local) for local in tensors if is_frozen(frozen_in(unit, self.frozen), local)}
        yield from divide(
            {full_name(unit, local): spec for local, spec in tensors.items()},
            frozen=cold.__contains__,
            resolve=lambda name, shape: resolve(self.optimizer, self.param_groups, name, shape),
            frozen_format=self.frozen_format,
            tables={full_name(unit, local) for local in self.rows.get(unit, ())},
            lazy=lazy_in(unit, self.lazy),
        )

    def _size(self, unit: str, part: Division, ranks: Sequence[int]) -> SectionSize:
        cut = cut_over(
            self.size,
            weights=self.shard_weights,
            deterministic=self.virtual_shards is not None,
            equal=self.equal_shards,
            alignment=ALIGNMENT if self.coding is None else self.coding.alignment,
        )
        shapes = {name: spec.shape for name, spec in part.tensors.items()}
        layout, partition = part.cut(cut).of(shapes, dtype=part.dtype)
        mine = max(partition.counts[rank] for rank in ranks)
        at_rest = mine if self._is_sharded("parameter") else layout.numel
        gathered = layout.nbytes if self._is_sharded("parameter") else 0
        codes = self._codes(part, partition) if gathered else 0
        copied = gathered if self._keeps_copy(part.dtype) else 0
        width = itemsize(part.dtype)
        if part.rows is not None:
            return self._coded_size(unit, part, layout, numel=mine, at_rest=at_rest)
        if part.optimizers is None:
            return SectionSize(
                unit=unit,
                name=part.section_name(unit),
                parameter=width * at_rest,
                whole=gathered,
                codes=codes,
                copied=copied,
                numel=mine,
                columns={"parameter": (width,)},
                movable=frozenset(filter(self._is_sharded, PARTS)) - self._pinned(part),
            )
        if part.table:
            return self._size_of_rows(unit, part, layout, partition, ranks)
        leaves = self._leaves()
        is_whole = self.keeps_whole
        summed_in = gradient_dtype(part.dtype, self.gradient_dtype, over_nccl=self.over_nccl)
        element = itemsize(summed_in)
        in_slots = not is_whole or (self.micro_steps > 1 and leaves is None)
        reductions = 1 if is_whole else self.micro_steps if leaves is None else leaves.most
        if is_whole:
            resting = layout.numel * (1 if leaves is None else 1 + leaves.depth)
        else:
            resting = mine * (1 if leaves is None else leaves.held)
        tied_sums = max(self._tied_sums(layout, partition, rank) for rank in ranks) * element
        return SectionSize(
            unit=unit,
            name=part.section_name(unit),
            parameter=width * at_rest,
            gradient=element * resting + tied_sums,
            state=max(state_nbytes(part, layout, self._owned(layout, partition, rank)) for rank in ranks),
            whole=gathered,
            codes=codes,
            copied=copied,
            sent=max(self._sent(summed_in, partition, rank) for rank in ranks),
            residual=max(self._residual(summed_in, layout.numel, rank) for rank in ranks),
            bucket=element * layout.numel if in_slots else 0,
            reductions=reductions,
            shards=1 if is_whole or leaves is None else leaves.held,
            gradient_moves=self._gradient_moves(reductions) if leaves is None else leaves.moves,
            tied_sums=tied_sums,
            exchanged=0 if leaves is None else leaves.exchanged,
            arriving=0 if is_whole or leaves is None else element * mine * leaves.ranks,
            is_tied=not is_whole and not self._tied_names().isdisjoint(part.tensors),
            is_held=not is_whole,
            numel=mine if self._is_sharded("state") else layout.numel,
            columns={"parameter": (width,), "gradient": (element,), "state": state_columns(part)},
            reads_parameter=part.master is None or part.master.reads_parameter,
            fixed=fixed_nbytes(part),
            movable=self._movable(part, is_whole=is_whole),
            stays=any(map(needs_whole_tensors, part.optimizers.values())),
        )

    def _gradient_moves(self, reductions: int) -> tuple[int, int]:
        """Return how many shards are read back and put away, given how many are summed: copies sum them once more."""
        over_copies = int(self.replicate > 1)
        return reductions - 1 + over_copies, reductions + over_copies

    def _coded_size(self, unit: str, part: Division, layout: FlatLayout, *, numel: int, at_rest: int) -> SectionSize:
        """Return what frozen parameters take that rest as codes."""
        assert part.rows is not None
        return SectionSize(
            unit=unit,
            name=part.section_name(unit),
            parameter=part.rows.nbytes_of(at_rest),
            whole=layout.nbytes,
            is_decoded=True,
            decoded_from=part.rows.nbytes_of(layout.numel) if self._is_sharded("parameter") else 0,
            numel=numel,
            columns={"parameter": (part.rows.width,)},
            movable=frozenset(filter(self._is_sharded, PARTS)),
        )

    def _size_of_rows(
        self, unit: str, part: Division, layout: FlatLayout, partition: Partition, ranks: Sequence[int]
    ) -> SectionSize:
        """Return what a table takes: a shard of it under every stage, and when each row was last up to date.

        What a step takes besides depends on its rows, and the whole table is gathered in memory of its own.
        """
        ((name, spec),) = part.tensors.items()
        assert part.optimizers is not None
        late, touched = 0, [0] * partition.size
        digest = self.virtual_shards is not None if self.digest is None else self.digest
        if not (part.lazy or digest):
            late = late_updates(part.optimizers[name], TRAINABLE[part.dtype].updated_in).nbytes
            touched = [touched_nbytes(int(rows)) for rows in np.diff(row_bounds(partition, spec.shape))]
        mine = max(partition.counts[rank] for rank in ranks)
        kept = late + max(touched[rank] for rank in ranks)
        return SectionSize(
            unit=unit,
            name=part.section_name(unit),
            parameter=itemsize(part.dtype) * mine,
            state=kept + max(state_nbytes(part, layout, partition.of(rank)) for rank in ranks),
            numel=mine,
            columns={"parameter": (itemsize(part.dtype),), "gradient": (0,), "state": state_columns(part)},
            row_width=spec.shape[1],
            fixed=kept,
            movable=frozenset({"parameter", "state"}),
        )

    def _codes(self, part: Division, partition: Partition) -> int:
        """Return the bytes that parameters take as codes."""
        apart = not self.one_host if self.over_nccl else len(set(self.hosts)) > 1
        codec = range_codec(self.coding, part.dtype, is_sparse=part.is_sparse and apart)
        return 0 if codec is None else room_nbytes(codec, partition.counts, on_gpus=self.over_nccl)

    def _keeps_copy(self, dtype: str) -> bool:
        return self.plan.secondary is not None or (self.coding is not None and self.coding.keeps_whole(dtype))

    def _pinned(self, part: Division) -> frozenset[str]:
        """Return the parts of a section that stay in memory because a copy of the whole is there."""
        return frozenset({"parameter"} if self._keeps_copy(part.dtype) else ())

    def _sent(self, summed_in: str, partition: Partition, rank: int) -> int:
        """Return the bytes of the codes of gradients that a rank sends and gets."""
        format = None if self.coding is None else self.coding.reduce_format(summed_in)
        if format is None:
            return 0
        routes, ranks = Routes(self._senders(), partition), range(self.size) if self.over_nccl else (rank,)
        return max(sent_nbytes(format, routes, one, width=itemsize(summed_in)) for one in ranks)

    def _residual(self, summed_in: str, numel: int, rank: int) -> int:
        """Return the bytes that a rank keeps of what coding loses of gradients: of each sender that it codes for."""
        if self.coding is None:
            return 0
        stretch, leaves = self._senders().stretches(numel)[rank], self._leaves()
        copies = range(self.replicate)
        senders = 1 if leaves is None else max(len(leaves.of(copy * self.size + rank)) for copy in copies)
        return senders * self.coding.residual_nbytes(summed_in, stretch.stop - stretch.start)

    def _senders(self) -> Senders:
        """Return who sends gradients as codes."""
        assert self.coding is not None
        return self.coding.senders(self.hosts or tuple(range(self.size)))

    def _movable(self, part: Division, *, is_whole: bool) -> frozenset[str]:
        """Return the parts of a section that can leave memory."""
        assert part.optimizers is not None
        if any(needs_whole_tensors(one) for one in part.optimizers.values()):
            return frozenset()
        stays = {"gradient"} if is_whole else set()
        return frozenset(filter(self._is_sharded, PARTS)) - stays - self._pinned(part)

    def _tied_sums(self, layout: FlatLayout, partition: Partition, rank: int) -> int:
        """Return the elements that ``rank`` keeps of other units' fixed trees of some tensors."""
        leaves = self._leaves()
        if leaves is None or self.keeps_whole:
            return 0
        names = [full_name(home, name) for one in self.tied_to().values() for home, name in one.trained]
        extents = [layout.of(name) for name in names if any(name == one.name for one in layout.extents)]
        held = 0
        for extent in extents:
            padded = FlatLayout.build({extent.name: extent.shape}, dtype=layout.dtype).numel
            held += partition.within(extent.offset, extent.offset + padded).counts[rank]
        return held * leaves.held

    def _leaves(self) -> Leaves | None:
        """Return which micro-batches each rank computes, if gradients are summed in a fixed tree."""
        if self.virtual_shards is None:
            return None
        ranks = self.size * self.replicate
        return Leaves(self.virtual_shards, ranks, self.replicate, in_turn=not self.keeps_whole)

    def _owned(self, layout: FlatLayout, partition: Partition, rank: int) -> tuple[int, int]:
        """Return the range that ``rank`` updates."""
        return partition.of(rank) if self._is_sharded("state") else (0, layout.numel)

    def _is_sharded(self, part: str) -> bool:
        return getattr(self.plan, part).placement is Placement.SHARDED


def lazy_in(unit: str, lazy: Lazy) -> bool:
    """Return whether rows of a unit's tables stay as they are without a gradient."""
    return lazy if isinstance(lazy, bool) else lazy.get(unit, False)


def checked_rows(rows: Rows | None, units: Collection[str], *, lazy: Lazy) -> dict[str, tuple[str, ...]]:
    """Return which names are given as tables by rows, by unit; whether they can be, `check_rows` says.

    Args:
        rows: What a user has given.
        units: The names of all units.
        lazy: Given beside it.

    Raises:
        CallError: They are no names by unit.
    """
    if not all(isinstance(one, bool) for one in (lazy.values() if isinstance(lazy, Mapping) else [lazy])):
        raise CallError(f"Expected lazy=True, False, or one of them by unit; got {lazy!r}.")
    if not isinstance(rows, (Mapping, type(None))):
        raise CallError(f"Expected rows by unit and table, rows={{'embed': ('table',)}}; got {rows!r}.")
    odd = next((unit for unit in rows or {} if unit not in units), None)
    if odd is not None:
        raise CallError(f"Expected rows by unit and table, rows={{'embed': ('table',)}}; got no {unit_title(odd)}.")
    return {unit: declared_rows(unit, names, lazy=False) for unit, names in (rows or {}).items()}
