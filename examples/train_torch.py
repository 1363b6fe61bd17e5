"""Train a byte-level GPT in plain torch, sharded over ranks.

    python examples/train_torch.py                              # one process
    mpirun -n 2 python examples/train_torch.py --plan zero3     # two: each holds half of everything
    mpirun -n 2 python examples/train_torch.py --plan zero0     # the same training, with everything on both

The model knows nothing of ranks. `zt.shard(model, rt)` takes its parameters over: a block is whole only while it
computes, its gradients are summed into shards while the next block computes, and each rank updates what it owns. With
`--resume` it goes on where it was, under another plan or on another number of ranks if you like.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait

import argparse

try:
    import torch
    from torch import nn
    from torch.nn import functional as fn
except ModuleNotFoundError:
    raise SystemExit(
        "train_torch.py needs torch, which is not installed: pip install torch (a CPU build will do)"
    ) from None

import zerort as zr
import zerort_torch as zt
from common import PLANS, Screen, add_options, check_options, whole  # examples/common.py
from zerort import checkpoint
from zerort.workload import ByteText

CONTEXT, HEADS = 64, 4


def main() -> None:
    """Open a runtime, shard the model, train it."""
    options = parse()
    torch.manual_seed(0)  # all ranks make the same first values; each keeps its shard of them
    model = GPT(width=options.width, layers=options.layers).to(getattr(torch, options.dtype))
    text = ByteText(rows=options.batch, context=CONTEXT)
    if options.trace:
        zr.trace.enable()
    schedule = zr.warmup_cosine(options.lr, warmup=min(30, options.steps), total=options.steps)
    with zr.open(
        plan=PLANS[options.plan],
        optimizer=zr.AdamW(lr=schedule, betas=(0.9, 0.98), weight_decay=0.01),
        param_groups=[zr.ParameterGroup(("*.bias", "*norm*"), weight_decay=0.0)],
        clip_norm=1.0,
        gradient_dtype="float32",
        loss_scale=zr.LossScale() if options.dtype == "float16" else None,
    ) as rt:
        title = repr(model)
        model = zt.shard(model, rt)
        position = 0
        if options.resume and checkpoint.exists(options.resume):
            position = rt.load(options.resume).progress["position"]

        with Screen(rt, options, model=title, tokens=options.batch * CONTEXT, position=position) as screen:
            for step in range(position, options.steps):
                x, y = tokens(text, step, rt)
                loss = len(x) * rt.size / text.rows * model(x, y)  # a rank with fewer rows counts for less
                (loss * rt.loss_scale).backward()
                report = rt.step()
                screen.show(step + 1, loss.item(), report)
                last = report.stop or step + 1 == options.steps  # stop: Ctrl-C, SIGTERM or SIGUSR1, on any rank
                if options.save and ((step + 1) % options.save_every == 0 or last):
                    rt.save(options.save, progress={"position": step + 1})
                if report.stop:
                    break
        screen.summary()
        if options.sample:
            screen.say(f"it writes: {sample(model, prompt=b'    def ', length=options.sample)!r}")
        if options.trace and (path := rt.group.save_trace(options.trace)):
            screen.say(f"trace: {path} (open it in ui.perfetto.dev)")


class GPT(nn.Module):
    """A pre-norm transformer over bytes. Called with bytes and those that follow, it returns the loss in nats."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss, or without ``y`` the logits: (rows, bytes, 256)."""
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)).to(torch.promote_types(h.dtype, torch.float32))
        return logits if y is None else fn.cross_entropy(logits.flatten(0, 1), y.flatten())

    def __repr__(self) -> str:
        width, numel = self.embed.embedding_dim, sum(parameter.numel() for parameter in self.parameters())
        return f"GPT(width={width}, layers={len(self.blocks)}, context={CONTEXT}, heads={HEADS}: {numel:,} parameters)"


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return what the next block sees: (rows, bytes, width)."""
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.proj(fn.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.narrow(fn.gelu(self.wide(self.norm2(h))))


def tokens(text: ByteText, step: int, rt: zr.Runtime) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a step, and what follows: int64, (rows, CONTEXT)."""
    x, y = text.batch(step, rt.rank, of=rt.size)
    return torch.from_numpy(x).long(), torch.from_numpy(y).long()


@torch.no_grad()
def sample(model: nn.Module, *, prompt: bytes, length: int) -> str:
    """Let the model write. All ranks do the same: a gather needs all of them."""
    written, dice = list(prompt), torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = model(torch.tensor([written[-CONTEXT:]]))[0, -1]
        odds = torch.softmax(logits / 0.6, 0)  # cooler than 1: fewer slips
        written.append(int(torch.multinomial(odds, 1, generator=dice)))
    return bytes(written).decode(errors="replace")


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, steps=400, batch=32, lr=1e-2)
    parser.add_argument("--width", type=whole, default=64, help=f"a multiple of {HEADS} (default: %(default)s)")
    parser.add_argument("--layers", type=whole, default=2, help="blocks (default: %(default)s)")
    options = parser.parse_args()
    check_options(parser, options)
    if options.width % HEADS:
        parser.error(f"argument --width: expected a multiple of the {HEADS} heads, got {options.width}")
    return options


if __name__ == "__main__":
    main()
