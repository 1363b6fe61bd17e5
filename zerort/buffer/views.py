"""`Views`: tensors by name, for as long as their buffer is gathered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import NoReturn, ParamSpec

from zerort.errors import CallError, StaleViewError, UnitStateError
from zerort.typing import Array

__all__ = ["Gathering", "Views", "gathering", "stale_text", "unit_title"]

Given = ParamSpec("Given")


class Views(Mapping[str, Array]):
    """A read-only mapping from names to tensors that lie in a gathered buffer. Nothing is copied.

    Args:
        owner: What was gathered, for errors.
        arrays: The tensors by name.
    """

    __slots__ = ("_arrays", "_owner")

    def __init__(self, owner: str, arrays: dict[str, Array]) -> None:
        self._owner = owner
        self._arrays: dict[str, Array] | None = arrays

    @property
    def stale(self) -> bool:
        """Whether the buffer was released."""
        return self._arrays is None

    def expire(self) -> None:
        """End the views: whoever asks for one from now on gets `StaleViewError`."""
        self._arrays = None

    def _live(self, name: str) -> dict[str, Array]:
        if self._arrays is None:
            raise StaleViewError(stale_text(self._owner, name))
        return self._arrays

    def __getitem__(self, name: str) -> Array:
        arrays = self._live(name)
        try:
            return arrays[name]
        except KeyError:
            raise CallError(
                f"Expected one of the parameters {', '.join(map(repr, arrays))} of {unit_title(self._owner)}; got "
                f"{name!r}."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._live(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._live("its tensors"))

    def __len__(self) -> int:
        return len(self._live("its tensors"))

    def __repr__(self) -> str:
        what = "released" if self._arrays is None else ", ".join(self._arrays)
        return f"Views({self._owner!r}: {what})"


class Gathering(contextlib.AbstractContextManager[Views]):
    """A ``with`` block in which something is gathered. Without ``with`` there are no views, and it says so.

    Args:
        block: Gathers when it is entered, and releases when it is left.
    """

    __slots__ = ("_block",)

    def __init__(self, block: contextlib.AbstractContextManager[Views]) -> None:
        self._block = block

    def __enter__(self) -> Views:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    def __getitem__(self, name: object) -> NoReturn:
        raise UnitStateError(
            f"Expected {name!r} of a gathered unit, got gathered() that nobody has entered. Write `with "
            "unit.gathered() as p:`, and compute with p inside it."
        )


def gathering(method: Callable[Given, Iterator[Views]]) -> Callable[Given, Gathering]:
    """Make a generator method that yields views once a ``with`` block of them."""
    block = contextlib.contextmanager(method)

    @functools.wraps(method)
    def gathered(*args: Given.args, **kwargs: Given.kwargs) -> Gathering:
        return Gathering(block(*args, **kwargs))

    return gathered


def unit_title(name: str) -> str:
    """Return what messages call the unit ``name``: the one without a name is the root unit.

    >>> unit_title("block0"), unit_title("")
    ("unit 'block0'", 'the root unit')
    """
    return f"unit {name!r}" if name else "the root unit"


def stale_text(owner: str, name: str) -> str:
    """Return what `StaleViewError` says about tensor ``name`` of unit ``owner``."""
    return (
        f"Expected {name!r} of {unit_title(owner)} to be used while the unit is gathered, got it after its release. "
        f"Compute inside `with unit.gathered():`, or copy what you need longer: np.array(view)."
    )
