"""FSDP2: `fully_shard` per block and for the rest, resharded after forward (ZeRO-3), over gloo, with fused AdamW."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peers.gloo import open_gloo
from peers.work import ADAMW, Running, Work


def build(work: Work, *, compiled: bool = False) -> Running:
    open_gloo(work)
    mesh = init_device_mesh("cpu", (work.ranks,))
    model = work.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if compiled:
        model.compile()
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
