"""How many elements of a model an update changes, by learning rate: what ``Wire(gather="delta")`` sends.

A byte model with bfloat16 parameters and float32 masters trains in this process; after every update its gathered
parameters are compared with those of before.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zerort.cli.screen import new_table
from zerort.codec import measure_delta
from zerort.comm import open_group
from zerort.config import Plan
from zerort.engine.opening import open
from zerort.optim import AdamW
from zerort.workload import ByteModel, ByteText, Walk

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LEARNING_RATES", "ShareRow", "share_table", "shares_of"]

LEARNING_RATES: Final = (1e-6, 1e-5, 3e-4)
_WARM_UP, _MEASURED = 6, 2


@dataclass(frozen=True, slots=True)
class ShareRow:
    """What one update changes, in the mean of a few."""

    lr: float
    changed: float
    """Elements whose bits changed, of all."""
    part: float
    """Bytes of the deltas, of those of all parameters."""

    @property
    def bound(self) -> float:
        """What the bytes are to stay below."""
        return min(1.6 * self.changed + 0.01, 1.01)

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        return {**dataclasses.asdict(self), "bound": self.bound}


def shares_of(lr: float) -> ShareRow:
    """Train a model of 200,000 parameters for a few steps, and return what the last ones change."""
    model = ByteModel(width=64, layers=2, context=16, heads=4)
    changed = nbytes = elements = plain = 0
    with open_group(kind="solo") as group, open(Plan.zero(3), AdamW(lr=lr), group=group) as rt:
        walk = Walk(rt, model, ByteText(rows=2, context=16, limit=20_000), dtype="bfloat16")
        walk.train(_WARM_UP)
        before = walk.parameters()
        for _ in range(_MEASURED):
            walk.train(1)
            after = walk.parameters()
            for name, now in after.items():
                size = measure_delta(before[name].reshape(-1), now.reshape(-1))
                changed, nbytes = changed + size.changed, nbytes + size.nbytes
                elements, plain = elements + now.size, plain + now.nbytes
            before = after
    return ShareRow(lr, changed / elements, nbytes / plain)


def share_table(rows: list[ShareRow]) -> Table:
    """Return the rows as a table."""
    table = new_table("what an update changes of bfloat16 parameters: a byte model, AdamW")
    for head in ("learning\nrate", "changed\nelements", "bytes of\nall", "bound"):
        table.add_column(head, justify="right", no_wrap=True, min_width=8)
    for row in rows:
        table.add_row(f"{row.lr:g}", f"{row.changed:.4f}", f"{row.part:.4f}", f"{row.bound:.4f}")
    return table
