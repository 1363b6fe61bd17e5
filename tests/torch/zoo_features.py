"""Features of modules, one small body each: called with (rows, 6, 8), answered with anything of as many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 8, 6


class Body(nn.Module):
    """Parts, and a function of them and the input."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self._call(self, x)


def ids(x: torch.Tensor) -> torch.Tensor:
    """Return integers below 10 that are made of the input."""
    return (x.abs() * 10).long() % 10


def linear(**settings: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **settings)


def _first(found: Any) -> Any:
    return found[0]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return 2 * grad * w, (2 * grad * x).sum_to_size(w.shape)


class Counting(nn.Module):
    """Has a buffer that changes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = linear()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.line(x) / (1 + self.calls)


def _frozen() -> nn.Module:
    body = nn.Sequential(linear(), nn.Tanh(), linear())
    body[0].requires_grad_(False)
    return body


def _tied() -> nn.Module:
    body = Body(lambda m, x: m.b(torch.tanh(m.a(x))), a=linear(bias=False), b=linear(bias=False))
    body.b.weight = body.a.weight
    return body


def _hooked() -> nn.Module:
    body = nn.Sequential(linear(), linear())
    body[0].register_forward_hook(lambda module, args, out: out * 2)
    body[1].register_full_backward_hook(lambda module, grad_in, grad_out: tuple(3 * one for one in grad_in))
    return body


def _cells() -> nn.Module:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), WIDTH)
        for at in range(x.shape[1]):
            h = m.cell(x[:, at], h)
        return h

    return Body(call, cell=nn.GRUCell(WIDTH, WIDTH))


def _masked() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    return Body(lambda m, x: m.layer(x, x, tgt_mask=mask.to(x)), layer=layer)


def _transposed() -> nn.Module:
    return Body(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(WIDTH, WIDTH).t()))


def _last() -> nn.Module:
    return Body(lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last))


FEATURES: dict[str, Callable[[], nn.Module]] = {
    "Linear without bias": lambda: linear(bias=False),
    "Bilinear": lambda: Body(lambda m, x: m.two(x, x), two=nn.Bilinear(WIDTH, WIDTH, 4)),
    "Conv1d": lambda: nn.Conv1d(LENGTH, 4, 3),
    "Conv2d, groups": lambda: Body(
        lambda m, x: m.conv(x[:, None].repeat(1, 2, 1, 1)), conv=nn.Conv2d(2, 4, 3, groups=2)
    ),
    "Conv2d, channels last": _last,
    "Conv3d": lambda: Body(lambda m, x: m.conv(x.view(-1, 1, 3, 4, 4)), conv=nn.Conv3d(1, 2, 2)),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(LENGTH, 4, 3, stride=2),
    "Embedding, padding_idx": lambda: Body(lambda m, x: m.table(ids(x)), table=nn.Embedding(10, 4, padding_idx=0)),
    "EmbeddingBag": lambda: Body(lambda m, x: m.bag(ids(x).flatten(1)), bag=nn.EmbeddingBag(10, 4)),
    "LSTM, two layers, bidirectional": lambda: Body(
        lambda m, x: _first(m.rnn(x)), rnn=nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True)
    ),
    "LSTM, projected": lambda: Body(
        lambda m, x: _first(m.rnn(x)), rnn=nn.LSTM(WIDTH, 6, batch_first=True, proj_size=3)
    ),
    "GRU": lambda: Body(lambda m, x: _first(m.rnn(x)), rnn=nn.GRU(WIDTH, 4, batch_first=True)),
    "RNN, ReLU": lambda: Body(
        lambda m, x: _first(m.rnn(x)), rnn=nn.RNN(WIDTH, 4, batch_first=True, nonlinearity="relu")
    ),
    "GRUCell in a loop": _cells,
    "MultiheadAttention": lambda: Body(
        lambda m, x: _first(m.mha(x, x, x)), mha=nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "MultiheadAttention, kdim and vdim": lambda: Body(
        lambda m, x: _first(m.mha(x, x[..., :4], x[..., :2])),
        mha=nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=2, batch_first=True),
    ),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    "TransformerDecoderLayer, causal mask": _masked,
    "BatchNorm1d": lambda: nn.Sequential(nn.Conv1d(LENGTH, 4, 1, bias=False), nn.BatchNorm1d(4)),
    "GroupNorm": lambda: nn.Sequential(nn.Conv1d(LENGTH, 4, 1), nn.GroupNorm(2, 4)),
    "InstanceNorm1d, affine, tracked": lambda: nn.Sequential(
        nn.Conv1d(LENGTH, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    ),
    "LayerNorm": lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH)),
    "RMSNorm": lambda: nn.Sequential(linear(), nn.RMSNorm(WIDTH)),
    "PReLU": lambda: nn.Sequential(linear(), nn.PReLU(LENGTH)),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.Tanh()),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear()), nn.Tanh()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "ParameterList": lambda: Body(
        lambda m, x: sum(x @ w for w in m.ws), ws=nn.ParameterList(torch.randn(WIDTH, 4) for _ in range(3))
    ),
    "ParameterDict": lambda: Body(
        lambda m, x: x @ m.ws["a"] + m.ws["b"], ws=nn.ParameterDict({"a": torch.randn(WIDTH, 4), "b": torch.randn(4)})
    ),
    "ModuleDict": lambda: Body(
        lambda m, x: m.parts["b"](m.parts["a"](x)), parts=nn.ModuleDict({"a": linear(), "b": linear()})
    ),
    "a parameter of no dimensions": lambda: Body(
        lambda m, x: m.line(x) * m.scale, line=linear(), scale=nn.Parameter(torch.tensor(1.5))
    ),
    "a parameter without elements": lambda: Body(
        lambda m, x: m.line(x) + m.none.sum(), line=linear(), none=nn.Parameter(torch.empty(0, 3))
    ),
    "a transposed parameter": _transposed,
    "einsum of a parameter": lambda: Body(
        lambda m, x: torch.einsum("nld,dk->nlk", x, m.w), w=nn.Parameter(torch.randn(WIDTH, 4))
    ),
    "tied weights": _tied,
    "one module called twice": lambda: Body(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear()),
    "another module's weight": lambda: Body(lambda m, x: F.linear(m.a(x), m.a.weight.t()), a=linear()),
    "frozen parameters": _frozen,
    "an unused parameter": lambda: Body(lambda m, x: m.a(x), a=linear(), b=linear()),
    "a buffer that changes": Counting,
    "checkpoint": lambda: Body(
        lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=False), a=linear(), b=nn.Sequential(linear(), nn.Tanh())
    ),
    "checkpoint, reentrant": lambda: Body(
        lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=True), a=linear(), b=nn.Sequential(linear(), nn.Tanh())
    ),
    "autograd.Function": lambda: Body(
        lambda m, x: Doubling.apply(m.a(x), m.w), a=linear(), w=nn.Parameter(torch.randn(WIDTH))
    ),
    "in-place operations": lambda: Body(lambda m, x: m.a(x).mul_(2).add_(1).relu_(), a=linear()),
    "hooks of the user's own": _hooked,
    "AdaptiveLogSoftmaxWithLoss": lambda: Body(
        lambda m, x: m.soft(x.mean(1), ids(x)[:, 0, 0])[0][:, None],
        soft=nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 10, [4, 7]),
    ),
}
