"""Backward passes of torch: which one is under way, and whether its end can be told."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from zerort.engine.binding import Binding
from zerort.errors import UnitStateError

__all__ = ["current_pass", "expect_one_end"]


def current_pass() -> int:
    """Return the number of the backward pass that is under way on this thread; -1 if none is."""
    return int(torch._C._current_graph_task_id())


def expect_one_end(binding: Binding, option: str, *, cure: str) -> None:
    """Refuse a backward pass inside another: nobody can tell the outer one's end.

    Args:
        binding: What torch uses of the runtime: the other ranks are told.
        option: What needs to know the end.
        cure: What to use otherwise.

    Raises:
        UnitStateError: A backward pass is under way inside a function of another, as reentrant checkpointing does.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            error = UnitStateError(
                f"Expected backward passes that end once with {option}, got one inside another: reentrant "
                f"checkpointing. Use checkpoint(…, use_reentrant=False), or {cure}."
            )
            binding.complain(error)
            raise error
        frame = frame.f_back
