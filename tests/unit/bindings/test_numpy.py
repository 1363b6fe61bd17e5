"""Plain NumPy loops: zero-copy views that know when they are stale."""

import numpy as np
import pytest

import zerort as zr
import zerort_numpy as zn
from zerort.comm import open_group
from zerort.errors import StaleViewError
from zerort.testing import run_threads
from zerort.testing.tolerance import rounding

F4 = np.float32


@pytest.fixture
def unit():
    with open_group(kind="solo") as group, zr.open(group=group, optimizer=zr.SGD(lr=1.0)) as rt:
        yield zn.register(rt, "block", {"w": np.arange(12, dtype=F4).reshape(3, 4), "b": np.ones(4, F4)})


def test_a_view_computes_as_any_array(unit):
    w = np.arange(12, dtype=F4).reshape(3, 4)
    x = np.ones((2, 3), F4)
    with unit.gathered() as p:
        for found, expected in [
            (x @ p["w"] + p["b"], x @ w + 1),
            (np.tanh(p["w"]), np.tanh(w)),
            (p["w"].T @ p["w"], w.T @ w),
            (np.einsum("ij,kj->ik", p["w"], p["w"]), w @ w.T),
            (np.concatenate([p["w"], w]), np.concatenate([w, w])),
            (p["w"].sum(0), w.sum(0)),
            (p["w"][[2, 0]], w[[2, 0]]),
            (p["w"].reshape(-1)[p["b"].astype(int)], w.reshape(-1)[[1] * 4]),
            (p["w"].astype("f8"), w.astype("f8")),
            (np.add(p["w"], 1, out=np.empty((3, 4), F4)), w + 1),
        ]:
            np.testing.assert_array_equal(found, expected)
        assert type(p["w"] + 1) is np.ndarray
        assert type(np.matmul(x, p["w"])) is np.ndarray
        assert isinstance(p["w"][1:], zn.View)
        assert p["w"].shape == (3, 4)
        assert len(p["w"]) == 3
        assert repr(p["b"]) == repr(np.ones(4, F4))


def test_a_view_is_not_a_copy(unit):
    with unit.gathered() as p:
        whole = unit.unit.sections[0].parameters.whole
        assert np.shares_memory(np.asarray(p["w"]), whole)
        with pytest.raises(ValueError, match="read-only"):
            p["w"][0] = 1


USES = {
    "arithmetic": lambda w: w + 1,
    "matmul": lambda w: np.ones((2, 3), F4) @ w,
    "ufunc": np.exp,
    "function": lambda w: np.concatenate([w, w]),
    "index": lambda w: w[0],
    "method": lambda w: w.sum(),
    "dot": lambda w: w.dot(np.ones(4, F4)),
    "shape": lambda w: w.shape,
    "transpose": lambda w: w.T,
    "out": lambda w: np.add(1, 1, out=w),
    "iterate": list,
    "reduce": np.add.reduce,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("part", [lambda w: w, lambda w: w[:, 1:], lambda w: w.reshape(2, 6).reshape(3, 4)])
def test_a_view_after_its_release_raises_whatever_is_done_with_it(unit, use, part):
    with unit.gathered() as p:
        w = part(p["w"])
    with pytest.raises(StaleViewError, match=r"Expected 'w' of unit 'block' to be used while the unit is gathered"):
        use(w)
    assert repr(w) == "<view of 'w' of unit 'block': released>"


def test_the_mapping_ends_too_and_a_new_block_is_fresh(unit):
    with unit.gathered() as p:
        kept = np.array(p["w"])
    with pytest.raises(StaleViewError):
        p["w"]
    with unit.gathered() as q:
        np.testing.assert_array_equal(q["w"], kept)


def test_an_error_in_the_block_still_ends_the_views(unit):
    def fail(p):
        kept.append(p["w"])
        raise ZeroDivisionError

    kept = []
    with pytest.raises(ZeroDivisionError), unit.gathered() as p:
        fail(p)
    with pytest.raises(StaleViewError):
        _ = kept[0] + 1
    with unit.gathered():
        pass


def test_a_loop_trains_on_several_ranks():
    def body(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.SGD(lr=0.5)) as rt:
            table = zn.register(rt, "table", {"w": np.zeros(5, F4)})
            head = zn.register(rt, "head", {}, ties={"out": (table, "w")})
            for _ in range(30):
                with head.gathered() as p:
                    error = p["out"] - np.arange(5, dtype=F4) - rt.rank
                head.reduce({"out": error})
                table.reduce()
                rt.step()
            with table.gathered() as p:
                np.testing.assert_allclose(
                    p["w"], np.arange(5) + 1, rtol=rounding("float32", 4)
                )  # the mean over ranks 0, 1, 2

    run_threads(3, body)


def test_rows_of_a_table_are_views_too():
    """Guarded as others are, and good for a gradient within the block."""
    with zr.open(zr.Plan.zero(3), zr.SGD(lr=0.5)) as rt:
        unit = zn.register(rt, "embed", {"table": np.ones((5, 2))}, rows=("table",))
        with unit.gathered(rows={"table": [3, 1]}) as p:
            rows = p["table"]
            unit.reduce(rows={"table": ([3, 1], rows * 1.0)})
        rt.step()
        with pytest.raises(StaleViewError):
            rows.sum()
        with unit.gathered() as p:
            np.testing.assert_array_equal(p["table"][:, 0], [1.0, 0.5, 1.0, 0.5, 1.0])
