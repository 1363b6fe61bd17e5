"""`take_step`: from every rank's gradients to updated parameters, or to the reason why not.

    agree     every rank's facts: trouble, tensors with gradients, the first NaN            one small all_gather
    settle    gradients arrive as the optimizer needs them                                  what the table says
    measure   the norm of all gradients, from sums over fixed blocks                        one small all_gather
    decide    update, or skip and say why; clip; unscale                                    the same on every rank
    update    kernels over this rank's shards
    publish   nobody reads parameters before all have written theirs                        a barrier, or an all_gather

Until `update` nothing has changed: whatever goes wrong before leaves parameters and state as they were (decision 0020).
"""

from __future__ import annotations

import math
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerort import native, trace
from zerort.buffer import unit_title
from zerort.comm.agreement import gather_json, raise_together
from zerort.engine.report import StepReport
from zerort.engine.residence.gradients import SummedGradient, measure
from zerort.engine.step.copies import reduced_alike
from zerort.engine.step.update import update_sections
from zerort.errors import CallError, NonFiniteError, StorageError, UnitStateError
from zerort.layout import Collective, Placement, transition
from zerort.optim import clip_factor, norm_of
from zerort.typing import Array

if TYPE_CHECKING:
    from zerort.engine.model.section import Section
    from zerort.engine.runtime import Runtime

__all__ = ["digest_of", "take_step"]


class _Facts(NamedTuple):
    """What the ranks agree on before anything moves."""

    present: set[str]
    """Tensors for which some rank has a gradient."""
    nonfinite: str
    """Where NaN or infinity was found, as a phrase; empty if nowhere."""
    rates: dict[int, float]
    """The learning rate of every optimizer in use, by its `id`."""
    stop: str
    """What asked a rank to stop, and which; empty if nothing did."""


def take_step(rt: Runtime, *, progress: Any) -> StepReport:
    """Do one step, and keep it if the runtime keeps its last one. Every rank calls this."""
    try:
        report = _walk(rt, progress)
    finally:
        rt.forget_gradients()
        rt.prefetcher.end_step()
    if rt.options.last_step is not None:
        from zerort.engine.persist.last_step import keep  # here: checkpoints take their time to import

        keep(rt, progress=progress)
    rt.world.standing.updates = rt.updates
    rt.stopping.tell()  # now that nothing keeps the report from the caller
    return report


def _walk(rt: Runtime, progress: Any) -> StepReport:
    rt.complete_attachments("step")
    with rt.ledger.stall("reduce"):
        is_alike = reduced_alike(rt)  # if not, the agreement says what is missing
        try:
            # Before anything else is said: a rank that could not reduce has complained there.
            if is_alike:
                rt.units.wait_for_reductions()
        except CallError as error:
            if rt.mesh.replicate is not None:  # the other copies have heard nothing yet
                rt.world.complain(str(error))
            raise
    with rt.ledger.stall("gather"):
        rt.wait_for_gathers()
    with rt.ledger.stall("step"):
        facts = _agree(rt, objection=_objection(rt, progress))
    rt.is_new = False
    if not facts.present:
        return _report(rt, facts, updated=False, why="no rank has a gradient", grad_norm=0.0, loss_scale=rt.loss_scale)
    sections = [
        section for unit in rt.units.values() if unit.reduced for section in unit.sections if section.bucket is not None
    ]
    with rt.ledger.stall("reduce"):
        gradients = [section.settle() for section in sections]
    with trace.span("measure"):
        norm, where = _measure(rt, sections, gradients)
    used_scale = rt.loss_scale
    grad_scale = 1.0 / (used_scale * rt.denominator)
    norm *= grad_scale
    why = facts.nonfinite or where
    if rt.scaler is not None:
        rt.scaler.update(overflow=bool(why))
    if why:
        why = f"NaN or infinity in the gradient of {why}"
        if rt.options.nonfinite == "raise" and rt.options.loss_scale is None:
            rt.ledger.turn()
            raise NonFiniteError(
                f"Expected finite gradients, got {why}. Nothing was updated. Look at that rank's batch, lower the "
                "learning rate, or open the runtime with nonfinite='skip'."
            )
        return _report(rt, facts, updated=False, why=why, grad_norm=norm, loss_scale=used_scale)
    clip = 1.0 if rt.options.clip_norm is None else clip_factor(norm, rt.options.clip_norm)
    rt.updates += 1
    with trace.span("update", update=rt.updates):
        update_sections(rt, sections, gradients, present=facts.present, rates=facts.rates, scale=grad_scale * clip)
    with rt.ledger.stall("step"):
        _publish(rt, sections)
    return _report(rt, facts, updated=True, grad_norm=norm, clipped=clip < 1.0, loss_scale=used_scale)


