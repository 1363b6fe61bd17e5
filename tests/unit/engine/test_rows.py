"""Tables by rows, on ranks that are threads: what a loop meets beside gathering and reducing, and what is refused."""

import ml_dtypes
import numpy as np
import pytest

import zerort as zr
from zerort.engine.rows import table as tables
from zerort.engine.rows.exchange import coalesced, summed_over_ranks
from zerort.errors import CallError, NonFiniteError, PlanError, UnitStateError, ZerortError
from zerort.testing import run_threads

SHAPE = (23, 5)


def lot(*numbers):
    return np.random.default_rng(numbers)


def opened(group, *, rows=("table",), lazy=False, dtype="float64", plan=None, optimizer=None, **options):
    optimizer = zr.AdamW(lr=0.05, weight_decay=0.1) if optimizer is None else optimizer
    rt = zr.open(zr.Plan.zero(3) if plan is None else plan, optimizer, group=group, **options)
    rt.register("embed", {"table": lot(1).standard_normal(SHAPE).astype(dtype)}, rows=rows, lazy=lazy)
    return rt


def gradient_of(step, rank, dtype="float64"):
    rows = lot(step, rank).integers(0, SHAPE[0], 3)
    return rows, lot(step, rank, 1).standard_normal((3, SHAPE[1])).astype(dtype)


def reduce(rt, step, dtype="float64"):
    rows, values = gradient_of(step, rt.rank, dtype)
    if rt.units["embed"].sections[0].table is not None:
        rt.units["embed"].reduce(rows={"table": (rows, values)})
        return
    whole = np.zeros(SHAPE, dtype)
    np.add.at(whole, rows, values)
    rt.units["embed"].reduce({"table": whole})


def steps(rt, numbers, dtype="float64"):
    for number in numbers:
        reduce(rt, number, dtype)
        report = rt.step()
    return report


def whole(rt):
    with rt.units["embed"].gathered() as p:
        return np.array(p["table"])


def run(body, ranks=2, **options):
    """Return what each rank's body returns, given its runtime."""

    def of_rank(group):
        with opened(group, **options) as rt:
            return body(rt)

    return run_threads(ranks, of_rank)


ON_DISK = zr.Plan.zero(3, parameter="nvme", state="nvme")

anywhere = pytest.mark.parametrize("plan", [zr.Plan.zero(3), ON_DISK], ids=["memory", "disk"])


def test_every_row_is_brought_up_to_date_before_it_is_too_old(monkeypatch):
    """No row misses more updates than there are numbers for, though most are never touched."""
    monkeypatch.setattr(tables, "MOST_MISSED", 4)
    oldest = []

    def body(rt):
        reached = 0
        for number in range(30):
            steps(rt, [number])
            table = rt.units["embed"].sections[0].table
            if table is not None:
                reached = max(reached, int((table.now - table.touched).max()))
        oldest.append(reached)
        return whole(rt)

    expected = run(body, rows=())[0]
    np.testing.assert_allclose(run(body)[0], expected, rtol=1e-12, atol=1e-13)
    assert max(oldest) == 3  # the fourth update brings it up to date


@anywhere
def test_lazy_rows_stay_as_they_are_and_the_report_says_so(tmp_path, plan):
    def body(rt):
        report = steps(rt, range(5))
        touched = {int(row) for step in range(5) for rank in range(2) for row in gradient_of(step, rank)[0]}
        return report, whole(rt), sorted(touched)

    where = {"plan": plan, "scratch": tmp_path}
    report, values, touched = run(body, lazy=True, **where)[0]
    untouched = np.setdiff1d(np.arange(SHAPE[0]), touched)
    np.testing.assert_array_equal(values[untouched], lot(1).standard_normal(SHAPE)[untouched])
    assert report.rows == "lazy embed.table"
    assert "lazy embed.table" in str(report)
    exact, decayed, _ = run(body, **where)[0]
    assert exact.rows == ""
    assert (np.abs(decayed[untouched]) < np.abs(values[untouched])).all()


