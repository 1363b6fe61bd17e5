"""Hold what a user decides: a `Plan` says what lives where, `GroupOptions` say how a group works.

    residence.py   Tier, Residence, and the stages as rows of data (`ZERO`):

                   stage   parameter     gradient      state
                   0       REPLICATED    REPLICATED    REPLICATED
                   1       REPLICATED    PARTIAL       SHARDED
                   2       REPLICATED    SHARDED       SHARDED
                   3       SHARDED       SHARDED       SHARDED

    plan.py        Plan: what lives where
    budget.py      Budget: how much there is of each memory, instead of tiers (`Plan.fit`)
    group.py       GroupOptions: how a group works
    offload.py     OffloadOptions: how values stream between memories and a disk
    environment.py every environment variable that is read; the options of `zr.open` are in engine/options.py
    sizes.py       bytes as people write them
    wire.py        Wire, TopK: in which form bytes travel between ranks

All values are frozen and prove themselves.
"""

from zerort.config.budget import Budget
from zerort.config.environment import ENVIRONMENT, Variable, parse_switch
from zerort.config.group import GroupOptions
from zerort.config.plan import Plan
from zerort.config.residence import ZERO, Residence, Tier
from zerort.config.sizes import format_bytes, parse_bytes
from zerort.config.wire import TopK, Wire

__all__ = [
    "ENVIRONMENT",
    "ZERO",
    "Budget",
    "GroupOptions",
    "Plan",
    "Residence",
    "Tier",
    "TopK",
    "Variable",
    "Wire",
    "format_bytes",
    "parse_bytes",
    "parse_switch",
]
