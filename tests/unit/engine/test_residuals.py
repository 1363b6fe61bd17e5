"""What coding has lost of gradients (`Wire(feedback=True)`): kept, shared out, made up for; what reports say of it."""

import numpy as np
import pytest

import zerort as zr
from zerort.errors import UnitStateError
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads
from zerort.testing.threads_transport import ThreadsTransport

FEEDBACK = zr.Wire(reduce="int4", feedback=True, over="all")
NUMEL = 3000


def gradient(seed):
    return np.random.default_rng(seed).normal(size=NUMEL).astype(np.float32)


def opened(group, **options):
    return zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=FEEDBACK, **options)


def residual_of(unit):
    (section,) = unit.sections
    (mine,) = section.residual.arrays
    return mine.astype(np.float64)


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


# -- steps that are not done -------------------------------------------------------------------------------------------


def trained(group, gradients, **options):
    """Take one step for each gradient; return what was lost after each, and the parameters at the end."""
    with opened(group, reduction="sum", **options) as rt:
        unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
        lost = []
        for one in gradients:
            unit.reduce({"w": one * np.float32(rt.loss_scale)})
            rt.step()
            lost.append(residual_of(unit))
        with unit.gathered() as found:
            return lost, np.array(found["w"])


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_skipped_step_leaves_what_was_lost_before(micro_steps):
    """The NaN is one rank's: the others have sent what they had lost before, and get it back."""

    def body(group):
        with opened(group, nonfinite="skip", reduction="sum", micro_steps=micro_steps) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})

            def step(seed, bad=False):
                for at in range(micro_steps):
                    one = gradient(seed + 10 * at + group.rank)
                    one[5] = np.nan if bad and group.rank == 1 and at == 0 else one[5]
                    unit.reduce({"w": one})
                report = rt.step()
                return report.updated, residual_of(unit)

            _, before = step(0)
            updated, after = step(100, bad=True)
            assert not updated
            np.testing.assert_array_equal(after, before)
            assert before.any()
            unit.reduce({"w": gradient(200 + group.rank)})
            rt.discard_gradients()
            np.testing.assert_array_equal(residual_of(unit), before)
            updated, after = step(300)
            assert updated
            assert not np.array_equal(after, before)
            return True

    assert run_threads(2, body) == [True, True]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_checkpoint_has_no_residual_of_gradients_that_no_step_has_seen(nonfinite, tmp_path):
    """Where steps may be skipped, what they lose lies apart until then; else a save in the middle is refused."""

    def body(group):
        with opened(group, nonfinite=nonfinite) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            unit.reduce({"w": gradient(group.rank)})
            rt.step()
            unit.reduce({"w": gradient(10 + group.rank)})
            if nonfinite == "raise":
                with pytest.raises(UnitStateError, match="Expected save\\(\\) between steps with Wire"):
                    rt.save(tmp_path / "middle")
                rt.step()
                rt.save(tmp_path / "middle")
                return
            rt.save(tmp_path / "middle")
            rt.step()
            with unit.gathered() as p:
                expected = np.array(p["w"])
            rt.load(tmp_path / "middle")
            unit.reduce({"w": gradient(10 + group.rank)})
            rt.step()
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["w"], expected)

    run_threads(2, body)


def test_without_skipped_steps_feedback_takes_half_the_memory():
    def held(group, **options):
        with opened(group, **options) as rt:
            rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            return rt.units["u"].sections[0].residual.nbytes

    assert run_threads(2, lambda group: held(group, nonfinite="skip")) == [4 * 3072] * 2
    assert run_threads(2, held) == [2 * 3072] * 2


def test_a_dynamic_loss_scale_carries_what_was_lost_from_one_scale_to_the_next():
    """An overflow halves the scale, two good steps double it: powers of two, so the walk is that without a scale."""
    gradients = [gradient(seed) for seed in range(6)]
    broken = gradient(9)
    broken[7] = np.inf

    def body(group):
        scale = zr.LossScale(initial=1024.0, interval=2)
        plain, expected = trained(group, gradients)
        scaled, found = trained(group, [*gradients[:3], broken, *gradients[3:]], loss_scale=scale)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(scaled[3], scaled[2] * 0.5)  # the scale after the overflow
        pairs = [(after[before != 0], before[before != 0]) for after, before in zip(scaled[4:], plain[3:], strict=True)]
        return [np.unique(after / before).tolist() for after, before in pairs]

    assert run_threads(2, body) == [[[1024.0], [2048.0], [2048.0]]] * 2


