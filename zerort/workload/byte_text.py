"""`ByteText`: text that is on every machine, in batches that depend on the step alone.

The text is the source code of Python's standard library. A batch is drawn from (seed, step) and then shared out, so a
place in the data is just an integer, and any number of ranks sees the same rows in a step.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from zerort.typing import Array

__all__ = ["ByteText"]


class ByteText:
    """Rows of the standard library's sources, and the byte that follows each of theirs.

    Args:
        rows: How many rows a batch has, over all its shards.
        context: Bytes of a row.
        seed: Another seed, other rows.
        limit: Read no more than so many bytes.

    >>> text = ByteText(rows=8, context=32, limit=100_000)
    >>> x, y = text.batch(step=5)
    >>> x.shape, bool((x[:, 1:] == y[:, :-1]).all())
    ((8, 32), True)
    >>> shards = [text.batch(step=5, shard=at, of=3)[0] for at in range(3)]
    >>> bool((np.concatenate(shards) == x).all())
    True
    """

    def __init__(self, *, rows: int, context: int, seed: int = 0, limit: int = 1 << 22) -> None:
        if min(rows, context) < 1 or limit <= context + 1:
            raise ValueError(f"Expected rows, a context and more text, got {rows=}, {context=}, {limit=}.")
        self.rows, self.context, self.seed = rows, context, seed
        self.bytes = _read(limit)  # 1-D, uint8

    def batch(self, step: int, shard: int = 0, *, of: int = 1) -> tuple[Array, Array]:
        """Return a shard of a step's rows and what follows: two arrays of uint8, (rows, context).

        Args:
            step: Which batch; any integer from 0 on, in any order.
            shard: Which part of it; parts differ by one row if the rows cannot be shared evenly.
            of: How many parts there are.
        """
        if not 0 <= shard < of:
            raise ValueError(f"Expected a shard from 0 to {of - 1}, got {shard}.")
        starts = np.random.default_rng((self.seed, step)).integers(0, len(self.bytes) - self.context, self.rows)
        mine = starts[self.rows * shard // of : self.rows * (shard + 1) // of]
        window = self.bytes[mine[:, None] + np.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]


def _read(limit: int) -> Array:
    """Return the first ``limit`` bytes of the standard library's modules, in the order of their names."""
    parts: list[bytes] = []
    left = limit
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(file.read_bytes()[:left])
        left -= len(parts[-1])
        if not left:
            break
    return np.frombuffer(b"".join(parts), np.uint8)
