"""DistributedDataParallel over gloo, with gradients as views of its buckets (its lean form) and fused AdamW."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peers.gloo import open_gloo
from peers.work import ADAMW, Running, Work


def build(work: Work) -> Running:
    open_gloo(work)
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(at: int) -> float:
        loss = model(*work.batch(at))
        loss.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Running(step, meet=dist.barrier, close=dist.destroy_process_group)
