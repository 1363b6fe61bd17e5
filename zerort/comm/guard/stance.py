"""`Stance`: what becomes of a call if other ranks come with another one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIVES_WAY", "Stance"]


@dataclass(frozen=True, slots=True)
class Stance:
    """What a caller has said of a call; see `zerort.comm.guard.differing`."""

    gives_way: bool = False
    """It is given up, and its caller makes another one."""
    turn: int | None = None
    """It is a gather that every rank can join, and this is when: the smallest number first."""


GIVES_WAY = Stance(gives_way=True)