def test_other_optimizers_are_lazy_or_refused():
    def body(group):
        with zr.open(zr.Plan.zero(3), Signs(lr=0.1), group=group) as rt:
            with pytest.raises(CallError, match=r"got Signs\. Register them with lazy=True"):
                rt.register("embed", {"table": np.ones(SHAPE)}, rows=("table",))
            rt.register("embed", {"table": np.ones(SHAPE)}, rows=("table",), lazy=True)
            steps(rt, [0])
            return whole(rt)

    found = run_threads(2, body)[0]
    rows = np.unique(np.concatenate([gradient_of(0, rank)[0] for rank in range(2)]))
    assert (np.flatnonzero((found != 1.0).any(1)) == rows).all()


class Signs(zr.SGD):
    """Steps of one length."""

    __slots__ = ()

    def update_(self, param, grad, state, *, lr, step, grad_scale, copy_out):
        param -= lr * np.sign(grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_follow_their_master_weights(dtype):
    """Whole masters are made up for; parameters are what they round to: as in a dense run, whose sums are rounded."""

    def body(rt):
        for number in range(6):
            rows = np.array([number, number + 7])
            ones = np.ones((2, SHAPE[1]), dtype)
            if rt.units["embed"].sections[0].table is not None:
                rt.units["embed"].reduce(rows={"table": (rows, ones)})
            else:
                gradient = np.zeros(SHAPE, dtype)
                gradient[rows] = 1.0
                rt.units["embed"].reduce({"table": gradient})
            rt.step()
        return whole(rt).astype(np.float32)

    dense, rows = (run(body, rows=one, dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)))[0] for one in ((), ("table",)))
    unit = np.float32(2.0**-8 if dtype == "bfloat16" else 2.0**-11)
    np.testing.assert_allclose(
        rows, dense, rtol=2 * unit, atol=1e-6
    )  # masters differ by fp32 rounding: one unit at most
    assert (rows == dense).mean() > 0.95


@anywhere
def test_checkpoint_and_feed_hold_rows_that_are_up_to_date(tmp_path, plan):
    def body(rt):
        steps(rt, range(4))
        rt.publish(tmp_path / "feed", dtype=None).push().wait()
        rt.save(tmp_path / "saved")
        values = whole(rt)
        steps(rt, range(4, 6))
        rt.load(tmp_path / "saved")
        np.testing.assert_array_equal(whole(rt), values)
        steps(rt, range(4, 6))
        return values, whole(rt)

    expected = run(lambda rt: (steps(rt, range(6)), whole(rt))[1], rows=())[0]
    values, ends = run(body, plan=plan, scratch=tmp_path)[0]
    np.testing.assert_array_equal(zr.Reader(tmp_path / "feed").update()["embed.table"], values)
    np.testing.assert_allclose(ends, expected, rtol=1e-12, atol=1e-13)


@anywhere
def test_the_last_step_is_kept_with_all_rows_up_to_date(tmp_path, plan):
    kept = {"last_step": tmp_path / "kept", "plan": plan, "scratch": tmp_path}
    before = run(lambda rt: (steps(rt, range(4)), whole(rt))[1], **kept)[0]

    def body(rt):
        assert rt.resume().updates == 4
        np.testing.assert_array_equal(whole(rt), before)
        steps(rt, range(4, 6))
        return whole(rt)

    expected = run(lambda rt: (steps(rt, range(6)), whole(rt))[1], rows=())[0]
    np.testing.assert_allclose(run(body, **kept)[0], expected, rtol=1e-12, atol=1e-13)


@anywhere
def test_new_values_come_behind_missed_updates(tmp_path, plan):
    """Moments of rows that nobody touched fade up to the assignment, and move the new values on from there."""

    def body(rt):
        steps(rt, range(3))
        rt.units["embed"].assign({"table": np.full(SHAPE, 2.0)})
        steps(rt, range(3, 5))
        return whole(rt)

    found = run(body, plan=plan, scratch=tmp_path)[0]
    np.testing.assert_allclose(found, run(body, rows=())[0], rtol=1e-12, atol=1e-13)


