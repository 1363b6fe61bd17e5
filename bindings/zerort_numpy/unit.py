"""`register` and `NumpyUnit`: a unit whose tensors are guarded NumPy views; on a GPU, CuPy's arrays as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerort import Runtime, TensorSpec, Unit
from zerort.engine.binding import Frozen, Views, gathering
from zerort.typing import Array
from zerort_numpy.view import Life, View, as_view

__all__ = ["NumpyUnit", "register"]


def register(
    rt: Runtime,
    name: str,
    params: Mapping[str, Array | TensorSpec],
    *,
    frozen: Frozen = False,
    ties: Mapping[str, tuple[NumpyUnit | Unit, str]] | None = None,
    broadcast: bool = False,
    rows: Sequence[str] = (),
    lazy: bool = False,
) -> NumpyUnit:
    """Hand parameters to the runtime; see `zerort.engine.Runtime.register` for the arguments. Every rank calls this."""
    plain = {
        local: (other.unit if isinstance(other, NumpyUnit) else other, tensor)
        for local, (other, tensor) in (ties or {}).items()
    }
    return NumpyUnit(rt.register(name, params, frozen=frozen, ties=plain, broadcast=broadcast, rows=rows, lazy=lazy))


class NumpyUnit:
    """A unit for plain NumPy loops. Made by `register`.

    Args:
        unit: The runtime's own.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._filling = Life(unit.name)

    @property
    def name(self) -> str:
        """What the unit is called."""
        return self.unit.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, tied ones included."""
        return self.unit.names

    @gathering
    def gathered(self, rows: Mapping[str, Any] | None = None) -> Iterator[Views]:
        """Gather the unit for the length of a ``with`` block, which gets its tensors by name.

        They are zero-copy, read-only and raise `StaleViewError` when used after the block. On a GPU they are CuPy's,
        which know nothing of that: only asking for one by name raises then.

        Args:
            rows: Indices of the rows to bring, of each table that was registered so; None: all of it.
        """
        life = Life(self.unit.name)
        with self.unit.gathered(rows) as raw:
            guarded = Views(self.unit.name, {name: _guarded(raw[name], life, name) for name in raw})
            try:
                yield guarded
            finally:
                life.over = True
                guarded.expire()

    def gradients(self) -> dict[str, Array]:
        """Return arrays to write this micro-step's gradients into; then call `reduce()`. Nothing is copied.

        They end with that `reduce`: the memory serves other units then.
        """
        self._filling = Life(self.unit.name)
        return {name: _guarded(array, self._filling, name) for name, array in self.unit.gradients().items()}

    def contribute(self, name: str, gradient: Array) -> None:
        """Add one tensor's gradient; the unit is reduced when all of its tensors have theirs."""
        self.unit.contribute(name, gradient)

    def reduce(
        self, gradients: Mapping[str, Array] | None = None, *, rows: Mapping[str, tuple[Any, Array]] | None = None
    ) -> None:
        """Sum the gradients over the ranks while the caller computes on. See `zerort.engine.Unit.reduce`."""
        plain = gradients
        if isinstance(gradients, Mapping):
            plain = {name: np.asarray(one) if isinstance(one, View) else one for name, one in gradients.items()}
        self.unit.reduce(plain, rows=rows)
        self._filling.over = True

    def __repr__(self) -> str:
        return f"Numpy{self.unit!r}"


def _guarded(array: Array, life: Life, name: str) -> Array:
    """Return an array that ends with ``life``, where it is NumPy's: CuPy has no arrays that could look first."""
    return as_view(array, life=life, name=name) if isinstance(array, np.ndarray) else array
