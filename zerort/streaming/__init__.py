"""Streaming: chunks pass through a few slots of memory while those before them are computed with.

transfers.py                          `Transfer`: one array of a chunk, where it is kept and which way it moves
pipeline.py  run.py  workspace.py     `Pipeline`: read from a store, compute, write back, `depth` chunks at a time
staging.py                            `Staging`: host to GPU and back, `depth` chunks at a time
update_stream.py                      `UpdateStream`: the chunks of an update that are on a disk
update_staging.py                     `UpdateStaging`: those that are on the host of a GPU
"""

from zerort.streaming.pipeline import Pipeline
from zerort.streaming.run import PipelineReport
from zerort.streaming.staging import Staging
from zerort.streaming.transfers import ArrayTransfer, StoreTransfer, cut_evenly, slot_nbytes_of

__all__ = [
    "ArrayTransfer",
    "Pipeline",
    "PipelineReport",
    "Staging",
    "StoreTransfer",
    "cut_evenly",
    "slot_nbytes_of",
]