def test_gradients_can_be_looked_at_and_discarded():
    def body(rt):
        reduce(rt, 0)
        seen = rt.units["embed"].reduced_gradients()["table"]
        rt.discard_gradients()
        reduce(rt, 1)
        report = rt.step()
        return seen, report.grad_norm, report.norms["embed"], whole(rt)

    for found, expected in zip(run(body)[0], run(body, rows=())[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_a_step_without_gradients_of_a_table_leaves_it_alone():
    def body(rt):
        steps(rt, range(2))
        before = whole(rt)
        rt.units["embed"].reduce()
        report = rt.step()
        np.testing.assert_array_equal(whole(rt), before)
        return report

    assert run(body)[0].without_gradient == ("embed.table",)


def test_nan_in_a_row_is_reported_and_changes_nothing():
    def body(rt):
        steps(rt, range(2))
        before = whole(rt)
        values = np.full((1, SHAPE[1]), np.nan if rt.rank == 1 else 1.0)
        rt.units["embed"].reduce(rows={"table": ([7], values)})
        with pytest.raises(NonFiniteError, match=r"'embed\.table' on rank 1"):
            rt.step()
        rt.units["embed"].reduce(rows={"table": ([7], np.full((1, SHAPE[1]), 1e308))})
        with pytest.raises(NonFiniteError, match=r"'embed\.table', summed over the ranks"):
            rt.step()
        np.testing.assert_array_equal(whole(rt), before)

    run(body)


def test_a_rank_that_repeats_its_last_batch_adds_nothing():
    def body(rt):
        for number in rt.join(range(2 + rt.rank)):
            reduce(rt, number)
            rt.step()
        return whole(rt)

    np.testing.assert_allclose(run(body)[0], run(body, rows=())[0], rtol=1e-12, atol=1e-13)


def test_sums_over_ranks_are_independent_of_their_order():
    rows = [np.array([1, 4, 6]), np.array([1, 6]), np.array([1, 2]), np.array([1])]
    values = [lot(at).standard_normal((len(one), 3)).astype(np.float32) * 10.0**at for at, one in enumerate(rows)]
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        came = [np.concatenate([one[at] for at in order]) for one in (rows, values)]
        found.append(summed_over_ranks(*came))
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(found[0][0], [1, 2, 4, 6])
    plain = coalesced(np.concatenate(rows), np.concatenate(values).astype(np.float64))
    np.testing.assert_allclose(found[0][1], plain[1], rtol=1e-5)


class Own(zr.AdamW):
    """An optimizer of one's own: what it does without a gradient nobody knows."""


UNFIT = {
    "zero0": ({"plan": zr.Plan.zero(0)}, "with sharded state"),
    "secondary": ({"plan": zr.Plan.zero(3, secondary="host")}, "without secondary="),
    "adafactor": ({"optimizer": zr.Adafactor(lr=0.1)}, "got Adafactor, which looks at whole tensors"),
    "int8": ({"optimizer": zr.AdamW(lr=0.1, moments="int8")}, "with state of full width"),
    "remainder": ({"optimizer": zr.AdamW(lr=0.1, master="remainder")}, "with state of full width"),
    "sparsity": ({"param_groups": [zr.ParameterGroup("*", sparsity=zr.Sparsity(0.5))]}, "without a Sparsity"),
    "own": ({"optimizer": Own(lr=0.1)}, "make up for missed updates of rows, got Own"),
    "lion": ({"optimizer": zr.Lion(lr=0.1, betas=(0.9, 0.5))}, "fades by less than half"),
    "within-a-budget": (
        {"plan": zr.Plan.fit(host="64MiB"), "optimizer": zr.AdamW(lr=0.1, moments="int8")},
        "with state of full width",
    ),
}


@pytest.mark.parametrize(("options", "text"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_have_rows_is_refused_before_anything_is_made(options, text, tmp_path):
    """Registered, announced or forecast: in the same words."""
    settings = {"plan": zr.Plan.zero(3), "optimizer": zr.AdamW(lr=0.1), **options}
    units = {"embed": {"table": zr.TensorSpec((900, 5), "bfloat16")}}

    def body(group):
        with zr.open(group=group, scratch=tmp_path, **settings) as rt:
            with pytest.raises((CallError, PlanError), match=text) as registered:
                rt.register("embed", {"table": np.ones((900, 5), ml_dtypes.bfloat16)}, rows=("table",))
            assert not rt.units
            with pytest.raises((CallError, PlanError)) as announced:
                rt.expect(units, rows={"embed": ("table",)})
            rt.register("embed", {"table": np.ones((900, 5), ml_dtypes.bfloat16)})
        return registered.value, announced.value

    (registered, announced), _ = run_threads(2, body)
    with pytest.raises((CallError, PlanError)) as forecast:
        zr.forecast(units, size=2, rows={"embed": ("table",)}, **settings)
    assert repr(registered) == repr(announced) == repr(forecast.value)
    zr.forecast(units, size=2, **settings)


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"rows": "table"}, "as names"),
        ({"rows": ("tabel",)}, "got no such name"),
        ({"rows": ("bias",)}, r"rows x width; got shape \[4\]"),
        ({"rows": ("table",), "frozen": "table"}, "got a frozen table"),
    ],
)
def test_what_is_no_table_is_refused(declared, text):
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1)) as rt, pytest.raises(CallError, match=text) as registered:
        rt.register("embed", {"table": np.ones(SHAPE), "bias": np.ones(4)}, **declared)
    units = {"embed": {"table": zr.TensorSpec(SHAPE), "bias": zr.TensorSpec((4,))}}
    given = {**declared, "rows": {"embed": declared["rows"]}}
    with pytest.raises(CallError) as forecast:
        zr.forecast(units, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), size=1, **given)
    assert str(forecast.value) == str(registered.value)


