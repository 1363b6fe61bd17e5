"""zerort, with the plan of a ZeRO stage; optimizer state may rest on the disk of the current directory."""

from __future__ import annotations

import zerort as zr
import zerort_torch as zt
from peers.work import ADAMW, Running, Work


def build(work: Work, *, stage: int, nvme: bool = False, compiled: bool = False) -> Running:
    plan = zr.Plan.zero(stage, state=zr.Tier.NVME if nvme else zr.Tier.DEVICE)
    rt = zr.open(plan=plan, optimizer=zr.AdamW(**ADAMW), clip_norm=work.clip, scratch=".")
    model = zt.shard(work.model(), rt)
    if compiled:
        model.compile()

    def step(at: int) -> float:
        loss = model(*work.batch(at))
        loss.backward()
        rt.step()
        return loss.item()

    return Running(step, meet=lambda: rt.group.barrier().wait(), close=rt.close)
