"""`View`: a NumPy array that knows whether its unit is still gathered.

Every ufunc, NumPy function, index and method of a View looks first whether the memory is still its own, and raises
`StaleViewError` if not. What it computes are plain arrays; slices and reshapes of a View are Views (decision 0026).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerort.engine.binding import stale_text, unit_title
from zerort.errors import StaleViewError

__all__ = ["Life", "View", "as_view"]


class Life:
    """Whether the views of one gather may be used."""

    __slots__ = ("over", "unit")

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.over = False


class View(np.ndarray):
    """An array in a gathered unit: reads as any other until the unit is released, and raises from then on."""

    _life: Life | None
    _name: str

    def __array_finalize__(self, source: object) -> None:
        """Give slices and reshapes the life of what they are made from."""
        if isinstance(source, View):
            self._life = object.__getattribute__(source, "__dict__").get("_life")
            self._name = object.__getattribute__(source, "__dict__").get("_name", "")
        else:
            self._life, self._name = None, ""

    def __getattribute__(self, name: str) -> Any:
        """Refuse every public attribute of a view that is over."""
        if not name.startswith("_"):
            _check(self)
        return super().__getattribute__(name)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute with plain arrays."""
        out = kwargs.get("out")
        if out is not None:
            kwargs["out"] = tuple(_plain(one) for one in out)
        result = getattr(ufunc, method)(*[_plain(one) for one in inputs], **kwargs)
        return result if out is None or len(out) != 1 else out[0]  # so that ``view += x`` stays a View

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call a NumPy function with plain arrays; what it returns of this memory is a View again."""
        result = function(*_plain_all(args), **_plain_all(kwargs))
        if isinstance(result, list):
            return [_guard(one, self) for one in result]
        return _guard(result, self)

    def __getitem__(self, index: Any) -> Any:
        """Return an element, a slice (a View) or a selection (a copy)."""
        _check(self)
        return super().__getitem__(_plain_all(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write, where the view is of something to be written: a gradient."""
        _check(self)
        np.asarray(self)[_plain_all(index)] = _plain(value)

    def __len__(self) -> int:
        _check(self)
        return super().__len__()

    def __iter__(self) -> Any:
        _check(self)
        return super().__iter__()

    def __repr__(self) -> str:
        life = self._life
        if life is not None and life.over:
            return f"<view of {self._name!r} of {unit_title(life.unit)}: released>"
        return np.ndarray.__repr__(np.asarray(self))

    __str__ = __repr__


def as_view(array: np.ndarray[Any, Any], *, life: Life, name: str) -> View:
    """Return ``array`` as a View that ends with ``life``."""
    view = array.view(View)
    view._life, view._name = life, name
    return view


def _guard(result: Any, view: View) -> Any:
    """Return what shares memory with a view as a view of the same life."""
    life = view._life
    if life is None or type(result) is not np.ndarray or not np.may_share_memory(result, np.asarray(view)):
        return result
    return as_view(result, life=life, name=view._name)


def _check(view: View) -> None:
    life = view._life
    if life is not None and life.over:
        raise StaleViewError(stale_text(life.unit, view._name))


def _plain(value: Any) -> Any:
    """Return a View as the array that it is, if it still is."""
    if isinstance(value, View):
        _check(value)
        return np.asarray(value)
    return value


def _plain_all(value: Any) -> Any:
    """Return arguments with every View in them plain; containers are looked into."""
    if isinstance(value, (tuple, list)):
        return type(value)([_plain_all(one) for one in value]) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {key: _plain_all(one) for key, one in value.items()}
    return _plain(value)
