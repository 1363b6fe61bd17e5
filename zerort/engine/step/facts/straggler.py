"""`straggler_of`: a rank that stays slow, with its host and device: in report and trace, and once as a warning."""

from __future__ import annotations

import socket
import time
import warnings

from zerort import trace
from zerort.comm.agreed import gather_json
from zerort.engine.context import Context
from zerort.engine.report import Slowest

__all__ = ["straggler_of"]


def straggler_of(context: Context, slowest: Slowest | None) -> str:
    """Return which rank stays slow, as a phrase; empty if none does. Every rank calls this, with the same facts.

    The ranks exchange where they run when one is named, and not before.
    """
    named, run = context.pace.named, context.run
    if named is None or slowest is None:
        run.straggler = None
        return ""
    if run.straggler is None or run.straggler[0] != named:
        places = gather_json(context.world, [socket.gethostname(), str(context.device.name)], name="straggler")
        host, device = places[named]
        text = f"rank {named} on {host} ({device})"
        run.straggler = named, text
        now = time.perf_counter_ns()
        trace.add_span(f"slow: {text}", track="main", begin_ns=now, end_ns=now, rank=named)
        if context.rank == 0:
            warnings.warn(
                f"Expected ranks of about one speed, got {text} with {slowest.seconds:.3g} s of its own in a step and "
                f"{slowest.others_seconds:.3g} s on the others, who wait for it. Look at that machine; or give it "
                'less: rt.rebalance("auto"), rt.take(order, shares=…).',
                RuntimeWarning,
                stacklevel=6,
            )
    return run.straggler[1]
