"""Something real to train, on every machine: a byte-level language model in plain NumPy.

    byte_model.py   ByteModel: a small transformer in units, its backward written by hand
    byte_text.py    ByteText: what it learns, in batches that any number of ranks can share
    walk.py         Walk: the ZeRO walk over it; Reference: the same training without zerort

What the example trains, the tests compare and ``zerort bench step`` measures.
"""

# not-gpu: models wait as users do
from zerort.workload.byte_model import ByteModel
from zerort.workload.byte_text import ByteText
from zerort.workload.walk import Reference, Walk

__all__ = ["ByteModel", "ByteText", "Reference", "Walk"]
