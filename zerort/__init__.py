"""zerort: an MPI-based, framework-agnostic collective and offload runtime for ZeRO-style sharded training.

    import zerort as zr

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:     # mpirun -n 8 python this.py
        block = rt.register("block0", params)                                  # {"w": array, …}, cut into shards
        with block.gathered() as p:
            loss, gradients = value_and_grad(p, batch)
        block.reduce(gradients)
        report = rt.step()

    with zr.open_group() as group:                                             # collectives alone
        total = group.all_reduce(np.ones(4)).wait()

Importing this imports NumPy, and neither MPI nor any framework. The rooms are drawn in ``docs/architecture.md``.
"""

from typing import TYPE_CHECKING, Any

from zerort import data, errors, native, trace
from zerort.comm import Group, open_group
from zerort.config import Budget, GroupOptions, Plan, Tier, TopK, Wire
from zerort.device import Ticket
from zerort.engine import (
    OffloadOptions,
    Runtime,
    StepReport,
    TensorSpec,
    Unit,
    mesh,
    open,
)
from zerort.engine.sizing.forecast import forecast
from zerort.optim import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    LossScale,
    Optimizer,
    ParameterGroup,
    Sparsity,
    warmup_cosine,
    warmup_linear,
)

if TYPE_CHECKING:
    from zerort.publish import Reader

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "Budget",
    "Group",
    "GroupOptions",
    "Lion",
    "LossScale",
    "OffloadOptions",
    "Optimizer",
    "ParameterGroup",
    "Plan",
    "Reader",
    "Runtime",
    "Sparsity",
    "StepReport",
    "TensorSpec",
    "Ticket",
    "Tier",
    "TopK",
    "Unit",
    "Wire",
    "data",
    "errors",
    "forecast",
    "mesh",
    "native",
    "open",
    "open_group",
    "trace",
    "warmup_cosine",
    "warmup_linear",
]


def __getattr__(name: str) -> Any:
    """Import `Reader` when it is asked for: it brings the checkpoints along, which take their time."""
    if name == "Reader":
        from zerort.publish import Reader

        return Reader
    raise AttributeError(f"module 'zerort' has no attribute {name!r}")
