"""What every method trains: the same model, first values, batches and AdamW."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SEED = 1234
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP_NORM = 0.5  # below the norm of every step's gradient here, so that each is scaled


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a GPT and of a rank's batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    rows: int = 4
    """Of a batch, per rank."""


CONFIGS = {
    "gpt30m": Config(layers=8, width=512, heads=8, vocabulary=8192, context=128),  # 33.6M parameters, untied head
    "tiny": Config(layers=2, width=128, heads=4, vocabulary=512, context=32),
}


@dataclass(slots=True)
class Work:
    """What a method is asked to train, on this rank."""

    config: Config
    rank: int
    ranks: int
    clip: float | None = None
    """Scale gradients to this global norm."""
    model_seconds: float = field(default=0.0, init=False)
    """What making the model took: it is no part of a method's start-up."""

    def model(self) -> torch.nn.Module:
        """Return a fresh model, with the same values on every rank."""
        from peers.gpt import GPT

        began = time.perf_counter()
        model = GPT(self.config)
        self.model_seconds += time.perf_counter() - began
        return model

    def batch(self, step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's tokens of a step, and those that follow: 2 × int64, (rows, context).

        A stream that can be learned within ten steps, x' = (5 x + 17) mod 256 with 10 % noise: a method that
        computes something else shows.
        """
        import torch

        config = self.config
        rng = np.random.default_rng([SEED, step, self.rank if rank is None else rank])
        symbols = min(256, config.vocabulary)
        tokens = np.empty((config.rows, config.context + 1), np.int64)
        tokens[:, 0] = rng.integers(0, symbols, config.rows)
        noisy = rng.random((config.rows, config.context)) < 0.1
        noise = rng.integers(0, symbols, (config.rows, config.context))
        for at in range(config.context):
            tokens[:, at + 1] = np.where(noisy[:, at], noise[:, at], (5 * tokens[:, at] + 17) % symbols)
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())


@dataclass(frozen=True, slots=True)
class Running:
    """A method that is ready to train, on this rank."""

    step: Callable[[int], float]
    """Take the step of that number; return this rank's loss."""
    meet: Callable[[], None]
    """Wait for the other ranks."""
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table."""

    title: str
    module: str
    """Which file here has its ``build(work, **options) -> Running``."""
    needs: tuple[str, ...]
    """What has to be installed."""
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    """Scale gradients to this global norm, even if the other methods do not."""
    alone: bool = False
    """One process, whatever the number of ranks."""

    @property
    def missing(self) -> list[str]:
        """What is not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def build(self, work: Work) -> Running:
        """Make it ready, on this rank."""
        return importlib.import_module(f"peers.{self.module}").build(work, **self.options)


METHODS = {
    "single": Method("single processes", "single", ("torch",)),
    "ddp": Method("DDP, fused AdamW", "ddp", ("torch",)),
    "fsdp2": Method("FSDP2, fused AdamW", "fsdp2", ("torch",)),
    "fsdp2-compiled": Method("FSDP2, compiled", "fsdp2", ("torch",), {"compiled": True}),
    "deepspeed": Method("DeepSpeed ZeRO-3", "deepspeed_zero3", ("torch", "deepspeed")),
    **{
        f"zero{stage}": Method(f"zerort ZeRO-{stage}", "zerort_plans", ("torch", "zerort_torch"), {"stage": stage})
        for stage in range(4)
    },
    "deepspeed-nvme": Method(
        "DeepSpeed ZeRO-3, state on NVMe", "deepspeed_zero3", ("torch", "deepspeed"), {"nvme": True}
    ),
    "zero3-nvme": Method(
        "zerort ZeRO-3, state on NVMe", "zerort_plans", ("torch", "zerort_torch"), {"stage": 3, "nvme": True}
    ),
    "zero3-compiled": Method(
        "zerort ZeRO-3, compiled", "zerort_plans", ("torch", "zerort_torch"), {"stage": 3, "compiled": True}
    ),
    "zero3-clip": Method(
        "zerort ZeRO-3, clipped", "zerort_plans", ("torch", "zerort_torch"), {"stage": 3}, clip=CLIP_NORM
    ),
}
REFERENCE = Method("reference", "single", ("torch",), {"everyone": True}, alone=True)
