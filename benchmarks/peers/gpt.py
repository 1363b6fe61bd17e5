"""The model: a plain pre-norm GPT, as anybody would write it. It knows nothing of any method."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as fn

from peers.work import SEED, Config


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, context, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(rows, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, context, width))
        return x + self.fc2(fn.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """Embeddings, blocks, a norm and an untied head. Called with tokens and what follows them, it returns the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.lnf = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                if param.dim() > 1:
                    param.normal_(0, 0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return fn.cross_entropy(self.head(self.lnf(h)).flatten(0, 1), y.flatten())
