"""The floor, and the reference for losses.

The floor is what no data-parallel method can beat: every rank trains a model of its own on its own batches, all at
once, and none waits for another. The reference is one process that takes all ranks' batches in turn and averages.
"""

from __future__ import annotations

import torch

from peers.work import ADAMW, Running, Work


def build(work: Work, *, everyone: bool = False) -> Running:
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    ranks = range(work.ranks) if everyone else [work.rank]

    def step(at: int) -> float:
        total = 0.0
        for rank in ranks:
            loss = model(*work.batch(at, rank)) / len(ranks)
            loss.backward()
            total += loss.item()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Running(step, meet=lambda: None, close=lambda: None)
