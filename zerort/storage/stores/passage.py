"""`Passage`: one read or write that passes through slots in blocks, in order with others; the event of its Ticket."""

from __future__ import annotations

from collections.abc import Sequence

from zerort.storage.stores.later import Later

__all__ = ["Passage"]


class Passage(Later):
    """One read or write of some bytes of a value. Its parts are its blocks, as asked of the store below.

    Args:
        name: The value.
        begin: The first byte.
        end: One past the last.
        writes: Whether it changes them.
        after: What has to be asked for before it is.
    """

    def __init__(self, name: str, begin: int, end: int, *, writes: bool, after: Sequence[Passage]) -> None:
        super().__init__(f"{'Write' if writes else 'Read'} of bytes {begin} to {end} of {name!r}")
        self.name, self.begin, self.end, self.writes = name, begin, end, writes
        self.seen = False
        """Whether somebody was told of its error."""
        self._after = tuple(after)

    def conflicts(self, name: str, begin: int, end: int, *, writes: bool) -> bool:
        """Say whether one of this range has to be asked for after this one."""
        mine = self.name == name and self.begin < end and begin < self.end
        return mine and (self.writes or writes) and not self.asked.is_set()

    def hold_back(self) -> None:
        """Wait until those before it were asked."""
        for earlier in self._after:
            earlier.asked.wait()  # gpu-wait: a_read_comes_after_the_write_before_it
        self._after = ()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all blocks have ended; see `Later.wait`."""
        try:
            super().wait(timeout)  # gpu-wait: TestBehindABridge
        except Exception:
            self.seen = self.seen or self.done()
            raise

    def settle(self) -> Exception | None:
        """Wait until it has ended, and return the error that nobody has been told of, if it is a write's."""
        try:
            super().wait()  # gpu-wait: a_write_that_failed_is_told
        except Exception as error:
            return error if self.writes and not self.seen else None
        return None
