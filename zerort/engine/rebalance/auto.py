"""`rebalance_auto`: shares and shards that follow what ranks have measured; see `Runtime.rebalance`.

measure    every rank's own times since the last change, and what its memories have left      a few small exchanges
decide     the same on every rank, from the same numbers (`decide`)
act        shares at once; shards are cut anew (`recut`)
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from zerort.comm import Group
from zerort.comm.agreed import agreed, expect_same, gather_json
from zerort.config import Tier
from zerort.device.host.memory import available_nbytes, left_of_limits
from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.engine.rebalance.deciding import Measured, Place, Situation, decide
from zerort.engine.rebalance.recut import check_between_steps
from zerort.engine.rebalance.room import columns_by_kind, width_of
from zerort.engine.report import Rebalanced
from zerort.engine.step.facts.pace import OwnTime
from zerort.errors import CallError, DeviceMemoryError, PlanError, StorageError
from zerort.layout import Placement
from zerort.storage.files.failures import free_nbytes
from zerort.storage.files.mounts import disk_of

__all__ = ["check_mode", "rebalance_auto"]

_IN_MEMORY: Final = 1e9
_ON_DISK: Final = 2e8
"""Bytes per second that shards are expected to move with, until some have."""


def check_mode(world: Group, mode: object, weights: object, payback_steps: object) -> object:
    """Return how `Runtime.rebalance` is to choose weights; None: they are given. Every rank calls this.

    Raises:
        CallError: Neither ``"auto"`` nor weights were given, or both, or weights with ``payback_steps``; on every rank.
    """
    is_given = not (isinstance(weights, tuple) and weights == ())
    with agreed(world, "rebalance"):
        if (mode is None) != is_given or mode not in (None, "auto"):
            both = f"{mode!r}{f' and shard_weights={weights!r}' * is_given}"
            raise CallError(
                f'Expected rt.rebalance("auto") or rt.rebalance(shard_weights=[…]), got '
                f"{'neither' if mode is None else both}."
            )
        if mode is None and payback_steps is not None:
            raise CallError(
                f'Expected payback_steps with rt.rebalance("auto") alone, got {payback_steps!r} with shard_weights=, '
                "which are cut whatever that costs."
            )
    expect_same(world, mode, what="the mode of rebalance", error=CallError)
    return mode


def rebalance_auto(
    context: Context, units: Units, *, payback_steps: int, cut: Callable[[Sequence[float]], Rebalanced]
) -> Rebalanced:
    """Choose shares and shards by what was measured, and have them. Every rank calls this.

    Args:
        context: What the runtime's parts share.
        units: All units.
        payback_steps: Within how many steps a move has to save what it costs.
        cut: Cuts shards anew.
    """
    with agreed(context.world, "rebalance"):
        if type(payback_steps) is not int or payback_steps < 1:
            raise CallError(f"Expected payback_steps to be an int of at least 1, got {payback_steps!r}.")
        check_between_steps(units)
    expect_same(context.world, payback_steps, what="payback_steps", error=CallError)
    now = _situation(context, units, payback_steps=payback_steps)
    decision = decide(now)
    run = context.run
    done = Rebalanced(changed=False, shard_weights=run.cut.weights, shares=run.shares, nbytes=0, seconds=0.0)
    if decision.shards is not None:
        with agreed(context.world, "rebalance"):
            context.update_stream.wait_written()
            context.update_stream.check_written()  # an update that was not written is no reason to keep shards
        before = [section.partition.counts for section in units.sections()]
        try:
            done = cut(decision.shards)
        except (DeviceMemoryError, PlanError, StorageError) as error:  # on every rank
            if before != [section.partition.counts for section in units.sections()]:  # in the middle: some have moved
                raise
            return replace(done, why=f"kept: {error}")
    changed = decision.shards is not None or decision.shares is not None
    if changed:
        if context.options.virtual_shards is None:
            run.shares = decision.shares or now.shares  # which would follow the new shards
        context.pace.restart()
    if decision.relieves:
        run.relieved = run.updates
    steps = (decision.seconds_now, decision.seconds_then) if decision.seconds_now else None
    return replace(done, changed=changed, shares=run.shares, step_seconds=steps, why=decision.why)


def _situation(context: Context, units: Units, *, payback_steps: int) -> Situation:
    """Return what all ranks have measured, and what their memories have left. Every rank calls this."""
    run, sections = context.run, list(units.sections())
    own: list[dict[str, Any]] = []
    with agreed(context.world, "rebalance"):
        own = [*_own_times(context.pace.times), _memory_left(context)]
    told = gather_json(context.world, own, name="rebalance")
    on_device = on_host = on_disk = device_most = host_most = disk_most = 0
    for section in sections:
        device, pinned, stored = (
            int(section.layout.numel * sum(width_of(one, section) for one in columns))
            for columns in columns_by_kind(context, section)
        )
        on_device, on_host, on_disk = on_device + device, on_host + pinned, on_disk + stored
        device_most, host_most = max(device_most, device), max(host_most, pinned)
        disk_most = max(disk_most, stored)
    if context.device.in_host_memory:
        on_host, host_most, on_device = on_host + on_device, max(host_most, device_most), 0
    every = [one[-1] for one in told]
    places = [
        Place(name=f"rank {rank}", ranks=(rank,), free=one["limit"], whole=on_host, largest=host_most)
        for rank, one in enumerate(every)
        if one["limit"] is not None
    ]
    places += [
        Place(name=f"the GPU of rank {rank}", ranks=(rank,), free=one["gpu"], whole=on_device, largest=device_most)
        for rank, one in enumerate(every)
        if on_device
    ]
    places += _together(every, "host", "available", "memory of {}", whole=on_host, largest=host_most)
    on_disks = _together(every, "disk", "disk free", "{}", whole=on_disk, largest=disk_most)
    places += [replace(one, keeps_old=context.options.last_step is not None) for one in on_disks]
    size = context.mesh.shard.size
    weights = run.cut.weights or (1.0,) * size
    shares = run.shares or (*weights,) * (context.world.size // size)
    is_sharded = context.plan.state.placement is Placement.SHARDED
    in_memory = not any(Tier.NVME in (one.tiers.parameter, one.tiers.state) for one in sections)
    return Situation(
        ranks=tuple(Measured(**one) for one, *_ in told),
        shares=_normal(shares),
        shards=_normal(weights),
        fixed_shares=_fixed_shares(context),
        fixed_shards="" if is_sharded else "the plan keeps state whole on every rank",
        places=tuple(one for one in places if one.whole),
        nbytes=on_device + on_host + on_disk,
        bytes_per_second=run.move_speed or (_IN_MEMORY if in_memory else _ON_DISK),
        payback_steps=payback_steps,
        since_relief=None if run.relieved is None else run.updates - run.relieved,
    )


def _own_times(times: Sequence[OwnTime]) -> list[dict[str, Any]]:
    """Return this rank's own times, for JSON: medians, which a few long steps do not change."""
    if not times:
        return [{"steps": 0, "compute": 0.0, "update": 0.0}]
    compute, update, samples = (np.array(one, np.float64) for one in zip(*times, strict=True))
    usual = float(np.median(compute))
    each = compute / np.maximum(samples, 1)  # an epoch's last batch is smaller, and faster
    deviation = 1.4826 * float(np.median(np.abs(each - np.median(each))))
    error = 1.2533 * deviation / math.sqrt(len(times)) / max(float(np.median(each)), 1e-12)
    taken = float(np.median(samples))
    if taken:
        usual = float(np.median(each)) * taken
    return [
        {
            "steps": len(times),
            "compute": usual,
            "update": float(np.median(update)),
            "error": error,
            "samples": taken,
        }
    ]


