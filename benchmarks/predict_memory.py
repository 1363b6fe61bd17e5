"""Predict the memory of steps at a batch size and under a plan that were not run, and compare it with what they take.

    python benchmarks/predict_memory.py                          # six small models, two ranks each
    python benchmarks/predict_memory.py --models gpt2 lstm --ranks 3

Each model is trained under ZeRO-1 with two batch sizes, in jobs of their own, which leave their peaks in one history.
Then a larger batch under ZeRO-3 is predicted from that, and run. Models are built from configs: nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zerort as zr
import zerort_torch as zt
from zerort.config import format_bytes
from zerort.testing import run_job

WIDTH, TOKENS, WORDS, PIXELS = 192, 64, 4000, 64
SEEN, ASKED = ((1, 4), (1, 8)), (3, 16)  # (ZeRO stage, samples per rank)
STEPS = 5

Loss = Callable[[int], torch.Tensor]


def main() -> None:
    """Start the jobs, show the table; or be one of their ranks."""
    options = parse()
    if options.worker:
        train(options)
        return
    print(f"{'model':8} {'parameters':>11} {'predicted':>11} {'interval':>23} {'measured':>11} {'off by':>7}")
    worst = 0.0
    for name in options.models:
        with tempfile.TemporaryDirectory() as directory:
            worst = max(worst, abs(compare(name, Path(directory), options.ranks)))
    print(f"largest error {worst:.1%} (ZeRO-{ASKED[0]}, {ASKED[1]} samples; seen: {SEEN} of (stage, samples))")


def compare(name: str, directory: Path, ranks: int) -> float:
    """Run what is seen, predict, run what was asked; show both. Return how far off the prediction is."""
    history, told = directory / "peaks.jsonl", directory / "predicted.json"
    for stage, batch in SEEN:
        run(ranks, name, stage, batch, history, told)  # the last one predicts from all
    predicted = json.loads(told.read_text())
    measured_in = directory / "measured.jsonl"
    run(ranks, name, *ASKED, measured_in)
    lines = [json.loads(line) for line in measured_in.read_text().splitlines()]
    measured = max(one["layout"] + one["besides"] for one in lines)
    off: float = predicted["bytes"][1] / measured - 1
    low, likely, high, there = (format_bytes(one) for one in (*predicted["bytes"], measured))
    interval = f"{low} to {high}"
    print(f"{name:8} {predicted['numel']:11,} {likely:>11} {interval:>23} {there:>11} {off:+7.1%}", flush=True)
    return off


def run(ranks: int, name: str, stage: int, batch: int, history: Path, told: Path | None = None) -> None:
    """Train in a job of its own, which leaves its peaks in ``history``, and a prediction in ``told``."""
    words = [__file__, "--worker", name, "--stage", str(stage), "--batch", str(batch), "--history", str(history)]
    result = run_job(ranks, [*words, *(["--told", str(told)] if told else [])], timeout=300)
    if result.code:
        raise SystemExit(result.output)


def train(options: argparse.Namespace) -> None:
    """Train for some steps; on rank 0, write what is predicted."""
    torch.manual_seed(0)
    model, loss_of = MODELS[options.worker]()
    numel = sum(one.numel() for one in model.parameters())
    plan = zr.Plan.zero(options.stage)
    with zr.open(plan=plan, optimizer=zr.AdamW(lr=1e-4), history=options.history) as rt:
        model = zt.shard(model, rt)
        loss = loss_of(model)
        for _ in range(STEPS):
            loss(options.batch).backward()
            rt.step(weight=options.batch)
        if options.told:
            seen = rt.predict(batch=ASKED[1], plan=zr.Plan.zero(ASKED[0]))
            if rt.rank == 0:
                facts = {"bytes": [seen.low, seen.likely, seen.high], "numel": numel}
                Path(options.told).write_text(json.dumps(facts))


# -- the models, each with a function from the number of samples to a loss --------------------------------------------


def _tokens(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(0, WORDS, (count, TOKENS)))


def _pixels(count: int) -> torch.Tensor:
    return torch.randn(count, 3, PIXELS, PIXELS)


def _gpt2() -> tuple[torch.nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=WIDTH, n_layer=6, n_head=4))
    return model, lambda sharded: lambda count: sharded(_tokens(count), labels=_tokens(count)).loss * count


def _llama() -> tuple[torch.nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(
        config
    ), lambda sharded: lambda count: sharded(_tokens(count), labels=_tokens(count)).loss * count


def _t5() -> tuple[torch.nn.Module, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=48,
            d_ff=4 * WIDTH,
            num_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )
    return model, lambda sharded: lambda count: sharded(_tokens(count), labels=_tokens(count)).loss * count


class _Residual(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(8, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(inner)))


def _resnet() -> tuple[torch.nn.Module, Any]:
    width = 96
    stem = [torch.nn.Conv2d(3, width, 7, stride=4, padding=3), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 100)]
    model = torch.nn.Sequential(*stem, *(_Residual(width) for _ in range(6)), *head)
    return model, lambda sharded: lambda count: sharded(_pixels(count)).logsumexp(1).sum()


def _vit() -> tuple[torch.nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=8,
        num_labels=100,
    )
    return ViTForImageClassification(
        config
    ), lambda sharded: lambda count: sharded(_pixels(count)).logits.logsumexp(1).sum()


class _Lstm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(2 * WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens))[0])


def _lstm() -> tuple[torch.nn.Module, Any]:
    def loss(sharded: torch.nn.Module, count: int) -> torch.Tensor:
        found = sharded(_tokens(count))
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), _tokens(count).flatten()) * count

    return _Lstm(), lambda sharded: lambda count: loss(sharded, count)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Callable[[torch.nn.Module], Loss]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "resnet": _resnet,
    "vit": _vit,
    "lstm": _lstm,
}


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    for name in ("worker", "history", "told"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("stage", "batch"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