def _objection(rt: Runtime, progress: Any) -> Exception | None:
    """Return what this rank has against keeping the step, with what its caller wants to be kept."""
    if rt.options.last_step is not None:
        from zerort.engine.persist.last_step import objection

        return objection(rt, progress=progress)
    if progress is not None:
        return CallError(
            "Expected progress where a step is kept, got some in a runtime that keeps none. "
            "zr.open(last_step=directory), or rt.save(path, progress=…)."
        )
    return None


def _agree(rt: Runtime, *, objection: Exception | None) -> _Facts:
    units = list(rt.units.values())
    refused = next((section.storage_error for section in rt.units.trained_sections() if section.storage_error), None)
    refused = refused or rt.tiers.failure()
    trouble = next((unit.gradient_trouble for unit in units if unit.gradient_trouble), "")
    held = [unit.name for unit in units if unit.is_gathered]
    if held:
        trouble = (
            f"Expected all units released before step(), got {', '.join(held)} gathered. Leave their blocks first."
        )
    tensors: list[str] = []
    present: list[bool] = []
    first = -1
    for unit in units:
        for section in unit.sections:
            if section.bucket is None:
                continue
            nonfinite = section.bucket.nonfinite  # asked once: a GPU has to be waited for
            for extent in section.layout.extents:
                if extent.name == nonfinite and first < 0:
                    first = len(tensors)
                tensors.append(extent.name)
                present.append(extent.name in section.bucket.seen)
    if not trouble and not any(unit.reduced for unit in units):
        cure = "Call unit.reduce(gradients) first." if units else 'Register parameters first: rt.register("block0", …).'
        trouble = f"Expected gradients before step(), got none since the last one. {cure}"
    problem: Exception | None = UnitStateError(trouble) if trouble else refused
    rates, error = _rates(rt)
    problem = problem or error or objection
    head = [problem is not None, first, rt.stopping.number]
    mine = np.array([*head, *(unit.reduced for unit in units), *present], np.int64)
    mine = np.concatenate([np.array([*rates.values()], np.float64).view(np.int64), mine])
    everyone = rt.world.all_gather(mine, name="step").wait().reshape(rt.world.size, -1)
    rt.meetings += 1
    everyone, told = everyone[:, len(rates) :], everyone[:, : len(rates)]
    if everyone[:, 0].any():
        raise_together(rt.world, problem, name="step")
    if (told != told[0]).any():
        odd = int(np.flatnonzero((told != told[0]).any(1))[0])
        raise UnitStateError(
            f"Expected the same learning rates on every rank, got {told[0].view(np.float64)[:3]} on rank 0 and "
            f"{told[odd].view(np.float64)[:3]} on rank {odd}. A schedule may depend on the update alone."
        )
    reduced = everyone[:, len(head) : len(head) + len(units)]
    for unit, ranks in zip(units, reduced.T, strict=True):
        if 0 < ranks.sum() < rt.world.size:
            raise UnitStateError(
                f"Expected {unit_title(unit.name)} to be reduced on every rank or on none, got it on ranks "
                f"{', '.join(map(str, np.flatnonzero(ranks)))} only. Call unit.reduce({{}}) where it was not used."
            )
    found = everyone[:, len(head) + len(units) :].max(0, initial=0)
    where = ""
    for rank, index in enumerate(everyone[:, 1]):
        if index >= 0 and not where:
            where = f"{tensors[index]!r} on rank {rank}"
    stop = next((f"{Signals(number).name} on rank {rank}" for rank, number in enumerate(everyone[:, 2]) if number), "")
    return _Facts({name for name, here in zip(tensors, found, strict=True) if here}, where, rates, stop)


def _rates(rt: Runtime) -> tuple[dict[int, float], Exception | None]:
    """Return the next update's learning rate of every optimizer in use, and what a schedule raised."""
    optimizers = {id(one): one for state in rt.units.states() for one in state.optimizers}
    try:
        return {key: one.lr_at(rt.updates + 1) for key, one in optimizers.items()}, None
    except Exception as error:  # a schedule is the user's: nothing has changed yet, so all ranks can still stop
        return dict.fromkeys(optimizers, 0.0), error


