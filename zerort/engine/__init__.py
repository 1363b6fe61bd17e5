"""The ZeRO walk: a `Runtime` owns a model's parameters, gradients and optimizer state; `Unit`s gather and reduce.

    opening.py        all ranks open a runtime alike, or all raise
    runtime.py        Runtime: register, step, save, load, resume, memory, close
    registration.py   from arrays by name to a unit, agreed on by all ranks
    units.py          Units: what is asked of all units at once
    unit.py           Unit: gather, release, reduce, assign (gathered.py: its gathered form)
    values.py         the values that all ranks start from, or assign (assignment.py)
    section.py        the tensors of a unit that a plan is applied to: parameters, gradients, state
    state.py          what the optimizer keeps for them, and the pass that updates (kept.py: what it is made of)
    step.py           the step: agree, settle, measure, decide, update, publish
    update.py         the update, of chunks in memory and on a disk
    column.py         an array cut into chunks, in memory or in a store
    resting_parameters.py  summed.py            parameters and gradients that rest on a disk
    tiers.py          this rank's store and pipeline, and what a failure leaves
    section_tiers.py  offload_options.py        where a section's parts rest, and how they stream
    prefetch.py       which unit comes next
    snapshot.py       what a checkpoint holds; saving.py: when one is written and read
    last_step.py      a checkpoint of every step, and what room that takes
    forecast.py       how many bytes a plan or a budget will take, from shapes alone
    budget.py         what rests where under a budget (sizing.py, working.py: what there is to place)
    allotment.py      when that is decided
    attachment.py     what a binding hangs on a runtime
    mesh.py           which ranks share shards, and which hold copies
    report.py  ledger.py  options.py  tensors.py      what is told, counted, decided, registered

May import: everything below.
"""

from zerort.engine.attachment import Attachment
from zerort.engine.mesh import Mesh, mesh
from zerort.engine.offload_options import OffloadOptions
from zerort.engine.opening import open_runtime
from zerort.engine.options import RuntimeOptions
from zerort.engine.report import MemoryReport, Restored, StepReport
from zerort.engine.runtime import Runtime
from zerort.engine.section_tiers import SectionTiers
from zerort.engine.tensors import TensorSpec
from zerort.engine.unit import Unit

__all__ = [
    "Attachment",
    "MemoryReport",
    "Mesh",
    "OffloadOptions",
    "Restored",
    "Runtime",
    "RuntimeOptions",
    "SectionTiers",
    "StepReport",
    "TensorSpec",
    "Unit",
    "mesh",
    "open_runtime",
]
