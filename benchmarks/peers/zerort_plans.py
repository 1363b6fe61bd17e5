"""zerort, with the plan of a ZeRO stage."""

from __future__ import annotations

import zerort as zr
import zerort_torch as zt
from peers.work import ADAMW, Running, Work


def build(work: Work, *, stage: int) -> Running:
    rt = zr.open(plan=zr.Plan.zero(stage), optimizer=zr.AdamW(**ADAMW), clip_norm=work.clip)
    model = zt.shard(work.model(), rt)

    def step(at: int) -> float:
        loss = model(*work.batch(at))
        loss.backward()
        rt.step()
        return loss.item()

    return Running(step, meet=lambda: rt.group.barrier().wait(), close=rt.close)
