"""What coding has lost of gradients (`Wire(feedback=True)`): kept, shared out, made up for; what reports say of it."""

import numpy as np
import pytest

import zerort as zr
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads

FEEDBACK = zr.Wire(reduce="int4", feedback=True, over="all")
NUMEL = 3000


def gradient(seed):
    return np.random.default_rng(seed).normal(size=NUMEL).astype(np.float32)


def opened(group, **options):
    return zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=FEEDBACK, **options)


def residual_of(unit):
    (section,) = unit.sections
    return section.residual.astype(np.float64)


@pytest.mark.parametrize("how", ["mean", "sum", "weight"])
@pytest.mark.parametrize(("ranks", "micro_steps"), [(1, 1), (2, 1), (2, 3), (4, 1)])
def test_other_numbers_of_ranks_make_up_for_what_was_lost(tmp_path, how, ranks, micro_steps):
    reduction = "sum" if how == "sum" else "mean"
    weight = {"weight": 10.0} if how == "weight" else {}

    def save(group):
        with opened(group, reduction=reduction) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            unit.reduce({"w": gradient(group.rank)})
            rt.step(**weight)
            rt.save(tmp_path / "saved")
            return residual_of(unit)

    def load(group):
        with opened(group, reduction=reduction, micro_steps=micro_steps) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            rt.load(tmp_path / "saved")
            return residual_of(unit)

    lost = sum(run_threads(2, save)) / (2 if how == "mean" else 1)
    made_up = sum(run_threads(ranks, load)) / (ranks * micro_steps if how == "mean" else 1)
    assert np.abs(lost).max() > 0.01
    np.testing.assert_allclose(made_up, lost, rtol=2**-6, atol=1e-3)  # roundings to bfloat16, and cancellation


@pytest.mark.parametrize("has_other", [False, True])
def test_a_tensor_without_a_gradient_keeps_what_was_lost(has_other):
    """Whether another rank has one or not: each makes up for its own losses with its own next gradient."""

    def body(group):
        with opened(group, reduction="sum") as rt:
            unit = rt.register("u", {"a": np.zeros(NUMEL, np.float32), "b": np.zeros(NUMEL, np.float32)})
            (section,) = unit.sections
            a, b = (section.layout.of(f"u.{name}").slice for name in "ab")
            unit.reduce({"a": gradient(group.rank), "b": gradient(10 + group.rank)})
            rt.step()
            before = residual_of(unit)
            given = {"a": 1e-6 * gradient(group.rank)}
            if has_other and group.rank == 1:
                given["b"] = np.zeros(NUMEL, np.float32)
            unit.reduce(given)
            report = rt.step()
            after = residual_of(unit)
            feeds_b = has_other and group.rank == 1
            assert before[b].any()
            assert np.array_equal(after[b], before[b]) == (not feeds_b)
            assert not np.array_equal(after[a], before[a])
            return report.grad_norm, np.abs(before[a]).max(), report.without_gradient

    found = run_threads(2, body)
    if not has_other:
        norm, largest, absent = found[0]
        assert absent == ("u.b",)
        assert norm < 4 * largest * np.sqrt(NUMEL)


def test_ends_of_tensors_in_a_rank_s_range_are_set_aside_alone():
    """Three tensors over three ranks, the middle one without a gradient: ranges of ranks cut it."""

    def body(group):
        with opened(group, reduction="sum") as rt:
            sizes = {"a": 1000, "b": 7000, "c": 500}
            unit = rt.register("u", {name: np.zeros(size, np.float32) for name, size in sizes.items()})
            (section,) = unit.sections
            unit.reduce({name: gradient(7 * group.rank).repeat(3)[:size] for name, size in sizes.items()})
            rt.step()
            before = residual_of(unit)
            unit.reduce({name: gradient(group.rank)[: sizes[name]] for name in "ac"})
            rt.step()
            after = residual_of(unit)
            return {
                name: np.array_equal(after[at], before[at])
                for name in sizes
                for at in [section.layout.of(f"u.{name}").slice]
            }

    assert run_threads(3, body) == [{"a": False, "b": True, "c": False}] * 3


@pytest.mark.parametrize(
    ("dtype", "wire", "expected"),
    [
        ("bfloat16", zr.Wire(gather="bfloat16", reduce="bfloat16", over="all"), ""),
        ("bfloat16", zr.Wire(gather="int8", reduce="bfloat16", feedback=True, over="all"), "gather int8"),
        (
            "float32",
            zr.Wire(gather="int8", reduce="bfloat16", feedback=True, over="all"),
            "gather int8, reduce bfloat16, feedback; results depend on the number of ranks",
        ),
    ],
)
def test_reports_name_formats_that_something_travels_in(dtype, wire, expected):
    def body(group):
        with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=wire) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, numpy_dtype(dtype))})
            unit.reduce({"w": gradient(0).astype(numpy_dtype(dtype))})
            return rt.step().wire

    assert run_threads(2, body) == [expected] * 2
