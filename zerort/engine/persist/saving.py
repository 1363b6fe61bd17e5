"""`save`, `load` and feeds: a runtime's checkpoints, of what is in memory and of what rests on a disk.

`snapshot.py` says what a checkpoint holds; here is when it may be taken, and what a failure leaves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerort import checkpoint
from zerort.checkpoint.failure import with_progress_watch
from zerort.comm.agreed import agreed, gather_json, raise_together
from zerort.engine.attachment import within
from zerort.engine.context import Context
from zerort.engine.model.gather import wait_for_gathers
from zerort.engine.model.units import Units
from zerort.engine.persist import snapshot
from zerort.engine.persist.recoded import Recoded
from zerort.engine.persist.residuals import Divided, LoadedResiduals, saved_residuals
from zerort.engine.report import Restored
from zerort.engine.step.discard import discard_gradients
from zerort.engine.stopping import unbroken
from zerort.errors import CheckpointError, StorageError, UnitStateError
from zerort.publish import Feed

__all__ = ["feed_of", "load", "save"]


def save(context: Context, units: Units, path: str | Path, *, progress: Any, compress: str | None = None) -> Path:
    """Write a checkpoint; see `Runtime.save`. Every rank calls this."""
    with agreed(context.world, "save"):
        where, progress = Path(path), checkpoint.as_json(progress, what="progress")
        context.update_stream.wait_written()
        context.update_stream.check_written()
        _expect_settled_residuals(context, units)
    wait_for_gathers(context, units.sections())  # frozen ones, too: what a gather makes of them may be saved
    _bring_up_to_date(context, units)
    _wait_for_caller(context)
    values = [
        *(snapshot.over_world(context, value) for value in snapshot.values_of(context, units)),
        *saved_residuals(context, units.sections()),
    ]
    kept = None if context.options.last_step is None else os.fspath(context.options.last_step)
    lease = (
        context.run.lease
        if context.run.lease is not None and os.path.realpath(where) == os.path.realpath(kept or "")
        else None
    )
    checkpoint.save(
        where,
        context.world,
        values,
        meta=snapshot.meta_of(context, units),
        progress=progress,
        kept=kept,
        lease=lease,
        compress=compress,
    )
    return where


def _expect_settled_residuals(context: Context, units: Units) -> None:
    """Refuse a checkpoint whose residuals have lost to gradients that no update has seen yet."""
    keeps = any(section.residual is not None for section in units.sections())
    if keeps and not context.options.may_skip and any(unit.has_gradients for unit in units.values()):
        raise UnitStateError(
            "Expected save() between steps with Wire(feedback=True), got gradients that no step has seen. Call "
            "rt.step() first."
        )


def load(context: Context, units: Units, path: str | Path, *, optimizer: bool, strict: bool) -> Restored:
    """Read a checkpoint; see `Runtime.load`. Every rank calls this."""
    error: Exception | None = None
    manifest = with_progress_watch(
        context.world, lambda: checkpoint.read_manifest(path), path=str(path), name="load manifest"
    )
    with agreed(context.world, "load"):
        context.update_stream.wait_written()  # well or not: what failed is made anew
        snapshot.check_loadable(context, units, manifest, optimizer=optimizer)
    discard_gradients(context, units)
    wait_for_gathers(context, units.sections())  # frozen ones, too: they are written to
    with context.guard.changing("a load", state=optimizer, begun=False) as change:
        try:
            if context.is_partially_updated:
                change.begin()
                snapshot.recreate(units)
            elif any(section.table is not None and section.tiers.streams for section in units.sections()):
                change.begin()
            if any(section.table is not None for section in units.sections()):
                with agreed(context.world, "load", catching=StorageError):  # one rank's disk may fail
                    snapshot.bring_up_to_date(units, restart=True)  # state, too, that is not loaded
            _wait_for_caller(context)
            meta = manifest.meta if optimizer else {}
            residuals = LoadedResiduals(context, units, senders=int(meta.get("senders", 0)))
            values = [*snapshot.values_of(context, units, optimizer=optimizer, loading=manifest), *residuals.values()]
            manifest = checkpoint.load(
                path,
                context.mesh.shard,
                values,
                manifest=manifest,
                check=lambda found: snapshot.check_loadable(context, units, found, optimizer=optimizer),
                strict=strict,
                on_read=change.begin,
            )
            for value in values:
                if isinstance(value.mine, Recoded):
                    value.mine.flush()
        except Exception as caught:
            error = caught
        # The other copies of the model read for themselves. A change that one of them has begun counts for all, and so
        # does a difference between the checkpoints that they have read: somebody saved there meanwhile.
        told = gather_json(context.world, [change.begun, manifest.digest], name="load")
        change.begun = any(begun for begun, _ in told)
        if error is None and any(digest != manifest.digest for _, digest in told):
            error = CheckpointError(
                f"Expected all copies of the model to load one checkpoint, got several at {path}: it was replaced "
                "while they read it. Load again."
            )
        raise_together(context.world, error, name="load")
        snapshot.spread_loaded(context, units, manifest, optimizer=optimizer)
        for one in context.run.attachments:
            one.take_loaded()
        if optimizer:
            snapshot.restore_meta(context, units, manifest)
        residuals.spread(Divided.of_meta(meta).scale_to(Divided.by_steps_of(context)) if meta else 1.0)
    context.guard.clear()
    context.update_stream.reset()
    if optimizer:
        context.run.is_new = False  # parameters alone are where a run begins, not where one goes on
    every = tuple(manifest.progress)
    mine = every[context.rank] if context.rank < len(every) else every[0]
    return Restored(updates=snapshot.updates_of(manifest), progress=mine, every_progress=every)


def feed_of(context: Context, units: Units, where: str | Path, *, dtype: str | None, full_every: int) -> Feed:
    """Return a feed of the model; see `Runtime.publish`. Every rank calls this."""

    def values() -> list[checkpoint.Value]:
        context.check_whole("publish")
        with agreed(context.world, "publish"):
            context.update_stream.wait_written()
            context.update_stream.check_written()
        wait_for_gathers(context, units.trained_sections())
        _bring_up_to_date(context, units)
        _wait_for_caller(context)
        return [snapshot.over_world(context, value) for value in snapshot.published_values(context, units)]

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with unbroken("push", context.mesh.groups), within(context.run.attachments):
            yield

    return Feed(
        where,
        context.world,
        values,
        updates=lambda: context.run.updates,
        dtype=dtype,
        full_every=full_every,
        around=around,
    )


def _bring_up_to_date(context: Context, units: Units) -> None:
    """Make up for updates that rows of tables have missed, on all ranks. Every rank calls this."""
    if any(section.table is not None for section in units.sections()):
        with (
            context.guard.changing("rows that were brought up to date"),
            agreed(context.world, "rows", catching=StorageError),
        ):
            snapshot.bring_up_to_date(units)


def _wait_for_caller(context: Context) -> None:
    """Wait for what the caller has put onto its stream: values are copied by threads that are on other streams."""
    context.device.synchronize()  # gpu-wait: a_checkpoint_is_of_what_was_written
