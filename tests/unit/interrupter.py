"""Ctrl-C at a chosen line of some files, for tests that try all of them."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that this thread runs in some files while it is inside.

    Args:
        at: Which.
        within: What the names of these files begin with.
    """

    def __init__(self, at: int, *, within: str) -> None:
        self.at, self.within, self.seen = at, within, 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count a line, and interrupt it if it is the one."""
        if not frame.f_code.co_filename.startswith(self.within):
            return None
        # Python looks for signals after calls and at jumps, never between the end of a block and what its `with` does
        # there; a trace could interrupt it, and leave a lock locked.
        at_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event in ("line", "call") and not at_with:
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self) -> Interrupter:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)
