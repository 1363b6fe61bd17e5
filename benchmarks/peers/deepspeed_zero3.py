"""DeepSpeed, ZeRO stage 3, with its own CPU AdamW: the first run compiles that, which takes a minute or three.

Optimizer state may rest on the disk of the current directory; that needs libaio's headers (libaio-dev).
A compilation that was killed leaves a lock in ~/.cache/torch_extensions, and every later run waits for it in silence:
delete that directory.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from peers.gloo import set_environment
from peers.work import ADAMW, Running, Work

SCRATCH = ".deepspeed-nvme"


def build(work: Work, *, nvme: bool = False) -> Running:
    set_environment(work)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from torch import distributed as dist

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    zero: dict[str, Any] = {"stage": 3}
    if nvme:
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": os.path.abspath(SCRATCH),
            "buffer_count": 5,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    settings = {
        "train_micro_batch_size_per_gpu": work.config.rows,
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
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

    def close() -> None:  # of the files; closing the engine aborts a rank now and then
        shutil.rmtree(SCRATCH, ignore_errors=True)

    return Running(step, meet=dist.barrier, close=close)
