"""Pictures of benchmarks, drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerort.errors import CallError

__all__ = ["check_plot", "drawing"]


def check_plot(path: Path | None) -> None:
    """Raise, before anything is measured, if a picture is wanted that cannot be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise CallError("--plot: Expected matplotlib, got none. Install it: pip install matplotlib.")


@contextmanager
def drawing(
    path: Path, lines: int = 1, columns: int = 1, *, panel: tuple[float, float], dpi: int = 110
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its panels, and write it at the end; it appears whole or not at all.

    Args:
        path: Where to; its suffix is the format.
        lines: Panels below one another.
        columns: Panels side by side.
        panel: Width and height of a panel, in inches.
        dpi: Dots to an inch.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        lines, columns, figsize=(panel[0] * columns, panel[1] * lines), squeeze=False, layout="constrained"
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # beside it: what stands at `path` is always a whole picture
    try:
        yield figure, panels
        figure.savefig(draft, dpi=dpi, format=path.suffix[1:] or "png")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
        pyplot.close(figure)
