"""`ByteModel`: a small transformer over bytes in plain NumPy, in units, with its backward written by hand.

A *unit* is what is gathered, computed and released together. The model keeps no parameters: each call is handed those
of one unit, so a sharded loop never needs more than one unit whole.

    bytes ──> embed ──> block0 ──> block1 ──> … ──> head ──> logits
                 B, T, width                                 │ loss
    grads <── embed <── block0 <── block1 <── … <── head <───┘

    embed    each byte with those just before it, and its place
    block    x + attention(norm(x)), then x + mlp(norm(x))
    head     norm, then a score for every byte that may come next

Everything is computed in the parameters' dtype (16-bit ones: in float32), in one matmul for all tokens. The same
arguments give the same bits. With CuPy's arrays as parameters it computes on the GPU, with the same lines: NumPy's
functions ask their arguments who computes (NEP 13 and 18), and what is new is made ``like=`` them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from zerort.optim.kernels import kernels_for
from zerort.typing import Array

__all__ = ["ByteModel"]

Params = Mapping[str, Array]
Grads = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]
Saved = tuple[Any, ...]

BYTES = 256
NEAR = 4
"""How many bytes the embedding sees: one and those before it. Attention then need only find what is further away."""
EPS = 1e-5


class ByteModel:
    """A causal transformer that guesses the next byte.

    Args:
        width: Features of a token.
        layers: How many blocks.
        context: The longest text it can look at, in bytes.
        heads: Attention heads; they share the width.

    >>> model = ByteModel(width=16, layers=1, context=8, heads=2)
    >>> model.units
    ('embed', 'block0', 'head')
    >>> x = np.zeros((1, 8), np.uint8)
    >>> for unit in model.units:
    ...     x, saved = model.forward(unit, model.init(unit), x)
    >>> x.shape
    (1, 8, 256)
    """

    def __init__(self, *, width: int = 64, layers: int = 2, context: int = 64, heads: int = 4) -> None:
        if min(width, layers, context, heads) < 1 or width % heads:
            raise ValueError(
                f"Expected positive sizes and a width that the heads can share, got width={width}, layers={layers}, "
                f"context={context}, heads={heads}."
            )
        self.width, self.layers, self.context, self.heads = width, layers, context, heads
        self._units: dict[str, _Unit] = {
            "embed": _Embed(width, context),
            **{f"block{at}": _Block(width, context, heads) for at in range(layers)},
            "head": _Head(width),
        }
        self.units: tuple[str, ...] = tuple(self._units)

    def __repr__(self) -> str:
        sizes = f"width={self.width}, layers={self.layers}, context={self.context}, heads={self.heads}"
        return f"ByteModel({sizes}: {self.numel:,} parameters)"

    @property
    def numel(self) -> int:
        """How many parameters all units have together."""
        return sum(math.prod(shape) for unit in self.units for shape in self.shapes(unit).values())

    def shapes(self, unit: str) -> Shapes:
        """Return the names and shapes of a unit's parameters: ``w_…`` matrices, ``b_…`` biases, ``norm_…`` gains."""
        return dict(self._units[unit].shapes)

    def init(self, unit: str, *, seed: int = 0) -> Grads:
        """Return a unit's first parameters, in float32; they depend on nothing but the seed and the unit."""
        rng = np.random.default_rng((seed, self.units.index(unit)))
        return {name: _first(name, shape, rng) for name, shape in self.shapes(unit).items()}

    def forward(self, unit: str, p: Params, x: Array) -> tuple[Array, Saved]:
        """Run one unit.

        Args:
            unit: Its name.
            p: Its parameters. They are only read, and none of them is kept.
            x: Bytes (B, T) for ``embed``, features (B, T, width) for the others; T is at most the context. NumPy's
                bytes are copied to where the parameters lie.

        Returns:
            What the next unit takes, and what `backward` needs.
        """
        return self._units[unit].forward(_computable(p), x)

    def loss(self, logits: Array, targets: Array, *, weight: float = 1.0) -> tuple[float, Array]:
        """Return ``weight`` times the mean cross-entropy, in nats, and its slope with respect to the logits.

        Give a rank the weight ``ranks * its rows / all rows``, and the average over ranks is the mean over all rows,
        however unevenly they are shared out. Without rows the loss is 0.
        """
        truth, tokens = np.asarray(targets, like=logits).reshape(-1), np.arange(targets.size, like=logits)
        scale = weight / max(targets.size, 1)
        slope = _softmax(logits.reshape(-1, BYTES).copy())
        loss = -scale * float(np.log(slope[tokens, truth] + 1e-30).sum(dtype=np.float64))
        slope[tokens, truth] -= 1
        slope *= scale
        return loss, slope.reshape(logits.shape)

    def backward(self, unit: str, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]:
        """Run one unit backwards.

        Args:
            unit: Its name.
            p: Its parameters, as in `forward`.
            saved: What `forward` gave.
            dy: The loss's slope with respect to what `forward` returned.

        Returns:
            The slope with respect to the unit's input (for ``embed``: to the features it made, for bytes have none),
            and to each of its parameters.
        """
        return self._units[unit].backward(_computable(p), saved, dy)


