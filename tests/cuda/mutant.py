"""`Mutant`: one line of the package without its synchronisation, and which tests must not like that."""

import re
from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A line without its synchronisation, and the tests that must not like that."""

    file: str
    line: str
    """As it stands in the file, without the space round it; there once. If not, with the lines before it."""
    instead: str
    tests: tuple[str, ...]
    """The file below tests/cuda, then names of tests in it."""
    ranks: int = 0
    """0: in one process."""

    def places(self, text: str) -> list[int]:
        """Return the numbers of the lines that it fits, from 1 on."""
        return [text.count("\n", 0, found.start("last")) + 1 for found in self._pattern.finditer(text)]

    def change(self, text: str) -> str:
        """Return the file's text with its line changed."""
        return self._pattern.sub(lambda found: found["before"] + self.instead, text)

    @property
    def _pattern(self) -> re.Pattern[str]:
        *before, last = (re.escape(line) for line in self.line.split("\n"))
        context = "".join(f" *{line}\n" for line in before)
        return re.compile(rf"^(?P<before>{context} *)(?P<last>{last})$", re.MULTILINE)
