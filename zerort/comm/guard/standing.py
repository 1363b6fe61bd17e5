"""`Standing`: how far a rank has come, kept while it works and told to the others when it leaves.

A rank that ends its loop early is gone before anyone misses it. What it says then is all that the others can tell their
user: after which update it left, with which error, with which exit code. One object serves a group and its parts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from zerort.errors import RankFailedError

__all__ = ["Standing", "exit_code"]

_LONGEST = 200
"""Characters of an error, at most six bytes each: what a rank says on leaving must fit where it is left."""


@dataclass(slots=True)
class Standing:
    """How far one rank has come."""

    updates: int | None = None
    """Updates done by the runtime that trains here; None without one."""
    error: str = ""
    """The error with which the rank leaves; empty if with none."""
    follows: bool = False
    """Whether it leaves only because it has missed another rank."""
    code: int = 0
    """The exit code with which the rank leaves, as far as it is known."""

    def take_exit(self, error: object) -> None:
        """Note with what a ``with`` block is left: an error, ``sys.exit(code)``, or None."""
        if isinstance(error, SystemExit):
            self.code = exit_code(error.code)
        elif isinstance(error, RankFailedError):
            self.follows = True
        elif error is not None:
            first = (str(error).splitlines() or [""])[0]
            text = f"{type(error).__name__}: {first}"[:_LONGEST].removesuffix(": ")
            self.error = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent

    def words(self) -> str:
        """Return this for another rank to read."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, words: str) -> Standing | None:
        """Return what a rank said; None if it said nothing, because it was killed."""
        return cls(**json.loads(words)) if words else None


def exit_code(given: object) -> int:
    """Return the exit code that Python makes of what ``sys.exit`` was given."""
    if given is None:
        return 0
    return given & 0xFF if isinstance(given, int) else 1
