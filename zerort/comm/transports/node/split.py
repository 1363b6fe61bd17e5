"""`split_node`: ranks of a node open rendezvous of their own, one for each color, on all of them or on none.

who is where        everyone's color and key                    told to all
a file for each     made by the first of a color, or an error   told to all
opened              by all of a color, or an error              told to all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from zerort.errors import SharedMemoryError

__all__ = ["split_node"]

T = TypeVar("T", bound="Startable")


class Control(Protocol):
    """The file in which the ranks of a part will meet."""

    path: str

    def close(self) -> None:
        """Let it go, when all have opened it."""


class Startable(Protocol):
    """What a rank makes for its part, before it meets the others of that."""

    def start(self) -> None:
        """Meet them for the first time."""


def split_node(
    color: int | None,
    *,
    key: int,
    rank: int,
    tell: Callable[[str], list[str]],
    open_control: Callable[[int], Control],
    make: Callable[[str, int, int], T],
) -> T | None:
    """Return the transport among the ranks of the same color; None for color None. Every rank calls this.

    Args:
        color: Which part to be in.
        key: Where in it.
        rank: This rank.
        tell: Gives a text to every rank, and returns what each of them gave.
        open_control: Makes the file in which a number of ranks will meet.
        make: Returns the transport of (path, rank, size), to be started.

    Raises:
        SharedMemoryError: There is no memory for one of the parts; on every rank.
    """
    told = [text.split(",") for text in tell(f"{'' if color is None else color},{key}")]
    members = sorted((int(k), r) for r, (c, k) in enumerate(told) if color is not None and c == str(color))
    ranks = [r for _, r in members]
    leader = bool(ranks) and ranks[0] == rank
    # Value or error: a leader without memory must not leave its members, or the other colors, waiting.
    control, story = None, ""
    try:
        if leader:
            try:
                control = open_control(len(ranks))
                story = control.path
            except SharedMemoryError as error:
                story = f"!{error}"
        stories = tell(story)
        part, complaint = None, ""
        if ranks and not any(s.startswith("!") for s in stories):
            try:
                part = make(stories[ranks[0]], ranks.index(rank), len(ranks))
            except SharedMemoryError as error:
                complaint = f"!{error}"
        answers = tell(complaint)
    finally:
        if control is not None:
            control.close()
    for text in stories + answers:
        if text.startswith("!"):
            raise SharedMemoryError(text[1:])
    if part is not None:
        part.start()
    return part