def _measure(rt: Runtime, sections: list[Section], gradients: list[SummedGradient]) -> tuple[float, str]:
    """Return the norm of the summed gradients, and where they are not finite, as a phrase."""
    sums = measure(gradients, block=rt.setup.norm_block, device=rt.device)
    if rt.plan.state.placement is Placement.SHARDED and rt.mesh.shard.size > 1:
        sums = _gather_sums(rt, sections, sums)
    if rt.setup.norm_block is not None:  # the sums of padding go: how many there are depends on the number of ranks
        blocks = [-(-section.layout.end // rt.setup.norm_block) for section in sections]
        sums = [one[:count] for one, count in zip(sums, blocks, strict=True)]
    norm = norm_of(np.concatenate(sums)) if sums else 0.0
    if math.isfinite(norm):
        return norm, ""
    # Every rank's own gradients may be finite and their sum not: then only the owner of the sum knows where.
    mine = ""
    for section, gradient in zip(sections, gradients, strict=True):
        at = gradient.first_nonfinite()
        if at >= 0 and section.state is not None:
            first = section.state.owned.first + at
            mine = repr(section.layout.overlaps(first, first + 1)[0].extent.name)
            break
    named = [one for one in gather_json(rt.world, mine, name="nonfinite") if one]
    return norm, f"{named[0]}, summed over the ranks" if named else "some tensor"


def _gather_sums(rt: Runtime, sections: list[Section], sums: list[Array]) -> list[Array]:
    """Return every section's sums over all ranks, in the order of its elements, whoever computed them."""
    counts = [[_sums_of(rt, section, rank) for section in sections] for rank in range(rt.mesh.shard.size)]
    flat = rt.mesh.shard.all_gather(np.concatenate(sums), counts=[sum(row) for row in counts], name="norm").wait()
    parts: list[list[Array]] = [[] for _ in sections]
    cursor = 0
    for row in counts:
        for index, count in enumerate(row):
            parts[index].append(flat[cursor : cursor + count])
            cursor += count
    return [np.concatenate(part) for part in parts]


def _sums_of(rt: Runtime, section: Section, rank: int) -> int:
    """Return how many sums of squares ``rank`` has for ``section``."""
    block = rt.setup.norm_block
    return 1 if block is None else -(-section.partition.counts[rank] // block)


def _publish(rt: Runtime, sections: list[Section]) -> None:
    """Let every rank see what all of them have written."""
    if transition(rt.plan.state.placement, to=rt.plan.parameter.placement) is Collective.ALL_GATHER:
        for section in sections:
            section.parameters.changed()
            section.parameters.restore()  # travels while the next step begins; its first gather waits for it
    elif rt.plan.parameter.placement is Placement.SHARDED and rt.mesh.shard.one_memory:
        rt.mesh.shard.barrier(name="publish").wait()  # one for all units: their gathers need none any more


def digest_of(rt: Runtime) -> str:
    """Return a checksum of all parameters, the same for any number of ranks and any plan. Every rank calls this."""
    sections = list(rt.units.sections())
    mine: list[tuple[int, int]] = []
    error: StorageError | None
    rt.stage.finish()
    for section in sections:
        section.parameters.wait()  # a gather in place may write to this rank's range, too: the same values
    try:
        mine = [section.checksum() for section in sections]
        error = rt.tiers.failure()  # what was read may be what was there before a write that failed
    except StorageError as caught:
        error = caught
    raise_together(rt.world, error, name="digest")
    total = 0
    everyone = gather_json(rt.mesh.shard, mine, name="digest")
    for index in range(len(sections)):
        for rank in everyone:
            value, nbytes = rank[index]
            total = native.crc32c_combine(total, value, nbytes)
    return f"{total:08x}"


def _report(
    rt: Runtime,
    facts: _Facts,
    *,
    updated: bool,
    grad_norm: float,
    loss_scale: float,
    clipped: bool = False,
    why: str = "",
) -> StepReport:
    trainable = [name for state in rt.units.states() for name in state.steps]
    digest = digest_of(rt) if rt.options.deterministic else ""
    moved, tiered, stalls = rt.ledger.turn()
    rt.stopping.hear(facts.stop)
    return StepReport(
        update=rt.updates,
        updated=updated,
        why=why,
        lr=rt.optimizer.lr_at(max(rt.updates, 1)),
        grad_norm=grad_norm,
        clipped=clipped,
        loss_scale=loss_scale,
        without_gradient=tuple(name for name in trainable if name not in facts.present),
        bytes_moved=moved,
        bytes_tiered=tiered,
        stalls=stalls,
        stop=bool(facts.stop),
        digest=digest,
    )
