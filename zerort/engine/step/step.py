"""`take_step`: from every rank's gradients to updated parameters, or to the reason why not.

    wait      for reductions and gathers that are under way
    agree     every rank's facts: trouble, tensors with gradients, the first NaN            one small all_gather
    finish    what is still PARTIAL is reduced; sums over replicas and of tied tensors      what the table says
    measure   the norm of all gradients, from sums over fixed blocks                        one small all_gather
    decide    a NaN skips the step and says why, or raises; else clip, unscale              the same on every rank
    update    kernels over this rank's shards
    refresh   nobody reads parameters before all have written theirs                        a barrier, or an all_gather

Until `update` nothing has changed: whatever goes wrong before leaves parameters and state as they were (decision 0020).
"""

from __future__ import annotations

from typing import Any

from zerort import trace
from zerort.comm.agreed import passed_on, raise_together
from zerort.engine.attachment import complete_all
from zerort.engine.context import Context
from zerort.engine.model.gather import end_step_of_gathers, wait_for_gathers
from zerort.engine.model.units import Units
from zerort.engine.report import StepReport, UnitNorms
from zerort.engine.step.agree import StepFacts, agree
from zerort.engine.step.copies import reduced_alike
from zerort.engine.step.digest import digest_of
from zerort.engine.step.discard import forget_gradients
from zerort.engine.step.facts.rates import rate_of
from zerort.engine.step.facts.straggler import straggler_of
from zerort.engine.step.measure import measure_norm
from zerort.engine.step.refresh import refresh
from zerort.engine.step.update import update_sections
from zerort.engine.wire.coding import UNCODED_OVER_COPIES
from zerort.errors import CallError, NonFiniteError, UnitStateError
from zerort.optim import clip_factor
from zerort.typing import Array

__all__ = ["take_step"]


def take_step(context: Context, units: Units, *, weight: Any, progress: Any) -> StepReport:
    """Do one step, and write it to disk if `last_step=` is set. Every rank calls this."""
    try:
        report = _walk(context, units, weight, progress)
        context.pace.end_step(context.run.commit_batches())
    except NonFiniteError:  # whoever catches it goes on with the next batch
        context.run.commit_batches()
        raise
    finally:
        forget_gradients(context, units)
        context.run.join.end_step()
        end_step_of_gathers(context)
    if context.options.last_step is not None:
        from zerort.engine.persist.last_step import keep  # here: checkpoints take their time to import

        keep(context, units, progress=progress)
    context.world.standing.updates = context.run.updates
    context.stopping.tell()  # now that nothing keeps the report from the caller
    return report


def _walk(context: Context, units: Units, weight: Any, progress: Any) -> StepReport:
    """Go through the phases that the head of this file names."""
    with context.ledger.stall("step"):
        complete_all(context.world, context.run.attachments, "step")
    _expect_all_micro_steps(context, units)
    with context.ledger.stall("reduce"):
        is_alike = reduced_alike(context, units)  # if not, the agreement says what is missing
        # First of all: a rank that could not reduce has posted its error in this group, and waiting raises it here.
        with passed_on(context.mesh.beyond, catching=CallError):
            if is_alike:
                units.wait_for_reductions()
    with context.ledger.stall("gather"):
        wait_for_gathers(context, units.trained_sections())
    with context.ledger.stall("step"):
        facts = agree(context, units, weight=weight, objection=_objection(context, progress))
    context.pace.begin()
    context.run.is_new = False
    context.run.is_weighted = facts.weight.given is not None
    if not facts.present:
        return _report(
            context,
            units,
            facts,
            updated=False,
            why="no rank has a gradient",
            grad_norm=0.0,
            loss_scale=context.loss_scale,
        )
    sections = [
        section for unit in units.values() if unit.reduced for section in unit.sections if section.bucket is not None
    ]
    with context.ledger.stall("reduce"):
        gradients = [section.finish_reduce() for section in sections]
        if any(section.completes_sum_on_disk for section in sections):  # else the agreement has heard of all errors
            refused = next((section.storage_error for section in sections if section.storage_error), None)
            raise_together(context.world, refused, name="sums on disks")
    with trace.span("measure"):
        norm, where, sums = measure_norm(context, sections, gradients)
    used_scale = context.loss_scale
    grad_scale = 1.0 / (used_scale * facts.weight.denominator)
    norm *= grad_scale
    norms = UnitNorms(_by_unit(units, sums), scale=grad_scale)
    nonfinite_at = facts.nonfinite or where
    if context.scaler is not None:
        context.scaler.update(overflow=bool(nonfinite_at))
    if nonfinite_at:
        why = f"NaN or infinity in the gradient of {nonfinite_at}"
        if not context.options.may_skip:
            context.ledger.turn()
            hints = [
                "Look at that rank's batch, lower the learning rate, or open the runtime with nonfinite='skip'.",
                *(one.nonfinite_hint() for one in context.run.attachments),
            ]
            raise NonFiniteError(
                f"Expected finite gradients, got {why}. Nothing was updated. {' '.join(filter(None, hints))}"
            )
        units.end_residuals(updated=False, scale=context.loss_scale / used_scale)
        return _report(
            context, units, facts, updated=False, why=why, grad_norm=norm, norms=norms, loss_scale=used_scale
        )
    clip = 1.0 if context.options.clip_norm is None else clip_factor(norm, context.options.clip_norm)
    context.run.updates += 1
    with trace.span("update", update=context.run.updates), context.pace.updating():
        update_sections(context, sections, gradients, present=facts.present, rates=facts.rates, scale=grad_scale * clip)
    with context.ledger.stall("step"):
        refresh(context, sections)
    units.end_residuals(updated=True, scale=context.loss_scale / used_scale)
    return _report(
        context, units, facts, updated=True, grad_norm=norm, norms=norms, clipped=clip < 1.0, loss_scale=used_scale
    )


