"""Ranks agree, or all fail: small JSON values and errors, exchanged over a group.

    with agreed(group, "save"):    what fails inside on one rank fails on all of them, with the same error
    gather_json(group, value)      every rank's value, on every rank
    raise_together(group, error)   one rank's error becomes the same error on every rank
    expect_same(group, value)      a value that has to be the same everywhere, or all raise what differs

For moments that can fail on one rank alone: opening, registering, saving, reads and updates of a disk. Values that are
the same everywhere cost one collective of 24 bytes per rank: texts travel only where their digests differ (decision
0110).
"""

# not-gpu: between arrays of the host
from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerort import errors
from zerort.comm.group import Group

__all__ = ["Copies", "agreed", "expect_same", "gather_json", "passed_on", "raise_together"]


@contextlib.contextmanager
def agreed(
    group: Group, name: str, *, catching: type[Exception] = Exception, others: Copies | None = None
) -> Iterator[None]:
    """Fail together: an error inside the block on one rank is raised on every rank, at its end; see `raise_together`.

    The block itself holds no collective: a rank that fails inside comes to the end at once.

    Args:
        group: The ranks; all of them enter the block.
        name: What to call this in errors and traces.
        catching: Errors that this rank alone may meet. Others pass at once, and the ranks do not meet: all have them.
        others: Other copies of the model, whose ranks have not entered and have to hear of a failure; None: nobody.
    """
    error: Exception | None = None
    try:
        yield
    except catching as caught:
        error = caught
    with passed_on(others):
        raise_together(group, error, name=name)


class Copies(NamedTuple):
    """Copies of a model, of which one may fail alone."""

    world: Group
    """All ranks."""
    between: Group
    """The ranks that hold the same part as this one, of all copies; split from ``world``."""


@contextlib.contextmanager
def passed_on(others: Copies | None, *, catching: type[errors.ZerortError] = errors.ZerortError) -> Iterator[None]:
    """Tell ranks that have heard nothing yet of an error that all ranks in the block raise: copies of the model.

    Calls that they have made over copies, and this copy now will not, are met with it, too: nobody waits for them.

    Args:
        others: Where they are; None: there is one copy.
        catching: Which errors.
    """
    try:
        yield
    except catching as failure:
        if others is not None:
            others.world.complain(str(failure), part=others.between)
        raise


def gather_json(group: Group, value: Any, *, name: str = "values") -> list[Any]:
    """Return every rank's ``value`` in rank order, on every rank.

    Args:
        group: The ranks; all of them call this.
        value: What JSON can carry.
        name: What to call this in errors and traces.
    """
    text = json.dumps(value).encode()
    digest = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int64)
    told = group.all_gather(np.array([len(text), *digest], np.int64), name=f"{name} digests").wait()
    told = told.reshape(group.size, -1)
    if (told == told[0]).all():
        return [json.loads(text) for _ in range(group.size)]  # each its own: a caller may change one
    sizes = told[:, 0]
    payload = np.frombuffer(text, np.uint8)
    texts = group.all_gather(payload, counts=[int(size) for size in sizes], name=name).wait()
    ends = np.cumsum(sizes)
    return [json.loads(texts[end - size : end].tobytes()) for end, size in zip(ends, sizes, strict=True)]


def raise_together(group: Group, error: Exception | None, *, name: str = "verdict") -> None:
    """Raise on every rank if any rank has an error; return on every rank if none has.

    The lowest rank's error is the one that counts. It keeps its type where that is one of `zerort.errors`; anything
    else arrives on the other ranks as `RankFailedError`, with the type in the text.

    Args:
        group: The ranks; all of them call this.
        error: What went wrong here; None if nothing did.
        name: What to call this in errors and traces.
    """
    failed = group.all_gather(np.array([error is not None]), name=name).wait()
    if not failed.any():
        return
    story = None if error is None else (type(error).__name__, str(error))
    stories = gather_json(group, story, name=name)
    rank = next(rank for rank, one in enumerate(stories) if one is not None)
    if error is not None and stories[group.rank] == stories[rank]:  # its own: it knows where it came from
        raise error
    kind, text = stories[rank]
    known = getattr(errors, kind, None)
    if known is None:
        raise errors.RankFailedError(f"Rank {rank} failed: {kind}: {text}") from None
    raise known(text if f"rank {rank}" in text.lower() else f"{text} (rank {rank})") from None


def expect_same(group: Group, value: Any, *, what: str, error: type[Exception] = errors.PlanError) -> None:
    """Raise on every rank unless all of them came with the same ``value``.

    Args:
        group: The ranks; all of them call this.
        value: What JSON can carry.
        what: What the value is, as a noun phrase for the message.
        error: What to raise.
    """
    values = gather_json(group, value, name=f"same {what}"[:60])  # where they are the same, they do not travel
    odd = next((rank for rank, one in enumerate(values) if one != values[0]), None)
    if odd is not None:
        path, left, right = _first_difference(values[0], values[odd])
        raise error(
            f"Expected {what} to be the same on every rank, got {path}{left} on rank 0 and {right} on rank {odd}. "
            "Every rank runs the same program with the same options."
        )


def _first_difference(left: Any, right: Any, path: str = "") -> tuple[str, str, str]:
    """Return where two JSON values differ first, and what stands there in each."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
            if key not in left or key not in right:
                here, there = ("nothing" if key not in one else _short(one[key]) for one in (left, right))
                return f"{path}{key}: ", here, there
            if left[key] != right[key]:
                return _first_difference(left[key], right[key], f"{path}{key}: ")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        at = next(index for index, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
        return _first_difference(left[at], right[at], path)
    return path, _short(left), _short(right)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
