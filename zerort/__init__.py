"""zerort: an MPI-based, framework-agnostic collective and offload runtime for ZeRO-style sharded training.

    import numpy as np
    import zerort as zr

    with zr.open_group() as group:                      # mpirun -n 8 python this.py
        total = group.all_reduce(np.ones(4)).wait()     # each 8.0

Importing this imports NumPy, and neither MPI nor any framework. The rooms are drawn in ``zerort/DESIGN.md``.
"""

from zerort import errors, native, trace
from zerort.comm import Group, SharedShards, open_group
from zerort.config import GroupOptions, Plan, Residence, Tier
from zerort.device import HostDevice, HostStream, SlabPool, Ticket
from zerort.layout import FlatLayout, Partition, Placement

__version__ = "0.1.0"

__all__ = [
    "FlatLayout",
    "Group",
    "GroupOptions",
    "HostDevice",
    "HostStream",
    "Partition",
    "Placement",
    "Plan",
    "Residence",
    "SharedShards",
    "SlabPool",
    "Ticket",
    "Tier",
    "errors",
    "native",
    "open_group",
    "trace",
]
