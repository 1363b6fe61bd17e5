"""Settings of their own for some parameters, chosen by name: `ParameterGroup`, and which optimizer a tensor gets.

    groups = [
        ParameterGroup(("*.bias", "*.norm.*"), weight_decay=0.0),
        ParameterGroup(lambda name, shape: len(shape) == 1, lr=1e-4),
        ParameterGroup("head.*", optimizer=SGD(lr=0.1)),
    ]

The first group that matches decides; what it does not override, and tensors that no group matches, follow the
optimizer itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from zerort.errors import CallError
from zerort.optim.optimizer import Optimizer, qualified_name

__all__ = ["Match", "ParameterGroup", "resolve", "settings_of", "unmatched", "warn_of_unmatched"]

Match: TypeAlias = str | tuple[str, ...] | Callable[[str, tuple[int, ...]], bool]
"""A glob pattern over full names, several of them, or a function of name and shape."""


class ParameterGroup:
    """Parameters that share settings.

    In a pattern, ``*`` stands for any text, dots included, ``?`` for one character and ``[ab]`` for one of these; a
    pattern matches the whole name, and case counts.

    >>> ParameterGroup(("*.bias", "*.norm.*"), weight_decay=0.0)
    ParameterGroup(('*.bias', '*.norm.*'), weight_decay=0.0)

    Args:
        match: Which parameters: a pattern such as ``"*.bias"``, a tuple of patterns, or a callable of the full name,
            such as ``"block0.attn.bias"``, and the shape. Ranks must agree on the answer.
        optimizer: What updates them; None: what updates all others.
        **overrides: Fields of that optimizer, such as ``lr`` or ``weight_decay``.

    Raises:
        CallError: If `match` or `optimizer` is none of these.
    """

    __slots__ = ("match", "optimizer", "overrides")

    match: Match
    optimizer: Optimizer | None
    overrides: dict[str, Any]

    def __init__(self, match: Match, *, optimizer: Optimizer | None = None, **overrides: Any) -> None:
        patterns = (match,) if isinstance(match, str) else match
        if not callable(patterns) and not (
            isinstance(patterns, tuple) and patterns and all(isinstance(one, str) and one for one in patterns)
        ):
            raise CallError(
                f"Expected match to be a pattern, a tuple of patterns or a callable, got {match!r}. "
                "Pass one such as '*.bias'."
            )
        if not isinstance(optimizer, (Optimizer, type(None))):
            raise CallError(f"Expected optimizer to be one such as zr.SGD(lr=0.1), got {optimizer!r}.")
        self.match = match
        self.optimizer = optimizer
        self.overrides = overrides

    def matches(self, name: str, shape: tuple[int, ...]) -> bool:
        """Say whether a parameter of this full name and shape belongs to the group."""
        return any(test(name, shape) for _, test in self._tests())

    def unmatched(self, tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the patterns that match none of the tensors, which are shapes by full name."""
        return [said for said, test in self._tests() if not any(test(name, shape) for name, shape in tensors.items())]

    def _tests(self) -> list[tuple[str, Callable[[str, tuple[int, ...]], bool]]]:
        """Return each pattern with the test that it stands for."""
        if callable(self.match):
            return [(qualified_name(self.match), self.match)]
        patterns = (self.match,) if isinstance(self.match, str) else self.match
        return [(pattern, functools.partial(_fits, pattern)) for pattern in patterns]

    def check(self, optimizer: Optimizer) -> None:
        """Raise unless every override is a field of the group's optimizer, or else of ``optimizer``.

        Raises:
            CallError: If one is not; the message names it.
        """
        optimizer = self.optimizer or optimizer
        fields = [field.name for field in dataclasses.fields(optimizer) if field.init]  # type: ignore[arg-type]
        for name in self.overrides:
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=1)
                cure = f"Did you mean {close[0]!r}?" if close else "Use one of these."
                raise CallError(
                    f"Expected {self!r} to override fields of {optimizer.kind} ({', '.join(fields)}), got {name!r}. "
                    f"{cure}"
                )

    @property
    def has_own_lr(self) -> bool:
        """Whether its learning rate is not that of parameters in no group."""
        return self.optimizer is not None or "lr" in self.overrides

    def __repr__(self) -> str:
        match = qualified_name(self.match) if callable(self.match) else repr(self.match)
        own = {} if self.optimizer is None else {"optimizer": self.optimizer}
        settings = "".join(f", {name}={value!r}" for name, value in {**own, **self.overrides}.items())
        return f"ParameterGroup({match}{settings})"


def _fits(pattern: str, name: str, shape: tuple[int, ...]) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def resolve(optimizer: Optimizer, groups: Sequence[ParameterGroup], name: str, shape: tuple[int, ...]) -> Optimizer:
    """Return the optimizer for one tensor: with the overrides of the first group that matches.

    Equal settings give the very same object, also over several calls and groups, so neighbours in a buffer can be
    updated in one go if their optimizers are identical (``is``).

    Args:
        optimizer: What holds where no group says otherwise; a dataclass.
        groups: In the order in which they are asked.
        name: Full name of the tensor.
        shape: Its whole shape.

    Raises:
        CallError: If a group overrides what the optimizer does not have, or with a value that it refuses.
    """
    for group in groups:
        group.check(optimizer)
    first = next((group for group in groups if group.matches(name, shape)), None)
    return optimizer if first is None else settings_of(first, optimizer)


def settings_of(group: ParameterGroup, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of a group's tensors, given that of tensors in no group; the same object every time.

    Raises:
        CallError: If the group overrides what its optimizer does not have, or with a value that it refuses.
    """
    group.check(optimizer)
    try:
        replaced = dataclasses.replace(group.optimizer or optimizer, **group.overrides)  # type: ignore[type-var]
    except CallError as error:
        raise CallError(f"{error} (It stands in {group!r}.)") from None
    return optimizer if replaced == optimizer else _same(replaced)


def unmatched(groups: Sequence[ParameterGroup], tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return every pattern that matches no tensor at all: probably a typing error.

    Args:
        groups: The groups in question.
        tensors: Shapes by full name, of all parameters there are.

    Returns:
        Patterns, and the names of callables, in the order of the groups.
    """
    return [pattern for group in groups for pattern in group.unmatched(tensors)]


def warn_of_unmatched(groups: Sequence[ParameterGroup], tensors: Mapping[str, tuple[int, ...]]) -> None:
    """Warn if there are such patterns; the arguments are those of `unmatched`."""
    missed = unmatched(groups, tensors)
    if missed:
        warnings.warn(
            f"Parameter groups match no parameter: {', '.join(missed)}. Names are like {next(iter(tensors), '')!r}.",
            stacklevel=3,
        )


_made: list[weakref.ref[Optimizer]] = []  # a list, not a set: a schedule need not be hashable
_lock = threading.Lock()


def _same(optimizer: Optimizer) -> Optimizer:
    """Return the equal optimizer that was made before, if it is still in use, or else this one."""
    with _lock:
        alive = [(reference, one) for reference in _made if (one := reference()) is not None]
        found = next((one for _, one in alive if one == optimizer), None)
        if found is None:
            found = optimizer
            alive.append((weakref.ref(optimizer), optimizer))
        _made[:] = [reference for reference, _ in alive]
        return found