def test_a_loaded_residual_belongs_to_the_loss_scale_that_goes_on(tmp_path):
    def body(group):
        with opened(group, loss_scale=64.0) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            unit.reduce({"w": 64 * gradient(group.rank)})
            rt.step()
            rt.save(tmp_path / "saved")
            before = residual_of(unit)
        with opened(group, loss_scale=16.0) as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
            rt.load(tmp_path / "saved")
            np.testing.assert_array_equal(residual_of(unit), before / 4)
        return bool(before.any())

    assert run_threads(2, body) == [True, True]


def test_residuals_are_loaded_by_a_run_that_codes_otherwise(tmp_path):
    """Top-k keeps 32 bits, int4 16: rounded, or exact."""

    def body(group):
        wires = [zr.Wire(reduce=zr.TopK(0.01), over="all"), FEEDBACK, zr.Wire(reduce="int8", over="all")]
        lost = []
        for at, wire in enumerate(wires):
            with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=wire) as rt:
                unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32)})
                if at:
                    rt.load(tmp_path / "saved")
                else:
                    unit.reduce({"w": gradient(group.rank)})
                    rt.step()
                if wire.feedback:
                    rt.save(tmp_path / "saved")
                    (mine,) = unit.sections[0].residual.arrays
                    lost.append(mine[:NUMEL].astype(np.float32))
        bfloat16 = numpy_dtype("bfloat16")
        np.testing.assert_array_equal(lost[1], lost[0].astype(bfloat16).astype(np.float32))
        return int(np.count_nonzero(lost[0]))

    assert min(run_threads(2, body)) >= NUMEL - 33


def test_residuals_of_a_host_stay_where_they_are_when_shards_are_cut_anew(monkeypatch):
    """Its ranks code the same stretches as before: no bit changes."""
    monkeypatch.setattr(ThreadsTransport, "one_memory", False)
    monkeypatch.setattr(ThreadsTransport, "memories", (0, 0, 1))
    wire = zr.Wire(reduce="int4", feedback=True)

    def body(group, weights=None):
        with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=wire, reduction="sum") as rt:
            unit = rt.register("u", {"w": np.zeros(NUMEL, np.float32), "b": np.zeros(700, np.float32)})
            for step in range(4):
                if step == 2 and weights is not None:
                    rt.rebalance(shard_weights=weights)
                unit.reduce({"w": gradient(10 * step + group.rank), "b": gradient(50 + step + group.rank)[:700]})
                rt.step()
            with unit.gathered() as found:
                return found["w"].tobytes(), found["b"].tobytes(), unit.sections[0].residual.stretch.stop

    straight = run_threads(3, body)
    assert run_threads(3, lambda group: body(group, [1, 0, 5])) == straight
    assert [stop for *_, stop in straight] == [2048, 3840, 3840]


# -- virtual shards ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("over", "format"), [("hosts", "int8"), ("all", "int4")])
def test_virtual_shards_lose_the_same_on_any_number_of_ranks(tmp_path, over, format):
    """Some have no gradient of a tensor: its residual waits there, whoever computes the shards beside it.

    Sums of a few int4 values are exact in float32, in any order; those of int8 are not.
    """
    wire = zr.Wire(reduce=format, feedback=True, over=over)

    def body(group):
        with zr.open(zr.Plan.zero(3), zr.SGD(lr=1.0), group=group, wire=wire, virtual_shards=8) as rt:
            unit = rt.register("u", {"a": np.zeros(NUMEL, np.float32), "b": np.zeros(1500, np.float32)})
            digests = []
            for step in range(3):
                for shard in rt.micro_batches:
                    given = {"a": gradient(100 * step + shard)}
                    if (step + shard) % 3:
                        given["b"] = gradient(50 + 100 * step + shard)[:1500]
                    unit.reduce(given)
                digests.append(rt.step().digest)
            residual = unit.sections[0].residual
            rt.save(tmp_path / f"on {group.size}")
            lost = {sender: one.tobytes() for sender, one in zip(residual.senders, residual.arrays, strict=True)}
            for size in (1, 3):
                if (tmp_path / f"on {size}").exists() and group.size == 5:
                    rt.load(tmp_path / f"on {size}")
                    for sender, one in zip(residual.senders, residual.arrays, strict=True):
                        assert one.tobytes() == lost[sender]
            return digests, lost

    (digests, lost), *_ = run_threads(1, body)
    assert len(set(digests)) == 3
    assert sorted(lost) == [*range(8)]
    assert len(set(lost.values())) == 8
    for ranks in (2, 3, 4, 5, 8):
        found = run_threads(ranks, body)
        assert [one for one, _ in found] == [digests] * ranks
        assert {sender: one for _, each in found for sender, one in each.items()} == lost
