"""DeepSpeed, ZeRO stage 3, with its own CPU AdamW: the first run compiles that, which takes a minute or three.

A compilation that was killed leaves a lock in ~/.cache/torch_extensions, and every later run waits for it in silence:
delete that directory.
"""

from __future__ import annotations

import os

from peers.gloo import set_environment
from peers.work import ADAMW, Running, Work


def build(work: Work) -> Running:
    set_environment(work)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from torch import distributed as dist

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    settings = {
        "train_micro_batch_size_per_gpu": work.config.rows,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": work.clip or 0.0,  # it would clip to 1.0 if this were not said
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=work.model(), config=settings)

    def step(at: int) -> float:
        loss = engine(*work.batch(at))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Running(step, meet=dist.barrier, close=lambda: None)  # closing it aborts a rank now and then
