"""How tensors are divided into sections, and sections cut over ranks: from shapes alone, no memory is touched.

divide      tensors by dtype and trainability; those with the same optimizer settings side by side
cut_over    where a section is cut between ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from zerort.engine.model.tensors import TensorSpec
from zerort.layout import Cut
from zerort.layout.flat import ALIGNMENT
from zerort.optim import Optimizer

__all__ = ["BLOCK", "Division", "cut_over", "divide"]

BLOCK: Final = 1024
"""Elements. In deterministic mode norms are summed over blocks of this size, and no block is cut between ranks."""


def cut_over(size: int, *, weights: Sequence[float] | None, deterministic: bool, equal: bool) -> Cut:
    """Return how a runtime's sections are cut over ``size`` ranks.

    Args:
        size: The ranks that share a model.
        weights: How much of every shard each takes; None: alike.
        deterministic: Whether norms are summed over blocks that no cut may divide.
        equal: Whether shards are padded to one length.
    """
    granule = BLOCK if deterministic else ALIGNMENT
    return Cut(size=size, granule=granule, weights=None if weights is None else tuple(weights), equal=equal)


@dataclass(frozen=True, slots=True)
class Division:
    """What one section will hold."""

    tensors: dict[str, TensorSpec]
    """By full name, in the order in which they will lie."""
    optimizers: dict[str, Optimizer] | None
    """By full name; None if the tensors are frozen."""

    @property
    def dtype(self) -> str:
        """The dtype of all of them."""
        return next(iter(self.tensors.values())).dtype

    def section_name(self, unit: str) -> str:
        """Return what its section is called: unit and dtype, and whether it is frozen."""
        return f"{unit or 'root unit'} {self.dtype}{' frozen' * (self.optimizers is None)}"


def divide(
    tensors: Mapping[str, TensorSpec],
    *,
    frozen: Callable[[str], bool],
    resolve: Callable[[str, tuple[int, ...]], Optimizer],
) -> list[Division]:
    """Divide tensors by dtype and trainability; those with the same optimizer settings come to lie side by side.

    Args:
        tensors: By full name.
        frozen: Whether a full name is frozen.
        resolve: Returns the optimizer of a full name and shape; the same object for the same settings.
    """
    parts: dict[tuple[str, bool], dict[str, TensorSpec]] = {}
    for full, spec in tensors.items():
        parts.setdefault((spec.dtype, frozen(full)), {})[full] = spec
    divisions = []
    for (_, is_cold), part in parts.items():
        if is_cold:
            divisions.append(Division(part, None))
            continue
        optimizers = {full: resolve(full, spec.shape) for full, spec in part.items()}
        ranked = {key: index for index, key in enumerate(dict.fromkeys(map(id, optimizers.values())))}
        order = sorted(part, key=lambda full: ranked[id(optimizers[full])])  # stable
        divisions.append(Division({full: part[full] for full in order}, {full: optimizers[full] for full in order}))
    return divisions
