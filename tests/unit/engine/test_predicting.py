"""Memory that is predicted from layout and history: the mathematics, the file, and real runs of NumPy."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import seams
from hypothesis import given
from hypothesis import strategies as st

import zerort as zr
from zerort.device.host.footprint import Footprint
from zerort.device.host.memory import fields_of
from zerort.engine.sizing import predicting
from zerort.engine.sizing.history import MemoryHistory, Peak, model_key
from zerort.engine.sizing.predicting import besides, prediction
from zerort.errors import CallError, PlanError
from zerort.testing import run_job, run_threads

MIB = 1 << 20


def peak(batch, rest, **other):
    facts = {"model": "m", "memory": "host", "plan": "p", "ranks": 2, "layout": 100 * MIB, "idle": 50 * MIB}
    return Peak(batch=float(batch), besides=int(rest), **{**facts, **other})


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**7),
    st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True),
    st.integers(1, 4000),
)
def test_what_grows_with_the_batch_is_told_from_what_does_not(fixed, each, sizes, asked):
    rest, error = besides([peak(size, fixed + each * size) for size in sizes], asked)
    assert rest == pytest.approx(fixed + each * asked, rel=1e-6, abs=10)
    assert 0.05 * rest <= error <= 0.0501 * rest + 1e3


@given(st.lists(st.integers(1, 64), min_size=3, max_size=8, unique=True), st.data())
def test_peaks_that_scatter_widen_the_interval(sizes, data):
    noise = [data.draw(st.integers(-20, 20)) for _ in sizes]
    peaks = [peak(size, (300 + 4 * size + one) * MIB) for size, one in zip(sizes, noise, strict=True)]
    exact = [peak(size, (300 + 4 * size) * MIB) for size in sizes]
    rest, error = besides(peaks, 100)
    assert error >= besides(exact, 100)[1] - 0.06 * abs(rest - besides(exact, 100)[0])


def test_one_batch_size_is_told_apart_by_what_was_there_before_the_step():
    peaks = [peak(8, 90 * MIB)]  # 50 without a step, so 5 for a sample
    assert besides(peaks, 16)[0] == 130 * MIB
    assert besides(peaks, 8) == (90 * MIB, pytest.approx(4.5 * MIB))
    assert besides(peaks, 16)[1] == pytest.approx(6.5 * MIB + 10 * MIB)
    assert besides([peak(0, 90 * MIB)], 16)[0] == 90 * MIB  # of which nobody knows the size
    assert besides([*peaks, peak(0, 90 * MIB)], 16) == besides(peaks, 16)
    assert prediction([*peaks, peak(0, 90 * MIB)], batch=16, plan="p", layout=100 * MIB).peaks == 1


def test_the_largest_peak_of_a_batch_size_counts_and_batches_never_save_memory():
    peaks = [peak(4, 80), peak(4, 100, plan="other"), peak(8, 60)]
    assert besides(peaks, 100)[0] == pytest.approx(80)  # the mean of 100 and 60


def test_a_prediction_adds_the_layout_and_says_whether_it_fits():
    peaks = [peak(4, 60 * MIB), peak(8, 80 * MIB)]
    found = prediction(peaks, batch=12, plan="q", layout=200 * MIB, room=290 * MIB)
    assert (found.likely, found.layout, found.fits) == (300 * MIB, 200 * MIB, False)
    assert found.high - found.likely == pytest.approx(0.05 * 100 * MIB + 0.1 * 100 * MIB + 0.05 * 300 * MIB, abs=2)
    seen = prediction(peaks, batch=8, plan="p", layout=100 * MIB)
    assert seen.high - seen.likely == pytest.approx(0.05 * 80 * MIB, abs=2)  # a layout that was run
    assert replace(found, room=300 * MIB).fits
    assert str(found) == "300MiB (270MiB to 330MiB) for a batch of 12, 200MiB of it laid out; does not fit: 290MiB"


def test_a_file_keeps_what_tells_something_and_is_read_again(tmp_path):
    path = str(tmp_path / "peaks.jsonl")
    history = MemoryHistory(path)
    told = [history.add(one, write=True) for one in (peak(4, 1000), peak(4, 1005), peak(4, 1100), peak(8, 900))]
    assert told == [True, False, True, True]
    history.add(peak(8, 5000), write=False)
    lines = [json.loads(line)["besides"] for line in (tmp_path / "peaks.jsonl").read_text().splitlines()]
    assert lines == [1000, 1100, 900]
    assert [one.besides for one in MemoryHistory(path).of("m", memory="host")] == [1100, 900]
    assert MemoryHistory(path).of("m", memory="gpu") == []


def test_a_batch_of_its_own_in_every_step_does_not_make_the_file_grow(tmp_path):
    history = MemoryHistory(str(tmp_path / "peaks.jsonl"))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        batch = int(rng.integers(500, 5000))  # tokens
        history.add(peak(batch, 100 * MIB + 1000 * batch), write=True)
    lines = (tmp_path / "peaks.jsonl").read_text().splitlines()
    assert len(lines) <= 3 * 16 * 3.4
    assert besides(history.of("m", memory="host"), 8000)[0] == pytest.approx(100 * MIB + 8e6, rel=1e-6)


@pytest.mark.parametrize("torn", ['{"model": "5c0e', '{"mo', '{"model": "m", "memory": "host", "batch": 8'])
def test_a_line_that_was_not_written_whole_is_left_out_and_goes_with_the_next_one(tmp_path, torn):
    path = tmp_path / "peaks.jsonl"
    MemoryHistory(str(path)).add(peak(4, 1000), write=True)
    whole = path.read_text()
    path.write_text(whole + torn)
    with pytest.warns(RuntimeWarning, match=r"Expected .*peaks.jsonl to end with a whole line, got"):
        history = MemoryHistory(str(path))
    assert path.read_text() == whole + torn  # reading changes nothing
    history.add(peak(8, 2000), write=True)
    history.add(peak(16, 3000), write=True)
    assert [one.besides for one in MemoryHistory(str(path)).of("m", memory="host")] == [1000, 2000, 3000]
    path.write_text(whole.rstrip("\n"))  # nothing but its end is missing
    MemoryHistory(str(path)).add(peak(8, 2000), write=True)
    assert [one.besides for one in MemoryHistory(str(path)).of("m", memory="host")] == [1000, 2000]


def test_a_kernel_that_does_not_count_pages_is_named(tmp_path):
    def no_rollup(path):
        if "rollup" in path:
            raise FileNotFoundError(path)
        return fields_of(path)

    for lists in (no_rollup, lambda path: [one for one in fields_of(path) if one[0] != "Pss_File"]):
        with (
            seams.inside(Footprint, fields_of=lists),
            pytest.raises(CallError, match=r"Expected a kernel that counts .* without history="),
        ):
            zr.open(history=tmp_path / "p")


@pytest.mark.parametrize("line", ["{", "3", '{"model": "m"}', json.dumps({**json.loads("{}"), "batch": "8"})])
def test_another_file_is_refused_on_every_rank(tmp_path, line):
    (tmp_path / "other").write_text(f"{line}\n")

    def body(group):
        with pytest.raises(CallError, match=r"Expected the peak of a step as JSON in line 1 of .*other, got"):
            zr.open(group=group, history=tmp_path / "other")

    run_threads(2, body)


def test_a_model_is_its_shapes_whatever_their_names():
    one = {"a": {"w": zr.TensorSpec((3, 4)), "b": zr.TensorSpec((4,))}}
    other = {"x": {"p": zr.TensorSpec((4,))}, "y": {"q": zr.TensorSpec((3, 4))}}
    assert model_key(one) == model_key(other)
    assert model_key(one) != model_key({"a": {"w": zr.TensorSpec((3, 4), "bfloat16"), "b": zr.TensorSpec((4,))}})


def test_a_footprint_has_what_was_there_for_a_moment():
    footprint = Footprint()
    footprint.restart()
    before, _ = footprint.now_and_most()
    moment = np.ones(64 * MIB, np.uint8)
    del moment
    after, most = footprint.now_and_most()
    assert most - before > 60 * MIB
    assert after - before < 30 * MIB
    footprint.restart()
    assert footprint.now_and_most()[1] - before < 30 * MIB


def steps(rt, count, *, batch=1):
    for _ in range(count):
        for unit in rt.units.values():
            unit.reduce({name: np.ones(spec.shape, spec.dtype) for name, spec in unit.tensors.items()})
        rt.step(weight=batch)


TIES = {"b": {"t": ("a", "w"), "s": ("a", "v")}}


def registered(group, path, **options):
    rt = zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=0.1), group=group, history=path, **options)
    first = rt.register("a", {"w": np.ones((64, 65), np.float32), "v": np.ones(7, np.float32)})
    ties = {"t": (first, "w"), "s": (first, "v")}
    rt.register("b", {"w": np.ones(5000, np.float32), "c": np.ones(3)}, ties=ties, frozen="c")
    return rt


def test_layouts_of_other_plans_are_those_of_a_forecast(tmp_path):
    def body(group):
        with registered(group, tmp_path / "p") as rt:
            for _ in range(3):
                rt.units["b"].reduce({"t": np.ones((64, 65), "f4"), "w": np.ones(5000, "f4")})
                rt.units["a"].reduce({"w": np.ones((64, 65), "f4")})
                rt.step(weight=4)
            units = {name: unit.tensors for name, unit in rt.units.items()}
            asked = {"optimizer": zr.AdamW(lr=0.1), "size": 2, "frozen": {"b": "c"}, "ties": TIES}
            plans = [zr.Plan.zero(stage) for stage in range(4)]
            every = [rt.predict(plan=plan) for plan in plans]
            told = [
                max(zr.forecast(units, plan=plan, rank=rank, **asked).in_memory for rank in range(2)) for plan in plans
            ]
            assert rt.predict().layout == rt.predict(plan=zr.Plan.zero(3)).layout
            return [one.layout for one in every], told, every

    (layouts, told, every), (_, _, others) = run_threads(2, body)
    assert layouts == told
    assert [replace(one, room=None) for one in every] == [replace(one, room=None) for one in others]
    assert {one.batch for one in every} == {4.0}


def test_what_cannot_be_predicted_is_refused_on_every_rank(tmp_path):
    def body(group):
        with zr.open(group=group) as rt, pytest.raises(CallError, match=r"zr\.open\(history="):
            rt.predict()
        with zr.open(group=group, history=tmp_path / "p") as rt:
            rt.register("a", {"w": np.ones(10)})
            with pytest.raises(CallError, match=r"Expected steps of this model in .*got none"):
                rt.predict()
            steps(rt, 2)
            for batch in (-1, float("nan"), "8", True):
                with pytest.raises(CallError, match="Expected batch to be a number of samples"):
                    rt.predict(batch=batch)
            with pytest.raises(CallError, match="Expected a plan such as"):
                rt.predict(plan=3)
            with pytest.raises(PlanError):
                rt.predict(plan=zr.Plan.fit(host="1KiB"))
            with zr.open(group=group, history=tmp_path / "unknown") as other:
                other.register("a", {"w": np.ones(10)})
                steps(other, 2, batch=None)
                assert other.predict().peaks == 1
                with pytest.raises(CallError, match=r"Expected steps of a known batch size in .*unknown to predict"):
                    other.predict(batch=8)
            return rt.predict(batch=3).peaks

    assert run_threads(2, body) == [1, 1]


def test_hosts_with_files_of_their_own_predict_what_the_first_one_knows(tmp_path):
    """The first one has seen batches of 64, the second of 8, the third none."""
    key = model_key({"a": {"w": zr.TensorSpec((10,), "float64")}})
    MemoryHistory(str(tmp_path / "0")).add(peak(64, 1 << 50, model=key), write=True)
    MemoryHistory(str(tmp_path / "1")).add(peak(8, 1 << 20, model=key), write=True)

    def body(group):
        with zr.open(group=group, history=tmp_path / "p") as rt:
            rt.context.peaks.history = MemoryHistory(str(tmp_path / str(group.rank)))
            rt.register("a", {"w": np.ones(10)})
            first = rt.predict()
            rt.take(zr.data.Order(length=400, batch=40))
            return first.batch, first.peaks, rt.context.peaks.has_warned

    with warnings.catch_warnings(record=True):  # of all threads: it is the process that has filters
        warnings.simplefilter("always")
        assert run_threads(3, body) == [(64.0, 1, True)] * 3


def test_tables_of_rows_are_counted_under_another_plan_as_they_are(tmp_path):
    def body(group):
        with zr.open(plan=zr.Plan.zero(1), optimizer=zr.AdamW(lr=0.1), group=group, history=tmp_path / "p") as rt:
            rt.register("e", {"t": np.ones((2000, 16), "f4"), "w": np.ones(300, "f4")}, rows=("t",))
            rt.register("l", {"t": np.ones((1000, 16), "f4")}, rows=("t",), lazy=True)
            touched = {"t": (np.arange(3), np.ones((3, 16), "f4"))}
            for _ in range(2):
                rt.units["e"].reduce({"w": np.ones(300, "f4")}, rows=touched)
                rt.units["l"].reduce(rows=touched)
                rt.step(weight=3)
            under = predicting._layout_under(rt.context, rt.units, zr.Plan.zero(1))
            return under, rt.memory().in_memory

    for under, counted in run_threads(2, body):
        assert under == counted


def test_a_file_that_cannot_be_written_does_not_stop_a_run(tmp_path):
    def body(group):
        with zr.open(group=group, history=tmp_path / "p") as rt:
            rt.register("a", {"w": np.ones(10)})
            (tmp_path / "p").mkdir()
            with pytest.warns(RuntimeWarning, match="Expected to write a step's memory to .*The run goes on"):
                steps(rt, 4)
            return rt.predict().peaks

    assert run_threads(1, body) == [1]


def test_a_batch_that_is_predicted_not_to_fit_is_told_once_with_what_would(tmp_path):
    """A sample takes 1 MiB; there are 100 MiB beside what the process takes before."""
    order = zr.data.Order(length=4000, batch=400)
    spec = {"a": {"w": zr.TensorSpec((10,), "float64")}}
    now, _ = Footprint().now_and_most()
    history = MemoryHistory(str(tmp_path / "p"))
    for batch in (1, 2):
        history.add(peak(batch, now + batch * MIB, model=model_key(spec), layout=0), write=True)

    def body(group):
        with zr.open(group=group, history=tmp_path / "p") as rt:
            rt.register("a", {"w": np.ones(10)})
            rt.take(order)
            rt.take(order)
            rt.take(zr.data.Order(length=4000, batch=4, name="small"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with seams.inside(predicting.predict, available_nbytes=lambda: 200 * MIB, left_of_limits=lambda: None):
            run_threads(2, body)
    told = [str(one.message) for one in caught if "Expected room for steps" in str(one.message)]
    assert len(told) == 1
    assert "Expected room for steps of 200 samples at once" in told[0]
    assert "micro_steps=2" in told[0]
    less = int(told[0].split("batches of at most ")[1].split()[0])
    assert 60 <= less <= 140


WORKER = """
import sys, numpy as np, zerort as zr
stage, batch, path, *ask = sys.argv[1:]
batch = int(batch)
with zr.open(plan=zr.Plan.zero(int(stage)), optimizer=zr.AdamW(lr=0.1), history=path) as rt:
    units = [rt.register(f"u{at}", {"w": np.ones((1024, 512), np.float32)}) for at in range(6)]
    for _ in range(4):
        kept = []
        for unit in units:
            with unit.gathered() as p:
                kept.append(np.full((batch * 256, 512), p["w"][0, 0]))     # activations: batch * 512 KiB each
        for unit, y in zip(units, kept):
            unit.reduce({"w": np.full((1024, 512), y[0, 0])})
        del kept, y
        rt.step(weight=batch)
    if ask:
        seen = rt.predict(batch=28, plan=zr.Plan.zero(3))
        if rt.rank == 0:
            print("PREDICTED", seen.low, seen.likely, seen.high)
"""


@pytest.mark.slow
def test_a_batch_size_and_a_plan_that_were_not_run_are_predicted_within_a_tenth(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    seen, measured = tmp_path / "seen", tmp_path / "measured"
    for stage, batch, path, *ask in ((1, 8, seen), (1, 16, seen, "ask"), (3, 28, measured)):
        result = run_job(2, [script, str(stage), str(batch), path, *ask], timeout=60)
        assert result.code == 0, result.output
        if ask:
            low, likely, high = map(int, result.output.split("PREDICTED")[1].split()[:3])
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    found = max(one["layout"] + one["besides"] for one in lines)
    assert abs(likely / found - 1) < 0.1, (likely, found)
    assert 0.95 * low <= found <= 1.05 * high  # on another machine, by its own allocator