@pytest.mark.parametrize(
    ("declared", "text"),
    [({"rows": ("table",), "lazy": 1}, "got lazy=1"), ({"lazy": True}, "got lazy=True and rows=")],
)
def test_what_is_not_lazy_is_refused(declared, text):
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1)) as rt, pytest.raises(CallError, match=text):
        rt.register("embed", {"table": np.ones(SHAPE), "bias": np.ones(4)}, **declared)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([0.5], np.ones((1, 5))), "whole numbers in one dimension, got float64"),
        (([[0]], np.ones((1, 5))), r"of shape \[1, 1\]"),
        (([23], np.ones((1, 5))), "from 0 to 22, got 23"),
        (([0, 1], np.ones((1, 5))), r"in the shape \[2, 5\]"),
        (([0], np.ones((1, 5), np.float32)), "in float64, got float32"),
        (([0], [[1.0] * 5]), "as a NumPy array, got list"),
        (np.ones((1, 5)), r"as \(indices, values\), got ndarray"),
    ],
)
def test_what_are_no_gradients_of_rows_is_refused(given, text):
    with opened(None) as rt, pytest.raises(CallError, match=text):
        rt.units["embed"].reduce(rows={"table": given})


def test_rows_of_other_tensors_are_refused():
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1)) as rt:
        embed = rt.register("embed", {"table": np.ones(SHAPE), "w": np.ones(4)}, rows=("table",))
        for unfit in ({"w": [0]}, {}, {"table": [0], "w": [0]}):
            with pytest.raises(CallError, match="Expected rows of 'table' of unit 'embed'"), embed.gathered(rows=unfit):
                pass
        with pytest.raises(CallError, match=r"Expected the gradient of 'embed\.table' as rows"):
            embed.reduce({"table": np.ones(SHAPE)})
        with pytest.raises(CallError, match=r"gathered whole, got 'embed\.table'") as registered:
            rt.register("head", {"b": np.ones(4)}, ties={"w": (embed, "table")})
        units = {"embed": {"table": zr.TensorSpec(SHAPE)}, "head": {"b": zr.TensorSpec((4,))}}
        told = {"rows": {"embed": ("table",)}, "ties": {"head": {"w": ("embed", "table")}}}
        with pytest.raises(CallError) as forecast:
            zr.forecast(units, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), size=1, **told)
        assert str(forecast.value) == str(registered.value)
        head = rt.register("head", {"b": np.ones(4)})
        with pytest.raises(CallError, match="Expected rows of no table"), head.gathered(rows={"b": [0]}):
            pass
        with embed.gathered(rows={"table": [3]}), pytest.raises(UnitStateError, match="cannot gather: it is GATHERED"):
            embed.gather()


