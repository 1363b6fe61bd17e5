"""Where output goes: tables and lines to stdout, the bar to stderr, both from rank 0 alone.

A launcher hands its ranks pipes, so rank 0 cannot see the terminal behind them, or terminals with nobody behind. The
process that starts the ranks can see, and tells it (`Screen.words`). Lines and tables keep their natural width: a table
folded to 80 columns cannot be read, nor grepped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerort.comm.bootstrap.environment import sees_terminal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["Bar", "Screen", "new_table"]

_WIDE = 250


class Screen:
    """What a person, a file or a pipe sees.

    Args:
        seen: What `words` of the starting process gave, e.g. ``"out,err"``; None looks at this process.
        shown: False for the ranks that print nothing.
    """

    def __init__(self, seen: str | None = None, *, shown: bool = True) -> None:
        self.shown = shown
        told = (seen or "").split(",")
        self._out = "out" in told or sees_terminal(sys.stdout)
        self._err = "err" in told or sees_terminal(sys.stderr)
        self._console: Console | None = None
        self._progress: Progress | None = None

    @staticmethod
    def words() -> list[str]:
        """Return the words that tell a rank of the terminal of this process."""
        seen = [name for name, file in (("out", sys.stdout), ("err", sys.stderr)) if file.isatty()]
        return ["--screen", ",".join(seen)]

    def print(self, what: RenderableType) -> None:
        """Print a line, or a table and an empty line after it."""
        from rich.table import Table

        if not self.shown:
            return
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=sys.stdout, force_terminal=self._out, width=_WIDE, highlight=False)
        # On one terminal with the bar, only the bar's console knows how to print above it.
        console = self._progress.console if self._progress is not None and self._out else self._console
        console.print(what, soft_wrap=not isinstance(what, Table), markup=False, crop=False, highlight=False)
        if isinstance(what, Table):
            console.print()
        sys.stdout.flush()

    @contextlib.contextmanager
    def bar(self, total: int) -> Iterator[Bar]:
        """Show a bar on stderr, if that is a terminal, while the block runs."""
        if not (self.shown and self._err):
            yield Bar(None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(file=sys.stderr, force_terminal=True, width=_WIDE)
        # Redrawn only when a step is done: a thread that redraws would take time from what is measured.
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
            progress.add_task("", total=total)
            self._progress = progress
            try:
                yield Bar(progress)
            finally:
                self._progress = None


class Bar:
    """How far the work is."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def step(self, text: str, *, advance: int = 0) -> None:
        """Say what is done next, and how many steps have been done since the last call."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text, advance=advance, refresh=True)


def new_table(title: str) -> Table:
    """Return an empty table in the style that all commands share."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
