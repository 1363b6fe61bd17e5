"""How tensors are divided into sections, and sections cut over ranks: from shapes alone, no memory is touched.

divide      tensors by dtype, trainability and form of the state; those with the same settings side by side
cut_over    where a section is cut between ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from zerort.codec import BlockRows
from zerort.engine.model.frozen import rows_of
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError
from zerort.layout import Cut
from zerort.layout.flat import ALIGNMENT
from zerort.optim import MASTERS, ElementwiseOptimizer, MasterForm, Optimizer, StateFormat, master_form

__all__ = ["BLOCK", "Division", "cut_over", "divide", "needs_whole_tensors"]

BLOCK: Final = 1024
"""Elements. In deterministic mode norms are summed over blocks of this size, and no block is cut between ranks."""


def cut_over(
    size: int, *, weights: Sequence[float] | None, deterministic: bool, equal: bool, alignment: int = ALIGNMENT
) -> Cut:
    """Return how a runtime's sections are cut over ``size`` ranks.

    Args:
        size: The ranks that share a model.
        weights: How much of every shard each takes; None: alike.
        deterministic: Whether norms are summed over blocks that no cut may divide.
        equal: Whether shards are padded to one length.
        alignment: Elements: tensors and shards begin at multiples of it.
    """
    return Cut(
        size=size,
        granule=math.lcm(BLOCK, alignment) if deterministic else alignment,
        alignment=alignment,
        weights=None if weights is None else tuple(weights),
        equal=equal,
    )


@dataclass(frozen=True, slots=True)
class Division:
    """What one section will hold."""

    tensors: dict[str, TensorSpec]
    """By full name, in the order in which they will lie."""
    optimizers: dict[str, Optimizer] | None
    """By full name; None if the tensors are frozen."""
    master: MasterForm | None = None
    """How their master weights are kept; None: they have none."""
    format: StateFormat | None = None
    """In which blocks their state is kept; None: element by element."""
    rows: BlockRows | None = None
    """In which blocks they rest, being frozen; None: as they are."""
    table: bool = False
    """Whether it is one table, of which rows are gathered, reduced and updated alone."""
    lazy: bool = False
    """Whether rows without a gradient then stay as they are."""

    @property
    def dtype(self) -> str:
        """The dtype of all of them."""
        return next(iter(self.tensors.values())).dtype

    @property
    def is_sparse(self) -> bool:
        """Whether its tensors are pruned."""
        return self.optimizers is not None and next(iter(self.optimizers.values())).sparsity is not None

    def section_name(self, unit: str) -> str:
        """Return what its section is called: unit and dtype, whether it is frozen, and an unusual form of masters."""
        form = next((f" {name}" for name, form in MASTERS.items() if form is self.master and name != "float32"), "")
        blocks = "".join(f" {one.name}" for one in (self.format, self.rows) if one is not None)
        blocks += " sparse" * self.is_sparse
        if self.table:
            blocks += f" rows of {next(iter(self.tensors))}"
        return f"{unit or 'root unit'} {self.dtype}{' frozen' * (self.optimizers is None)}{form}{blocks}"

    def cut(self, cut: Cut) -> Cut:
        """Return how its section is cut over ranks, given how others are: no block is divided, nor a table's row."""
        if self.table:
            (table,) = self.tensors.values()
            blocks = cut.granule if cut.granule % BLOCK == 0 else 1  # over which norms are summed, if they are
            return replace(cut, granule=math.lcm(table.shape[1], blocks))
        block = math.lcm(*(one.numel for one in (self.format, self.rows) if one is not None))
        return replace(cut, alignment=math.lcm(cut.alignment, block), granule=math.lcm(cut.granule, block))


def divide(
    tensors: Mapping[str, TensorSpec],
    *,
    frozen: Callable[[str], bool],
    resolve: Callable[[str, tuple[int, ...]], Optimizer],
    frozen_format: str | None = None,
    tables: Collection[str] = (),
    lazy: bool = False,
) -> list[Division]:
    """Divide tensors by dtype, trainability, form of master weights and state, and whether elements are pruned.

    Those with the same optimizer settings come to lie side by side.

    Args:
        tensors: By full name.
        frozen: Whether a full name is frozen.
        resolve: Returns the optimizer of a full name and shape; the same object for the same settings.
        frozen_format: What frozen numbers rest in; None: as they are.
        tables: Full names of tables that are sections of their own, gathered and updated by rows.
        lazy: Whether rows of these without a gradient stay as they are.

    Raises:
        CallError: An optimizer cannot update parameters of this dtype in the form that it asks for, or frozen ones
            cannot rest in that format.
    """
    optimizers = {full: resolve(full, spec.shape) for full, spec in tensors.items() if not frozen(full)}
    parts: dict[tuple[str, bool, MasterForm | None, StateFormat | None, bool, str], dict[str, TensorSpec]] = {}
    for full, spec in tensors.items():
        is_cold = full not in optimizers
        form = None if is_cold else master_form(optimizers[full], spec.dtype, name=full)
        blocks = None if is_cold else _format_of(optimizers[full], full, spec)
        sparsity = None if is_cold else optimizers[full].sparsity
        if sparsity is not None:
            sparsity.check_shape(full, spec.shape)
        table = full if full in tables else ""
        parts.setdefault((spec.dtype, is_cold, form, blocks, sparsity is not None, table), {})[full] = spec
    divisions = []
    for (_, is_cold, form, blocks, _, table), part in parts.items():
        if is_cold:
            rows = [rows_of(frozen_format, spec.dtype, what=repr(full)) for full, spec in part.items()]
            divisions.append(Division(part, None, rows=rows[0]))  # of one dtype: all alike
            continue
        own = {full: optimizers[full] for full in part}
        _check_states(part, own)
        ranked = {key: index for index, key in enumerate(dict.fromkeys(map(id, own.values())))}
        order = sorted(part, key=lambda full: ranked[id(optimizers[full])])  # stable
        ordered = {full: part[full] for full in order}
        found = Division(ordered, {full: own[full] for full in order}, form, blocks)
        divisions.append(replace(found, table=True, lazy=lazy) if table else found)
    return divisions


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Say whether an update looks at whole tensors: for sums over them, or for their smallest elements."""
    return optimizer.sparsity is not None or not isinstance(optimizer, ElementwiseOptimizer)


def _format_of(optimizer: Optimizer, name: str, spec: TensorSpec) -> StateFormat | None:
    """Return the format of a tensor's state.

    Raises:
        CallError: Parameters of this dtype cannot have it.
    """
    optimizer.check_parameter(name, spec.dtype)
    return next((state.format for state in optimizer.states(spec.shape) if state.format is not None), None)


def _check_states(tensors: Mapping[str, TensorSpec], optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers of one section that give one name to two kinds of state: it would be kept as the first one's.

    Raises:
        CallError: There are such.
    """
    found: dict[str, tuple[tuple[str, bool], str]] = {}
    for full, optimizer in optimizers.items():
        for state in optimizer.states(tensors[full].shape):
            kind = (state.dtype, state.shape is None)
            first, other = found.setdefault(state.name, (kind, full))
            if first != kind:
                raise CallError(
                    f"Expected the optimizers of {other!r} and {full!r} to mean the same by state {state.name!r}, got "
                    f"two kinds of it ({optimizers[other].kind}, {optimizer.kind}). Register them in different units."
                )