def test_a_forecast_refuses_rows_of_nothing():
    units = {"embed": {"table": zr.TensorSpec(SHAPE)}}
    settings = {"plan": zr.Plan.zero(3), "optimizer": zr.AdamW(lr=0.1), "size": 2}
    for odd, text in (({"embd": ("table",)}, "got no unit 'embd'"), (("table",), r"got \('table',\)")):
        with pytest.raises(CallError, match=f"Expected rows by unit and table, .*{text}"):
            zr.forecast(units, rows=odd, **settings)
    with pytest.raises(CallError, match="Expected lazy=True, False, or one of them by unit; got 1"):
        zr.forecast(units, rows={"embed": ("table",)}, lazy=1, **settings)


def test_ragged_indices_on_one_rank_are_told_to_all_and_the_run_goes_on():
    def body(rt):
        unit = rt.units["embed"]
        with pytest.raises(ZerortError, match="whole numbers in one dimension"):
            unit.gather({"table": [[1], [2, 3]] if rt.rank == 0 else [1]})
        with unit.gathered(rows={"table": [rt.rank, 4]}) as p:
            return np.array(p["table"])

    for rank, rows in enumerate(run(body)):
        np.testing.assert_array_equal(rows, lot(1).standard_normal(SHAPE)[[rank, 4]])


def test_gradients_of_rows_that_are_not_by_name_are_told_to_all():
    def reduce_and_step(rt):
        rt.units["embed"].reduce(rows=np.ones(3) if rt.rank == 0 else {"table": gradient_of(0, rt.rank)})
        rt.step()

    def body(rt):
        with pytest.raises(ZerortError, match="rows by name, as a mapping; got ndarray"):
            reduce_and_step(rt)

    run(body)


def test_an_infinity_of_a_narrow_table_warns_of_nothing():
    def body(rt):
        values = np.full((2, SHAPE[1]), 60_000, np.float16)  # their sum has no place in it
        rt.units["embed"].reduce(rows={"table": ([1, 1], values)})
        return rt.step()

    assert not any(report.updated for report in run(body, dtype="float16", nonfinite="skip"))


def test_ascending_rows_are_gathered_without_being_sorted_or_copied(monkeypatch):
    """What a binding has made unique is not made so again; other rows are, once."""
    sorts = []
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda *args, **kwargs: sorts.append(1) or unique(*args, **kwargs))

    def body(rt):
        found = []
        for rows in ([2, 5, 20], [20, 2, 2]):
            sorts.clear()
            with rt.units["embed"].gathered(rows={"table": rows}) as p:
                found.append((len(sorts), p["table"].copy()))
        return found

    values = lot(1).standard_normal(SHAPE)
    (ascending, first), (mixed, second) = run(body, ranks=1)[0]
    np.testing.assert_array_equal(first, values[[2, 5, 20]])
    np.testing.assert_array_equal(second, values[[20, 2, 2]])
    assert (ascending, mixed) == (0, 1)