def _by_unit(units: Units, sums: list[Array]) -> dict[str, list[Array]]:
    """Return the sums of squares of every unit that was reduced, given those of all their sections in order."""
    each = iter(sums)
    return {
        unit.name: [next(each) for section in unit.sections if section.bucket is not None]
        for unit in units.values()
        if unit.reduced
    }


def _expect_all_micro_steps(context: Context, units: Units) -> None:
    """Raise if this rank lacks micro-steps of a unit: others may wait for their reductions, and are told.

    With several copies of the model, `reduced_alike` sees to it.
    """
    lacking = [unit for unit in units.values() if unit.lacks_micro_steps]
    if lacking and context.mesh.replicate is None:
        error = UnitStateError(lacking[0].gradient_trouble)
        context.complain(error)
        raise error


def _objection(context: Context, progress: Any) -> Exception | None:
    """Return what this rank has against keeping the step, with what its caller wants to be kept."""
    if context.options.last_step is not None:
        from zerort.engine.persist.last_step import objection

        return objection(context, progress=progress)
    if progress is not None:
        return CallError(
            "Expected progress where a step is kept, got some in a runtime that keeps none. "
            "zr.open(last_step=directory), or rt.save(path, progress=…)."
        )
    return None


def _report(
    context: Context,
    units: Units,
    facts: StepFacts,
    *,
    updated: bool,
    grad_norm: float,
    loss_scale: float,
    norms: UnitNorms | None = None,
    clipped: bool = False,
    why: str = "",
) -> StepReport:
    trainable = [name for state in units.states() for name in state.steps]
    digest = digest_of(context, units) if context.options.makes_digests else ""
    uncoded = dict(context.ledger.uncoded)
    moved, tiered, stalls = context.ledger.turn()
    context.run.stalls = stalls
    context.stopping.hear(facts.stop)
    return StepReport(
        update=context.run.updates,
        updated=updated,
        why=why,
        lr=rate_of(context, context.optimizer, update=max(context.run.updates, 1)),
        grad_norm=grad_norm,
        norms=norms or UnitNorms({}),
        clipped=clipped,
        loss_scale=loss_scale,
        weight=facts.weight.given,
        without_gradient=tuple(name for name in trainable if name not in facts.present),
        bytes_moved=moved,
        bytes_uncoded=uncoded,
        wire=_wire(context, units),
        state=", ".join(dict.fromkeys(f"{one.name} moments" for state in units.states() for one in state.formats)),
        frozen=", ".join(dict.fromkeys(one.parameters.rows.name for one in units.sections() if one.parameters.rows)),
        sparsity=_sparsity(units),
        rows=", ".join(f"lazy {one.layout.extents[0].name}" for one in units.sections() if one.is_lazy),
        bytes_tiered=tiered,
        stalls=stalls,
        slowest=facts.slowest,
        straggler=straggler_of(context, facts.slowest),
        stop=bool(facts.stop),
        digest=digest,
    )


def _sparsity(units: Units) -> dict[str, float]:
    """Return which share of each tensor's elements is pruned, of those that have a schedule."""
    return {
        name: count / max(state.layout.of(name).numel, 1)
        for state in units.states()
        for name, count in state.pruned.items()
    }


def _wire(context: Context, units: Units) -> str:
    """Return which formats values travel in."""
    copies = 1 if context.mesh.replicate is None else context.mesh.replicate.size
    if context.coding is None:
        is_asked = context.options.wire is not None and context.options.wire.reduce is not None
        return UNCODED_OVER_COPIES if is_asked and copies > 1 else ""
    sections = [section for section in units.sections() if section.table is None]
    tables = ", ".join(next(iter(section.names)) for section in units.sections() if section.table is not None)
    coded = context.coding.describe(
        gathered={section.layout.dtype for section in sections},
        reduced={section.bucket.layout.dtype for section in sections if section.bucket is not None},
        copies=copies,
        ties=any(section.tied_buckets for section in sections),
    )
    return "; ".join(filter(None, [coded, f"rows of {tables} travel uncoded" * bool(tables)]))
