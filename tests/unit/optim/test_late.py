"""Updates that rows have missed, made up for at once: as a dense run does them one by one."""

import numpy as np
import pytest

import zerort as zr
from zerort.errors import CallError
from zerort.optim.late import MOST_MISSED, late_updates
from zerort.optim.rows import kernels

ROWS, WIDTH = 60, 4


def rate(step):
    return 0.01 * (1.0 + np.sin(step / 7.0) ** 2)


def flat(arrays):
    return {kind: values.reshape(-1) for kind, values in arrays.items()}


class Table:
    """Rows, some of which are touched by each update; the others are made up for when they are next touched."""

    def __init__(self, optimizer, dtype, *, late=None):
        lot = np.random.default_rng(5)
        self.optimizer, self.late = optimizer, late
        self.p = lot.standard_normal((ROWS, WIDTH)).astype(dtype)
        self.state = {spec.name: np.zeros((ROWS, WIDTH), dtype) for spec in optimizer.states((ROWS, WIDTH))}
        self.ages = np.zeros(ROWS, np.int64)

    def update(self, rows, gradient, step):
        if self.late is None:
            whole = np.zeros_like(self.p)
            whole[rows] = gradient
            rows, gradient = np.arange(ROWS), whole
        p, state = self.p[rows], {kind: values[rows] for kind, values in self.state.items()}
        if self.late is not None:
            self.late.catch_up_(p, state, self.ages[rows])
        self.optimizer.update_(
            p.reshape(-1), gradient.reshape(-1), flat(state), lr=rate(step), step=step, grad_scale=0.5, copy_out=None
        )
        self.p[rows] = p
        for kind, values in state.items():
            self.state[kind][rows] = values
        if self.late is not None:
            self.late.advance(lr=rate(step), step=step)
            self.ages += 1
            self.ages[rows] = 0

    def finish(self):
        if self.late is not None:
            self.late.catch_up_(self.p, self.state, self.ages)
        return {"parameter": self.p, **self.state}


def train(optimizer, dtype, *, late, steps=150):
    """Train on gradients that are sometimes smaller than eps, and on 4 of 60 rows at a time."""
    table = Table(optimizer, dtype, late=late_updates(optimizer, dtype) if late else None)
    lot = np.random.default_rng(6)
    size = 10.0 ** lot.uniform(-9.0, 0.0, (ROWS, 1))
    for step in range(1, steps + 1):
        rows = np.unique(lot.integers(0, ROWS, 4))
        table.update(rows, (lot.standard_normal((len(rows), WIDTH)) * size[rows]).astype(dtype), step)
    return table.finish()


