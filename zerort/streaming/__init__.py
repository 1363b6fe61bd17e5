"""Streaming: values pass through a few slots of memory while the ones before them are computed with.

pipeline.py  run.py  parts.py  slots.py    `Pipeline`: read, compute, write back, `depth` chunks at a time
staging.py  hops.py  careful.py            `Staging`: host to GPU and back, `depth` chunks at a time
update_place.py                            on which side an update is faster, from measured speeds
"""

from zerort.streaming.hops import Hop, slot_nbytes_of
from zerort.streaming.parts import Part, PipelineReport, cut_evenly
from zerort.streaming.pipeline import Pipeline
from zerort.streaming.staging import Staging

__all__ = [
    "Hop",
    "Part",
    "Pipeline",
    "PipelineReport",
    "Staging",
    "cut_evenly",
    "slot_nbytes_of",
]
