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

from zerort import errors, native, trace
from zerort.comm import Group, open_group
from zerort.config import Budget, GroupOptions, Plan, Tier
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
    warmup_cosine,
    warmup_linear,
)

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
    "Runtime",
    "StepReport",
    "TensorSpec",
    "Ticket",
    "Tier",
    "Unit",
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