OPTIMIZERS = {
    "adamw": zr.AdamW(lr=0.01, weight_decay=0.1),
    "adamw-large-eps": zr.AdamW(lr=0.01, eps=1e-3),
    "adamw-short-square": zr.AdamW(lr=0.01, betas=(0.95, 0.9)),  # the series does not converge
    "adamw-no-square": zr.AdamW(lr=0.01, betas=(0.9, 0.0), eps=1e-2),
    "adamw-no-mean": zr.AdamW(lr=0.01, betas=(0.0, 0.999)),
    "sgd": zr.SGD(lr=0.01, weight_decay=0.1),
    "sgd-momentum": zr.SGD(lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": zr.SGD(lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "lion": zr.Lion(lr=0.01, weight_decay=0.1),
    "lion-short": zr.Lion(lr=0.01, betas=(0.9, 0.0)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_missed_updates_are_those_of_a_dense_run(optimizer):
    dense, late = (train(optimizer, "float64", late=late) for late in (False, True))
    for kind, values in dense.items():
        np.testing.assert_allclose(late[kind], values, rtol=1e-12, atol=1e-14, err_msg=kind)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[name] for name in ("adamw", "sgd-momentum")], ids=["adamw", "sgd"])
def test_one_missed_stretch_in_float32(optimizer):
    """Ten updates of rows with values below 1: a dense run rounds ten times, half a unit in the last place each."""
    dense, late = (Table(optimizer, "float32", late=one) for one in (None, late_updates(optimizer, "float32")))
    for table in (dense, late):
        table.p /= 8.0
        table.update(np.arange(ROWS), np.random.default_rng(8).standard_normal((ROWS, WIDTH)).astype(np.float32), 1)
        for step in range(2, 12):
            table.update(np.zeros(0, np.int64), np.zeros((0, WIDTH), np.float32), step)
    assert np.abs(dense.finish()["parameter"]).max() < 1.0
    np.testing.assert_allclose(late.finish()["parameter"], dense.finish()["parameter"], rtol=0.0, atol=1e-6)


def test_the_oldest_row_that_is_kept_is_right():
    """Learning rates are known as far back as `MOST_MISSED` updates, for the series and for elements below eps."""
    optimizer = zr.AdamW(lr=0.01, weight_decay=0.1)
    dense, late = (Table(optimizer, "float64", late=one) for one in (None, late_updates(optimizer, "float64")))
    gradient = (
        np.random.default_rng(9).standard_normal((ROWS, WIDTH)) * np.where(np.arange(ROWS) % 2, 1.0, 1e-8)[:, None]
    )
    for table in (dense, late):
        table.update(np.arange(ROWS), gradient, 1)
        for step in range(2, MOST_MISSED + 2):
            table.update(np.zeros(0, np.int64), np.zeros((0, WIDTH)), step)
    np.testing.assert_allclose(late.finish()["parameter"], dense.finish()["parameter"], rtol=1e-11, atol=1e-13)


def test_elements_far_above_eps_are_not_replayed(monkeypatch):
    """The series is what makes catching up cheap: a run with ordinary gradients does without replays."""
    optimizer = zr.AdamW(lr=0.01)
    late = late_updates(optimizer, "float32")
    monkeypatch.setattr(kernels._Series, "_replayed", None)
    table = Table(optimizer, "float32", late=late)
    lot = np.random.default_rng(6)
    for step in range(1, 60):
        rows = np.unique(lot.integers(0, ROWS, 4))
        table.update(rows, lot.standard_normal((len(rows), WIDTH)).astype(np.float32) * np.float32(1e-3), step)
    assert np.isfinite(table.finish()["parameter"]).all()


def test_nan_stays_nan():
    late = late_updates(zr.AdamW(lr=0.01), "float32")
    late.advance(lr=0.01, step=1)
    p = np.array([[np.nan, 1.0]], np.float32)
    state = {"exp_avg": np.ones((1, 2), np.float32), "exp_avg_sq": np.array([[1.0, np.nan]], np.float32)}
    late.catch_up_(p, state, np.array([1]))
    assert np.isnan(p).all()
    assert np.isnan(state["exp_avg_sq"][0, 1])


def test_unknown_optimizers_are_refused_with_the_cure():
    class Other(zr.AdamW):
        __slots__ = ()

    with pytest.raises(CallError, match=r"got Other\. Register them with lazy=True"):
        late_updates(Other(lr=0.1), "float32")


def test_a_lion_keeps_its_direction_when_its_average_underflows():
    """Products of the kernel stop at the smallest number above zero, in float32 after some thousand updates."""
    optimizer = zr.Lion(lr=1e-3, betas=(0.9, 0.9))
    late = late_updates(optimizer, "float32")
    dense, rows = ({"p": np.zeros((1, 4), np.float32), "exp_avg": np.full((1, 4), 1e-3, np.float32)} for _ in range(2))
    none = np.zeros(4, np.float32)
    for step in range(1, 3001):
        optimizer.update_(
            dense["p"].reshape(-1),
            none,
            flat({"exp_avg": dense["exp_avg"]}),
            lr=1e-3,
            step=step,
            grad_scale=1.0,
            copy_out=None,
        )
        late.advance(lr=1e-3, step=step)
        if step % MOST_MISSED == 0 or step == 3000:
            age = step % MOST_MISSED or MOST_MISSED
            late.catch_up_(rows["p"], {"exp_avg": rows["exp_avg"]}, np.array([age]))
    np.testing.assert_allclose(rows["p"], dense["p"], rtol=1e-4)


def test_a_lion_whose_average_vanishes_is_refused():
    with pytest.raises(CallError, match=r"got betas=\(0.9, 0.5\): when it vanishes cannot be told"):
        late_updates(zr.Lion(lr=0.01, betas=(0.9, 0.5)), "float32")
