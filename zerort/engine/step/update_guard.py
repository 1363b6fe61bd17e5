"""`UpdateGuard`: knows when parameters and state do not belong to one update, and refuses what would build on them.

A disk that fails, or a kernel, in the middle of an update, an assignment or a load leaves values of two updates beside
each other. That is refused, not undone: gathers, steps and saves raise until a load (decision 0030).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from zerort.errors import StorageError

__all__ = ["Change", "UpdateGuard"]


@dataclass(slots=True)
class Change:
    """A change of parameters and state that is under way."""

    begun: bool
    """Whether something may be changed by now."""

    def begin(self) -> None:
        """Note that from here on something may be changed."""
        self.begun = True


class UpdateGuard:
    """Whether parameters and state are those of one update. Every rank has one."""

    def __init__(self) -> None:
        self._partial_update = ""
        self.has_partial_state = False
        """Whether optimizer state was changed in part, not parameters alone."""

    @contextlib.contextmanager
    def changing(self, what: str, *, state: bool = True, begun: bool = True) -> Iterator[Change]:
        """Note that what is changed inside is half done if the block ends with an error, whatever error that is.

        Args:
            what: What is changed, as a noun phrase.
            state: Whether that is optimizer state, too, not parameters alone.
            begun: False: nothing is changed before the block says so.
        """
        change = Change(begun)
        try:
            yield change
        except BaseException as error:
            if change.begun:
                self.has_partial_state |= state
                self._partial_update = f"{what}, half done when it ended with {type(error).__name__}: {error}"
            raise

    def check_whole(self, verb: str) -> None:
        """Raise if parameters and state are not those of one update: all ranks know.

        Raises:
            StorageError: They are not, and why.
        """
        if self._partial_update:
            raise StorageError(
                f"{verb}: Expected parameters and state of one update, got those of {self._partial_update} Go back to "
                "a checkpoint: rt.load(path), or rt.resume() if the last step is kept."
            )

    def clear(self) -> None:
        """Note that parameters and state are whole again."""
        self._partial_update, self.has_partial_state = "", False
