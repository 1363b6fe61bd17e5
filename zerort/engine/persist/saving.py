"""`save` and `load`: a runtime's checkpoints, of what is in memory and of what rests on a disk.

`snapshot.py` says what a checkpoint holds; here is when it may be taken, and what a failure leaves.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerort import checkpoint
from zerort.checkpoint.failure import with_progress_watch
from zerort.comm.agreement import gather_json, raise_together
from zerort.engine.persist import snapshot
from zerort.engine.report import Restored
from zerort.errors import CheckpointError

if TYPE_CHECKING:
    from zerort.engine.runtime import Runtime

__all__ = ["load", "save"]


def save(rt: Runtime, path: str | Path, *, progress: Any) -> Path:
    """Write a checkpoint; see `Runtime.save`. Every rank calls this."""
    where: Path | None = None
    error: Exception | None = None
    try:
        where, progress = Path(path), checkpoint.as_json(progress, what="progress")
    except Exception as caught:
        error = caught
    error = error or rt.tiers.settle()
    raise_together(rt.world, error, name="save")
    assert where is not None
    rt.wait_for_gathers()
    _wait_for_caller(rt)
    values = [snapshot.over_world(rt, value) for value in snapshot.values_of(rt)]
    kept = None if rt.options.last_step is None else os.fspath(rt.options.last_step)
    lease = rt.lease if rt.lease is not None and os.path.realpath(where) == os.path.realpath(kept or "") else None
    checkpoint.save(where, rt.world, values, meta=snapshot.meta_of(rt), progress=progress, kept=kept, lease=lease)
    return where


def load(rt: Runtime, path: str | Path, *, optimizer: bool, strict: bool) -> Restored:
    """Read a checkpoint; see `Runtime.load`. Every rank calls this."""
    error: Exception | None = None
    manifest = with_progress_watch(
        rt.world, lambda: checkpoint.read_manifest(path), path=str(path), name="load manifest"
    )
    try:
        rt.tiers.settle()  # well or not: what failed is made anew
        snapshot.check_loadable(rt, manifest, optimizer=optimizer)
    except Exception as caught:
        error = caught
    raise_together(rt.world, error, name="load")
    rt.discard_gradients()
    rt.wait_for_gathers()
    _wait_for_caller(rt)
    with rt.tiers.tearing("a load", state=optimizer, begun=False) as change:
        try:
            if rt.tiers.is_torn:
                change.begin()
                snapshot.renew(rt)
            values = list(snapshot.values_of(rt, optimizer=optimizer, loading=True))
            manifest = checkpoint.load(
                path,
                rt.mesh.shard,
                values,
                manifest=manifest,
                check=lambda found: snapshot.check_loadable(rt, found, optimizer=optimizer),
                strict=strict,
                on_read=change.begin,
            )
        except Exception as caught:
            error = caught
        # The other copies of the model read for themselves. What one of them has changed is torn for all, and so is
        # what they have read of different checkpoints: somebody saved there meanwhile.
        told = gather_json(rt.world, [change.begun, manifest.digest], name="load")
        change.begun = any(begun for begun, _ in told)
        if error is None and any(digest != manifest.digest for _, digest in told):
            error = CheckpointError(
                f"Expected all copies of the model to load one checkpoint, got several at {path}: it was replaced "
                "while they read it. Load again."
            )
        raise_together(rt.world, error, name="load")
        snapshot.spread_loaded(rt, optimizer=optimizer)
        for one in rt.attachments:
            one.take_loaded()
        if optimizer:
            snapshot.restore_meta(rt, manifest)
    rt.tiers.mend()
    if optimizer:
        rt.is_new = False  # parameters alone are where a run begins, not where one goes on
    every = tuple(manifest.progress)
    mine = every[rt.rank] if rt.rank < len(every) else every[0]
    return Restored(updates=snapshot.updates_of(manifest), progress=mine, every_progress=every)


def _wait_for_caller(rt: Runtime) -> None:
    """Wait for what the caller has put onto its stream: values are copied by threads that are on other streams."""
    rt.device.settle()  # gpu-wait: a_checkpoint_is_of_what_was_written
