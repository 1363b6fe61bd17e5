"""Ranks that talk: `open_group` and the `Group` it returns.

    group.py      the verbs: numbers and orders calls     bootstrap.py    which transport; opened together or not at all
    checks.py     what arguments must be                  environment.py  launcher and MPI library
    prepared.py   calls that were checked before          failure.py      one rank's exception ends the job
    call.py       what a rank says it is doing            verdict.py      the errors that ranks raise together
    standing.py   how far a rank has come, when it left   last_words.py   ranks that end tell each other why
    geometry.py   what each collective moves: one table   folded.py       tracebacks without zerort's own frames
    transport.py  what carries the bytes:

        solo · threads · node (node_memory, shelf, window, board, rounds) · mpi (exchange) · hierarchical
        nccl (nccl_moves, nccl_watch, nccl_bootstrap): GPUs, on top of one of these; imported when asked for

The only room that imports mpi4py, and only when a group is opened. May import: device, trace, config, layout, native.
"""

from zerort.comm.bootstrap import KINDS, open_group
from zerort.comm.group import Group, SharedShards

__all__ = ["KINDS", "Group", "SharedShards", "open_group"]
