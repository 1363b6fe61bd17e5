"""The ZeRO walk: a `Runtime` owns a model's parameters, gradients and optimizer state; `Unit`s gather and reduce.

opening.py  opening_checks.py           all ranks open a runtime alike, or all raise
runtime.py  persistence.py              `Runtime`: register, step, memory, close; save, load, resume, publish
properties.py  closing.py               what it says of itself; how it ends
options.py                              how it trains; option_names.py answers names that are not ours
wire/                                   which formats values travel in (`zr.Wire`); who rounds gradients for that
mesh.py                                 which ranks share shards, and which hold copies
context.py                              `Context`: what all parts of an open runtime share
stopping.py                             signals that ask to stop
report.py                               what a step tells
binding.py  attachment.py               what a framework binding may use, and what it adds to a step

model/       what is gathered and reduced          step/      agree, measure, update, refresh
residence/   where bytes are                       sizing/    how many there are, and what fits
persist/     checkpoints of a runtime              batches/   orders taken, ranks joined, means
rebalance/   shards cut anew while a run goes on   rows/      tables of which rows are gathered and updated
"""

from zerort.config.offload import OffloadOptions
from zerort.engine.attachment import Attachment
from zerort.engine.mesh import Mesh, mesh
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.model.unit import Unit
from zerort.engine.opening import open
from zerort.engine.options import RuntimeOptions
from zerort.engine.report import MemoryReport, Restored, StepReport
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.runtime import Runtime

__all__ = [
    "Attachment",
    "MemoryReport",
    "Mesh",
    "OffloadOptions",
    "Restored",
    "Runtime",
    "RuntimeOptions",
    "SectionResidence",
    "StepReport",
    "TensorSpec",
    "Unit",
    "mesh",
    "open",
]
