"""Ranks that talk: `open_group` and the `Group` it returns.

    group.py  collectives.py   `Group` and its verbs
    launch.py                  how calls are numbered, ordered and handed to the transport
    prepared.py                calls that were checked before
    geometry.py  arrays.py     what each collective moves, as one table; arrays that are not NumPy's
    agreed.py                  ranks agree, or all fail
    transport.py               what a transport must be able to do
    neighbours.py              what processes of one machine can find out about each other
    ending.py                  groups that are still open when the process ends
    guard/                     calls compared, failures told and named
    transports/                solo, node, mpi, hierarchical, nccl
    bootstrap/                 which transport; opened together or not at all

The only room that imports mpi4py, and only when a group is opened.
"""

from zerort.comm.bootstrap.opening import KINDS, open_group
from zerort.comm.group import Group, SharedShards

__all__ = ["KINDS", "Group", "SharedShards", "open_group"]
