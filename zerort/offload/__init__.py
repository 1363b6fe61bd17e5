"""Values that sleep below memory: stores, and the one loop that streams them through it.

    store.py  memory.py  nvme.py  striped.py    `Store`: bytes by name, in memory, on a disk, on several
    shares.py  second_names.py                  which files hold a value, for a checkpoint that takes them over
    bridged.py  passage.py  later.py            the same for arrays on a GPU
    pipeline.py  run.py  parts.py  slots.py     `Pipeline`: read, compute, write back, `depth` chunks at a time
    staging.py  hops.py                         `Staging`: host to GPU and back, `depth` chunks at a time
    update_place.py                             on which side an update is faster, from measured speeds
    preflight.py  mounts.py                     what a directory can do, and which disk it is on, before it is used
    faults.py                                   ``ZERORT_FAULT``: break the disk on purpose

    chunk.py  crew.py  segments.py  scratch.py      below a store on a disk: its files, threads, integers, directory
    blocks.py  refusal.py                           block files and their errors, for stores and checkpoints alike

May import: comm.environment, device, trace, config, errors, typing, native.
"""

from zerort.offload.bridged import BridgedStore
from zerort.offload.hops import Hop, slot_nbytes_of
from zerort.offload.memory import MemoryStore
from zerort.offload.nvme import NvmeOptions, NvmeStore
from zerort.offload.parts import Part, PipelineReport, choose_depth, cut_evenly
from zerort.offload.pipeline import Pipeline
from zerort.offload.preflight import DirectoryReport, inspect
from zerort.offload.staging import Staging
from zerort.offload.store import Store
from zerort.offload.striped import StripedStore

__all__ = [
    "BridgedStore",
    "DirectoryReport",
    "Hop",
    "MemoryStore",
    "NvmeOptions",
    "NvmeStore",
    "Part",
    "Pipeline",
    "PipelineReport",
    "Staging",
    "Store",
    "StripedStore",
    "choose_depth",
    "cut_evenly",
    "inspect",
    "slot_nbytes_of",
]