def _memory_left(context: Context) -> dict[str, Any]:
    """Return what the memories of this rank have left, for JSON."""
    directories = context.storage.directories
    free = {disk_of(one): free_nbytes(one) for one in directories if os.path.isdir(one)}
    has_disk = bool(free) and None not in free.values()
    return {
        "host": socket.gethostname(),
        "available": available_nbytes(),
        "limit": left_of_limits(),
        "gpu": None if context.device.in_host_memory else context.device.memory()[0],
        "disk": f"{' + '.join(directories)} on {socket.gethostname()}" if has_disk else None,
        "disk free": sum(filter(None, free.values())),
    }


def _together(
    every: Sequence[dict[str, Any]], whose: str, left: str, name: str, *, whole: int, largest: int
) -> list[Place]:
    """Return memories that several ranks share, by what they call them."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(every):
        if one[whose] is not None:
            ranks.setdefault(one[whose], []).append(rank)
    return [
        Place(
            name=name.format(key),
            ranks=tuple(of),
            free=min(every[rank][left] for rank in of),
            whole=whole,
            largest=largest,
        )
        for key, of in ranks.items()
    ]


def _fixed_shares(context: Context) -> str:
    """Return why shares of batches cannot change; empty if they can."""
    cursors = context.run.cursors.values()
    if context.options.virtual_shards is not None:
        return "with virtual_shards a rank takes whole leaves"
    if not cursors:
        return "no order is taken: rt.take(order)"
    if not all(cursor.follows for cursor in cursors):
        return "rt.take was given shares="
    if not context.run.is_weighted:
        return "steps have no weight=, by which uneven batches would count as even ones"
    return ""


def _normal(weights: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(weights)
    return tuple(float(one) / total for one in weights)
