"""The zoo: models and modules that are trained sharded and plain, as one table of cases.

``python tests/torch/zoo.py`` writes the table into ``docs/torch-support.md``; a test holds the two together.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo_features import FEATURES, LENGTH, WIDTH, Body, ids, linear
from zoo_models import MODELS, Batch, images, tokens

__all__ = ["CASES", "Case", "table"]

DOCS = Path(__file__).parents[2] / "docs" / "torch-support.md"
BEGIN, END = "<!-- zoo: written by tests/torch/zoo.py -->", "<!-- end of zoo -->"


@dataclass(frozen=True, slots=True)
class Case:
    """A model or module, and what becomes of it."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Batch
    """Gives the arguments of forward for so many rows."""
    generates: bool = False
    """Whether ``generate`` is compared, too."""
    needs: str = "torch"
    """What has to be installed."""
    refused: str = ""
    """What the error says, if it is refused: a regular expression."""
    cure: str = ""

    @property
    def missing(self) -> str:
        """What is not installed, if anything is."""
        return "" if importlib.util.find_spec(self.needs) is not None else self.needs

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


class Judged(nn.Module):
    """A body with a loss: the mean square of what it says of each row, beside a target."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(next(one.dtype for one in self.body.parameters() if one.is_floating_point()))
        found = self.body(x)
        assert isinstance(found, torch.Tensor)
        return (found.flatten(1).mean(1) - y.to(found.dtype)).square().mean()


def rows(count: int, random: torch.Generator) -> dict[str, Any]:
    return {
        "x": torch.randn(count, LENGTH, WIDTH, generator=random, dtype=torch.float64),
        "y": torch.randn(count, generator=random, dtype=torch.float64),
    }


def _feature(name: str, build: Callable[[], nn.Module], **fields: Any) -> Case:
    return Case(name, "module", lambda: Judged(build()), rows, **fields)


def _scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(linear()), nn.Tanh())


def _timm() -> nn.Module:
    import timm

    model = timm.create_model("resnet10t", num_classes=5)
    return Body(lambda m, x: m.net(x), net=model)


def _peft() -> nn.Module:
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(MODELS["Llama"][1](), settings)


CASES: list[Case] = [
    *(
        Case(name, kind, build, batch, generates, needs="transformers")
        for name, (kind, build, batch, generates) in MODELS.items()
    ),
    Case("timm ResNet", "vision", _timm, images, needs="timm"),
    Case("peft LoRA over Llama", "adapter", _peft, tokens, needs="peft"),
    *(_feature(name, build) for name, build in FEATURES.items()),
    _feature(
        "Embedding, max_norm",
        lambda: Body(lambda m, x: m.table(ids(x)), table=nn.Embedding(10, 4, max_norm=0.1)),
        refused="write=True",
        cure="rescale after `rt.step()`, with `zt.gathered(module, write=True)`",
    ),
    _feature(
        "complex parameters",
        lambda: Body(
            lambda m, x: m.a(x) * m.w.abs(), a=linear(), w=nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
        ),
        refused="complex",
        cure="`torch.view_as_real`",
    ),
    _feature(
        "lazy modules before their first forward",
        lambda: Body(lambda m, x: m.a(m.lazy(x)), a=linear(), lazy=nn.LazyLinear(WIDTH)),
        refused="lazy|first forward",
        cure="one forward on a small batch first",
    ),
    _feature("scripted submodules", _scripted, refused="script", cure="shard what they were made from"),
]


def table() -> str:
    """Return the table as the docs have it."""
    lines = ["| model or module | kind | | cure |", "|---|---|---|---|"]
    for case in CASES:
        how = "refused" if case.refused else "works, `generate()` too" if case.generates else "works"
        note = case.cure or (f"tested where {case.needs} is installed" if case.needs in ("timm", "peft") else "")
        lines.append(f"| {case.name} | {case.kind} | {how} | {note} |")
    return "\n".join([BEGIN, *lines, END])


def written() -> str:
    """Return the guide with the table of today in it."""
    text = DOCS.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return before + table() + after


if __name__ == "__main__":
    DOCS.write_text(written())
    sys.stdout.write(f"{len(CASES)} cases written to {DOCS}\n")