class _Unit(Protocol):
    """What the model asks of a unit: gradients come back under the names of the shapes."""

    shapes: Shapes

    def forward(self, p: Params, x: Array) -> tuple[Array, Saved]: ...

    def backward(self, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]: ...


class _Embed:
    """The sum of one row per near byte (each distance has a table of its own) and one for the place in the text."""

    def __init__(self, width: int, context: int) -> None:
        self.shapes: Shapes = {"near": (NEAR, BYTES, width), "place": (context, width)}

    def forward(self, p: Params, x: Array) -> tuple[Array, Saved]:
        x, tokens = np.asarray(x, like=p["near"]), x.shape[1]
        y = p["near"][0][x] + p["place"][:tokens]  # B, T, width
        for back in range(1, min(NEAR, tokens)):
            y[:, back:] += p["near"][back][x[:, :-back]]
        return y, (x,)

    def backward(self, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]:
        (x,) = saved
        tokens = x.shape[1]
        near, place = np.zeros_like(p["near"]), np.zeros_like(p["place"])
        place[:tokens] = dy.sum(0)
        # A table's row gathers the slopes of all tokens that used it: as a matmul, many times faster than `np.add.at`.
        used = np.zeros_like(dy, shape=(x.size, BYTES))  # B * T, 256
        used[np.arange(x.size, like=x), x.reshape(-1)] = 1
        d_near = dy.copy()
        for back in range(min(NEAR, tokens)):
            d_near[:, :back] = 0  # nothing stands so far before a row's beginning
            near[back] = used[: len(used) - back].T @ _rows(d_near)[back:]
        return dy, {"near": near, "place": place}


