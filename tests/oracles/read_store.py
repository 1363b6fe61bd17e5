"""Read a store's values without the store: plain files, as ``scratch.py`` and ``striped.py`` describe them.

A value is the file of its name, quoted as in a URL, with ``.chunk`` behind it; zeros fill its last page. A striped
value lies over its members in units; a member's turn comes by its weight, and the order of turns starts one later with
each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

__all__ = ["read_striped", "read_value"]

PAGE, TURNS = 4096, 32


def read_value(directory: str | Path, name: str, nbytes: int) -> bytes:
    """Return the bytes of a value."""
    with open(Path(directory) / f"{quote(name, safe='')}.chunk", "rb") as file:
        data = file.read()
    assert len(data) == -(-nbytes // PAGE) * PAGE, (name, len(data), "is not whole pages")
    assert not any(data[nbytes:]), (name, "has something behind its end")
    return data[:nbytes]


def read_striped(
    directories: Sequence[str | Path], weights: Sequence[float], name: str, nbytes: int, *, unit: int, created: int
) -> bytes:
    """Return the bytes of a value over several members; ``created`` values were made before it."""
    credit, order = [0.0] * len(weights), []
    for _ in range(TURNS):  # each gains its weight; the richest takes the turn and pays what all have gained
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        order.append(credit.index(max(credit)))
        credit[order[-1]] -= sum(weights)
    sizes = [min(unit, nbytes - at) for at in range(0, nbytes, unit)]
    turns = [(order[(created + number) % TURNS], size) for number, size in enumerate(sizes)]
    shares = [sum(size for member, size in turns if member == at) for at in range(len(weights))]
    files = [read_value(directory, name, share) for directory, share in zip(directories, shares, strict=True)]
    found, used = [], [0] * len(weights)
    for member, size in turns:
        found.append(files[member][used[member] : used[member] + size])
        used[member] += size
    return b"".join(found)
