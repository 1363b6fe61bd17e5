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
from zerort.comm import Group, SharedShards, open_group
from zerort.config import Budget, GroupOptions, Plan, Residence, Tier
from zerort.device import HostDevice, HostStream, SlabPool, Ticket
from zerort.engine import (
    MemoryReport,
    Mesh,
    OffloadOptions,
    Restored,
    Runtime,
    RuntimeOptions,
    StepReport,
    TensorSpec,
    Unit,
    mesh,
)
from zerort.engine import open_runtime as open
from zerort.engine.sizing.forecast import forecast
from zerort.layout import FlatLayout, Partition, Placement
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
    "FlatLayout",
    "Group",
    "GroupOptions",
    "HostDevice",
    "HostStream",
    "Lion",
    "LossScale",
    "MemoryReport",
    "Mesh",
    "OffloadOptions",
    "Optimizer",
    "ParameterGroup",
    "Partition",
    "Placement",
    "Plan",
    "Residence",
    "Restored",
    "Runtime",
    "RuntimeOptions",
    "SharedShards",
    "SlabPool",
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
