"""Adafactor: against the algorithm over whole tensors in float64, for any cut over ranks; and the pieces of a shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerort.errors import CallError
from zerort.optim import Adafactor, TensorPart
from zerort.optim.pieces import folded, pieces
from zerort.testing.tolerance import OVER_STEPS, rounding

SHAPES = [(7, 5), (21, 19), (1, 9), (9, 1), (3, 2, 4), (6,), (), (0, 4), (4, 0), (0,), (2, 3, 1, 2)]


def asked_for(round_: Generator, answer: np.ndarray | None) -> np.ndarray | None:
    try:
        return round_.send(answer)
    except StopIteration:
        return None


BOUND = rounding("float32", 12)
"""Of one update in float32: about 12 operations on each element, of sums that are made in float64."""


class Ranks:
    """Tensors cut over ranks, which update in lock step; every sum is taken over all of them."""

    def __init__(
        self, tensors: dict[str, np.ndarray], optimizer: Adafactor, cuts: list[list[int]], dtype: str = "float32"
    ) -> None:
        self.optimizer, self.tensors, self.dtype = optimizer, tensors, dtype
        self.ranges = {}
        for (name, tensor), of_tensor in zip(tensors.items(), cuts, strict=True):
            ends = [0, *sorted(min(cut, tensor.size) for cut in of_tensor), tensor.size]
            self.ranges[name] = list(itertools.pairwise(ends))
        self.size = len(cuts[0]) + 1
        self.params = {name: tensor.reshape(-1).astype(dtype) for name, tensor in tensors.items()}
        self.states = [
            {name: self.zeros(tensor.shape, *self.ranges[name][rank]) for name, tensor in tensors.items()}
            for rank in range(self.size)
        ]

    def zeros(self, shape: tuple[int, ...], first: int, end: int) -> dict[str, np.ndarray]:
        return {
            spec.name: np.zeros(end - first if spec.shape is None else spec.shape, spec.dtype)
            for spec in self.optimizer.states_in(self.dtype, shape)
        }

    def update(self, grads: dict[str, np.ndarray], step: int, *, lr: float, grad_scale: float = 1.0) -> list[int]:
        """Make an update on all ranks; return the lengths of the sums they asked for."""
        rounds = [
            self.optimizer.update_parts_(self.parts(rank, grads, step, lr, grad_scale)) for rank in range(self.size)
        ]
        asked: list[int] = []
        answer = None
        while True:
            said = [array for round_ in rounds if (array := asked_for(round_, answer)) is not None]
            if not said:
                return asked
            assert len(said) == self.size
            assert {(array.dtype.name, array.shape) for array in said} == {("float64", (said[0].size,))}
            asked.append(said[0].size)
            answer = np.sum(said, axis=0)

    def parts(self, rank: int, grads: dict[str, np.ndarray], step: int, lr: float, scale: float) -> list[TensorPart]:
        parts = []
        for name, tensor in self.tensors.items():
            first, end = self.ranges[name][rank]
            parts.append(
                TensorPart(
                    name=name,
                    shape=tensor.shape,
                    first=first,
                    param=self.params[name][first:end],
                    grad=grads[name].reshape(-1)[first:end].copy(),
                    state=self.states[rank][name],
                    lr=lr,
                    step=step,
                    grad_scale=scale,
                    copy_out=np.empty(end - first, np.float16) if self.dtype == "float32" else None,
                )
            )
        return parts


class Whole:
    """The algorithm of Shazeer and Stern over one whole tensor, in float64."""

    def __init__(self, tensor: np.ndarray, optimizer: Adafactor) -> None:
        self.optimizer, self.p = optimizer, tensor.astype(np.float64)
        self.matrix = folded(tensor.shape) if tensor.ndim >= 2 else None
        self.row, self.col, self.v = 0.0, 0.0, 0.0

    def update(self, grad: np.ndarray, step: int, *, lr: float) -> None:
        o, g = self.optimizer, grad.astype(np.float64)
        if g.size == 0:
            return
        beta = 1 - step**-o.decay
        squares = g * g + o.eps[0]
        if self.matrix:
            squares = squares.reshape(self.matrix)
            self.row = beta * self.row + (1 - beta) * squares.mean(axis=1)
            self.col = beta * self.col + (1 - beta) * squares.mean(axis=0)
            self.v = np.outer(self.row, self.col).reshape(g.shape) / self.row.mean()
        else:
            self.v = beta * self.v + (1 - beta) * squares
        u = g / np.sqrt(self.v)
        u /= max(1.0, math.sqrt(np.mean(u * u)) / o.clip_threshold)
        rate = lr * (max(o.eps[1], math.sqrt(np.mean(self.p**2))) if o.scale_parameter else 1.0)
        self.p = self.p - rate * o.weight_decay * self.p - rate * u


@settings(max_examples=60)
@given(
    size=st.integers(1, 8),
    fractions=st.lists(st.floats(0, 1), min_size=7 * len(SHAPES), max_size=7 * len(SHAPES)),
    scale_parameter=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
@example(size=8, fractions=[0.5] * 7 * len(SHAPES), scale_parameter=True, weight_decay=0.1, seed=0)  # empty ranks
def test_any_cut_over_ranks_follows_the_algorithm(
    size: int, fractions: list[float], scale_parameter: bool, weight_decay: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    optimizer = Adafactor(lr=0.1, scale_parameter=scale_parameter, weight_decay=weight_decay)
    tensors = {f"t{i}": rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 3) for i, shape in enumerate(SHAPES)}
    cuts = [
        [round(fractions[7 * i + k] * tensor.size) for k in range(size - 1)]
        for i, tensor in enumerate(tensors.values())
    ]
    tensors = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    ranks = Ranks(tensors, optimizer, cuts, "float64")
    wholes = {name: Whole(tensor, optimizer) for name, tensor in tensors.items()}
    for step in (1, 2, 3):
        grads = {name: np.asarray(rng.standard_normal(t.shape)) for name, t in tensors.items()}
        ranks.update(grads, step, lr=0.1 / step)
        for name, whole in wholes.items():
            whole.update(grads[name], step, lr=0.1 / step)
            got, want = ranks.params[name].reshape(whole.p.shape), whole.p
            largest = np.abs(want).max(initial=1e-3)
            np.testing.assert_allclose(got, want, rtol=0, atol=OVER_STEPS * largest, err_msg=f"{name} {step=}")
    for name, whole in wholes.items():
        if whole.matrix and whole.p.size:
            np.testing.assert_allclose(ranks.states[0][name]["row"], whole.row, rtol=OVER_STEPS)
            np.testing.assert_allclose(ranks.states[0][name]["col"], whole.col, rtol=OVER_STEPS)
            for other in ranks.states[1:]:  # the same on every rank, to the bit
                assert other[name]["row"].tobytes() == ranks.states[0][name]["row"].tobytes()
                assert other[name]["col"].tobytes() == ranks.states[0][name]["col"].tobytes()


def test_large_tensors_are_worked_through_in_pieces() -> None:
    rng = np.random.default_rng(1)
    optimizer = Adafactor(lr=0.01)
    tensors = {
        "wide": rng.standard_normal((3, 40_000)).astype(np.float32),
        "tall": rng.standard_normal((40_000, 3)).astype(np.float32),
        "vector": rng.standard_normal(50_000).astype(np.float32),
    }
    ranks = Ranks(tensors, optimizer, [[17_001, 90_000], [16_384, 100_001], [20_001, 40_000]])
    grads = {name: (rng.standard_normal(t.shape) * 3).astype(np.float32) for name, t in tensors.items()}
    asked = ranks.update(grads, 1, lr=0.01)
    assert asked == [40_003 + 1 + 40_003 + 1 + 1, 3]
    for name, tensor in tensors.items():
        whole = Whole(tensor, optimizer)
        whole.update(grads[name], 1, lr=0.01)
        np.testing.assert_allclose(ranks.params[name].reshape(tensor.shape), whole.p, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_half_gradients_scales_and_copies(dtype: type) -> None:
    rng = np.random.default_rng(2)
    optimizer = Adafactor(lr=0.01, clip_threshold=0.5)
    tensors = {"w": rng.standard_normal((8, 6)).astype(np.float32), "b": np.ones(6, np.float32)}
    scaled = {name: (1024 * rng.standard_normal(t.shape)).astype(dtype) for name, t in tensors.items()}
    ranks = Ranks(tensors, optimizer, [[11], [2]])
    caught = [ranks.parts(rank, scaled, 1, 0.01, 1 / 1024) for rank in (0, 1)]
    ranks.parts = lambda rank, *_: caught[rank]  # type: ignore[method-assign]
    ranks.update(scaled, 1, lr=0.01)
    for name, tensor in tensors.items():
        whole = Whole(tensor, optimizer)
        whole.update(scaled[name].astype(np.float64) / 1024, 1, lr=0.01)
        np.testing.assert_allclose(ranks.params[name].reshape(tensor.shape), whole.p, rtol=BOUND, atol=BOUND)
    for part in (part for parts in caught for part in parts):
        assert part.copy_out.tobytes() == part.param.astype(np.float16).tobytes()


def test_no_gradient_at_all_changes_nothing_and_breaks_nothing() -> None:
    optimizer = Adafactor(lr=0.1)
    tensors = {"w": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)}
    ranks = Ranks(tensors, optimizer, [[5], [1]])
    zeros = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    zeros["w"][2, 1] = 1.0  # and a single element that has one
    for step in (1, 2):
        ranks.update(zeros, step, lr=0.1)
    changed = ranks.params["w"].reshape(4, 4) != 1
    assert changed[2, 1]
    assert changed.sum() == 1
    assert (ranks.params["b"] == 1).all()


def test_without_tensors_nothing_is_asked() -> None:
    assert list(Adafactor(lr=0.1).update_parts_([])) == []


def test_state_shapes() -> None:
    optimizer = Adafactor(lr=0.1)
    assert [(spec.name, spec.shape) for spec in optimizer.states((2, 3, 5))] == [("row", (6,)), ("col", (5,))]
    assert [(spec.name, spec.shape) for spec in optimizer.states((5,))] == [("exp_avg_sq", None)]
    assert [(spec.name, spec.shape) for spec in optimizer.states(())] == [("exp_avg_sq", None)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 0.0}, r"Expected decay to be a finite number above 0, got 0.0"),
        ({"eps": (0.0, 1e-3)}, r"Expected eps\[0\] to be a finite number of at least 1e-37, got 0.0"),
        ({"eps": 1e-30}, r"Expected eps to be two numbers, got 1e-30"),
        ({"clip_threshold": 0}, r"Expected clip_threshold .* above 0, got 0"),
        ({"scale_parameter": None}, r"Expected scale_parameter to be True or False, got None"),
    ],
)
def test_bad_settings_are_refused_with_the_field(options: dict, message: str) -> None:
    with pytest.raises(CallError, match=message):
        Adafactor(lr=0.1, **options)


def test_a_part_beyond_its_tensor_is_refused() -> None:
    optimizer = Adafactor(lr=0.1)
    ranks = Ranks({"w": np.ones((2, 2), np.float32)}, optimizer, [[]])
    [part] = ranks.parts(0, {"w": np.ones((2, 2), np.float32)}, 1, 0.1, 1.0)
    part.first = 1
    with pytest.raises(CallError, match=r"Expected a part of 'w' within its 4 elements, got 4 from element 1 on"):
        next(optimizer.update_parts_([part]))


@settings(max_examples=200)
@given(rows=st.integers(1, 30), cols=st.integers(1, 30), data=st.data(), limit=st.integers(1, 50))
def test_pieces_tile_the_range(rows: int, cols: int, data: st.DataObject, limit: int) -> None:
    first = data.draw(st.integers(0, rows * cols))
    numel = data.draw(st.integers(0, rows * cols - first))
    index = np.arange(rows * cols).reshape(rows, cols)
    held: list[int] = []
    for piece in pieces(first, numel, cols, limit=limit):
        block = index[piece.rows, piece.cols].reshape(-1)
        assert 0 < block.size <= limit
        assert (piece.held.start, piece.held.stop) == (len(held), len(held) + block.size)
        held.extend(block.tolist())
    assert held == list(range(first, first + numel))