class _Block:
    """Attention, then an MLP with a squared ReLU; each reads the stream through a norm and adds to it."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        self.heads, self.scale = heads, 1 / math.sqrt(width // heads)
        self.shapes: Shapes = {
            "norm_1": (width,),
            "w_qkv": (width, 3 * width),
            "w_out": (width, width),
            "norm_2": (width,),
            "w_up": (width, 4 * width),
            "b_up": (4 * width,),
            "w_down": (4 * width, width),
            "b_down": (width,),
        }
        # T, T: a token sees itself and what came before.
        self.mask: Array = np.triu(np.full((context, context), -np.inf, np.float32), 1)

    def forward(self, p: Params, x: Array) -> tuple[Array, Saved]:
        tokens = x.shape[1]
        a, norm_1 = _norm(x, p["norm_1"])
        q, k, v = self._split(_rows(a) @ p["w_qkv"], x.shape)  # each B, heads, T, width / heads
        scores = q @ k.swapaxes(-1, -2)  # B, heads, T, T
        scores *= self.scale
        scores += np.asarray(self.mask[:tokens, :tokens], like=x)
        seen = _softmax(scores)
        heads = self._join(seen @ v)  # B * T, width
        x = x + (heads @ p["w_out"]).reshape(x.shape)

        m, norm_2 = _norm(x, p["norm_2"])
        up = _rows(m) @ p["w_up"]
        up += p["b_up"]
        np.maximum(up, 0, out=up)  # B * T, 4 * width
        down = np.square(up) @ p["w_down"]
        down += p["b_down"]
        return x + down.reshape(x.shape), (a, norm_1, q, k, v, seen, heads, m, norm_2, up)

    def backward(self, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]:
        a, norm_1, q, k, v, seen, heads, m, norm_2, up = saved
        g: Grads = {}

        d_down = _rows(dy)
        g["b_down"] = d_down.sum(0)
        g["w_down"] = np.square(up).T @ d_down
        d_up = d_down @ p["w_down"].T
        d_up *= up  # the slope of max(up, 0)² is 2 · max(up, 0)
        d_up *= 2
        g["b_up"] = d_up.sum(0)
        g["w_up"] = _rows(m).T @ d_up
        d_m, g["norm_2"] = _norm_backward(norm_2, p["norm_2"], (d_up @ p["w_up"].T).reshape(dy.shape))
        dy = dy + d_m

        d_out = _rows(dy)
        g["w_out"] = heads.T @ d_out
        (d_heads,) = self._split(d_out @ p["w_out"].T, dy.shape)
        d_v = seen.swapaxes(-1, -2) @ d_heads
        d_scores = _softmax_backward(seen, d_heads @ v.swapaxes(-1, -2))
        d_scores *= self.scale
        d_q, d_k = d_scores @ k, d_scores.swapaxes(-1, -2) @ q
        d_qkv = self._join(d_q, d_k, d_v)
        g["w_qkv"] = _rows(a).T @ d_qkv
        d_a, g["norm_1"] = _norm_backward(norm_1, p["norm_1"], (d_qkv @ p["w_qkv"].T).reshape(dy.shape))
        return dy + d_a, g

    def _split(self, rows: Array, shape: tuple[int, ...]) -> Array:
        """Return B * T, parts * width as parts, B, heads, T, width / heads (a view)."""
        batch, tokens, width = shape
        parts = rows.shape[1] // width
        return rows.reshape(batch, tokens, parts, self.heads, width // self.heads).transpose(2, 0, 3, 1, 4)

    def _join(self, *parts: Array) -> Array:
        """Undo `_split`."""
        batch, heads, tokens, size = parts[0].shape
        joined = np.stack([part.swapaxes(1, 2) for part in parts], axis=2)  # B, T, parts, heads, width / heads
        return joined.reshape(batch * tokens, len(parts) * heads * size)


class _Head:
    """A norm, and a score for every byte."""

    def __init__(self, width: int) -> None:
        self.shapes: Shapes = {"norm": (width,), "w_score": (width, BYTES), "b_score": (BYTES,)}

    def forward(self, p: Params, x: Array) -> tuple[Array, Saved]:
        h, norm = _norm(x, p["norm"])
        logits = _rows(h) @ p["w_score"]
        logits += p["b_score"]
        return logits.reshape(*x.shape[:-1], BYTES), (h, norm)

    def backward(self, p: Params, saved: Saved, dy: Array) -> tuple[Array, Grads]:
        h, norm = saved
        rows = _rows(dy)
        d_h, d_gain = _norm_backward(norm, p["norm"], (rows @ p["w_score"].T).reshape(h.shape))
        return d_h, {"norm": d_gain, "w_score": _rows(h).T @ rows, "b_score": rows.sum(0)}


def _norm(x: Array, gain: Array) -> tuple[Array, Saved]:
    """Scale every token to a mean square of one, then by the gains (RMSNorm)."""
    size = 1 / np.sqrt(np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1] + EPS)
    even = x * size
    return even * gain, (even, size)


def _norm_backward(saved: Saved, gain: Array, dy: Array) -> tuple[Array, Array]:
    even, size = saved
    d_gain = np.einsum("bti,bti->i", dy, even)
    dx = dy * gain
    dx -= even * (np.einsum("...i,...i->...", dx, even)[..., None] / even.shape[-1])
    dx *= size
    return dx, d_gain


def _softmax(x: Array) -> Array:
    """Turn scores into shares of one, in place, along the last axis."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


def _softmax_backward(y: Array, dy: Array) -> Array:
    dy -= np.einsum("...i,...i->...", dy, y)[..., None]
    dy *= y
    return dy


def _rows(x: Array) -> Array:
    """Return one row per token: a single large matmul is faster than one for each text."""
    return x.reshape(-1, x.shape[-1])


def _computable(p: Params) -> Params:
    """Return plain arrays; 16-bit ones in float32, for NumPy has no fast matmul for them."""
    plain = {name: np.asarray(value) if isinstance(value, np.ndarray) else value for name, value in p.items()}
    return {name: _wide(value) if value.itemsize < 4 else value for name, value in plain.items()}


def _wide(value: Array) -> Array:
    """Return a 16-bit array in float32. CuPy 13 cannot read bfloat16, our kernels can."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float32)
    wide = np.empty_like(value, dtype=np.float32)
    kernels_for(value).cast_into(wide.reshape(-1), value.reshape(-1))
    return wide


def _first(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return the first value of a parameter: gains 1, biases 0, others random and of a size that suits their use."""
    if name.startswith("norm"):
        return np.ones(shape, np.float32)
    if name.startswith("b_"):
        return np.zeros(shape, np.float32)
    small = {"near": 0.5, "place": 0.1}  # rows of a table are looked up, not multiplied
    scale = small.get(name) or 0.5 / math.sqrt(shape[0])
    return rng.standard_normal(shape, np.float32) * np.float32(scale)
