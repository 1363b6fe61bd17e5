"""Ranks that talk: `open_group` and the `Group` it returns.

    group.py         the verbs: checks, numbers and orders calls          bootstrap.py  which transport, opened together
    call.py          what a rank says it is doing                         verdict.py    the errors ranks raise together
    geometry.py      what each collective moves, as one table             failure.py    one exception ends the job
    transport.py     what carries the bytes:
      solo  threads  node (window.py)  mpi (exchange.py)  hierarchical

The only room that imports mpi4py, and only when a group is opened. May import: device, trace, config, layout, native.
"""

from zerort.comm.bootstrap import KINDS, open_group
from zerort.comm.group import Group, SharedShards

__all__ = ["KINDS", "Group", "SharedShards", "open_group"]
