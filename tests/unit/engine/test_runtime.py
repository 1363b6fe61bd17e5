"""What a runtime holds: ranks agree or all raise, nothing is skipped silently, bytes are those of the forecast."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerort as zr
from zerort.comm import open_group
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, NonFiniteError, PlanError
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS, rounding

F4 = np.float32
STAGES = [0, 1, 2, 3]


def ones(*shape):
    return np.ones(shape, F4)


# -- opening and registering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        lambda rank: {"plan": zr.Plan.zero(3 if rank == 1 else 2)},
        lambda rank: {"optimizer": zr.AdamW(lr=0.1 * (1 + rank))},
        lambda rank: {"prefetch": rank},
        lambda rank: {"param_groups": [zr.ParameterGroup("*.b", weight_decay=0.1 * rank)]},
    ],
    ids=["plan", "optimizer", "options", "groups"],
)
def test_ranks_that_open_differently_all_raise(arguments):
    def body(group):
        with pytest.raises(PlanError, match="to be the same on every rank"):
            zr.open(group=group, **arguments(group.rank))

    run_threads(3, body)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"plan": 3}, CallError, "Expected plan to be a Plan such as zr.Plan.zero"),
        ({"optimizer": "adam"}, CallError, "Expected optimizer to be one such as zr.AdamW"),
        ({"prefetch": -1}, CallError, "Expected prefetch to be an int of at least 0"),
        ({"micro_steps": 0}, CallError, "Expected micro_steps"),
        ({"clip_norm": 0.0}, CallError, "Expected clip_norm to be a number above 0"),
        ({"nonfinite": "ignore"}, CallError, "Expected nonfinite to be one of 'raise', 'skip'"),
        ({"shard_weights": [1.0, 2.0]}, PlanError, "Expected one weight for each of 3 ranks"),
        ({"scratch": []}, CallError, "a directory or several"),
        ({"scratch": ["/tmp", "/tmp/"]}, CallError, "different directories"),
        ({"offload": {"depth": 3}}, CallError, "Expected offload to be OffloadOptions"),
        ({"param_groups": [zr.ParameterGroup("*", weight_decy=0.0)]}, CallError, "weight_decy"),
    ],
)
def test_arguments_that_cannot_be_are_refused_on_every_rank(arguments, error, text):
    def body(group):
        with pytest.raises(error, match=text):
            zr.open(group=group, **arguments)
        group.barrier().wait()  # the group is left as it was

    run_threads(3, body)


def test_one_rank_with_a_bad_argument_stops_all():
    def body(group):
        with pytest.raises(CallError, match="Expected prefetch"):
            zr.open(group=group, prefetch=-1 if group.rank == 2 else 1)

    run_threads(3, body)


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (lambda rt: rt.register("b", {"w": ones(2 + rt.rank)}), r"Expected what is registered as 'b' to be the same"),
        (
            lambda rt: rt.register("b", {"w": ones(2) * rt.rank}),
            r"Expected the same initial values of unit 'b'.*rank 1",
        ),
        (
            lambda rt: rt.register("b", {"w": [1.0] if rt.rank else ones(1)}),
            r"as a NumPy array or a TensorSpec, got list",
        ),
        (lambda rt: rt.register("a", {"w": ones(2)}), r"got 'a', which is registered"),
        (lambda rt: rt.register(3, {"w": ones(2)}), r"Expected a unit's name"),
        (lambda rt: rt.register("b", [ones(2)]), r"as a mapping from names to arrays, got list"),
        (lambda rt: rt.register("b", {}, ties={"w": (rt.units["a"], "v")}), r"Expected to tie 'w' to a parameter"),
    ],
)
def test_what_cannot_be_registered_is_refused_on_every_rank(register, text):
    def body(group):
        with zr.open(group=group) as rt:
            rt.register("a", {"w": ones(2)})
            with pytest.raises(CallError, match=text):
                register(rt)
            rt.register("c", {"w": ones(2)})  # and one can go on

    run_threads(3, body)


def test_broadcast_takes_the_values_of_rank_0():
    def body(group):
        with zr.open(group=group) as rt:
            value = np.full((3, 3), rt.rank + 7, F4) if rt.rank != 1 else TensorSpec((3, 3))
            unit = rt.register("a", {"w": value}, broadcast=True)
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["w"], np.full((3, 3), 7))

    run_threads(3, body)


def test_a_group_that_matches_nothing_is_said():
    groups = [zr.ParameterGroup("*.bais", weight_decay=0.0)]
    with open_group(kind="solo") as group, zr.open(group=group, param_groups=groups) as rt:
        unit = rt.register("a", {"w": ones(2)})
        unit.reduce({"w": ones(2)})
        with pytest.warns(UserWarning, match=r"match no parameter: \*\.bais\. Names are like 'a\.w'"):
            rt.step()
        unit.reduce({"w": ones(2)})
        rt.step()  # once is enough


# -- steps that do not update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_on_one_rank_is_named_on_all_and_changes_nothing(stage, bad):
    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            unit = rt.register("block", {"a": ones(100), "b": ones(100)})
            gradient = {"a": ones(100), "b": ones(100)}
            if rt.rank == 1:
                gradient["b"][57] = bad
            unit.reduce(gradient)
            with pytest.raises(NonFiniteError, match=r"got NaN or infinity in the gradient of 'block.b' on rank 1\."):
                rt.step()
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["a"], ones(100))
                np.testing.assert_array_equal(p["b"], ones(100))
            assert rt.updates == 0
            unit.reduce({"a": ones(100), "b": ones(100)})
            assert rt.step().update == 1  # and one can go on

    run_threads(3, body)


def test_a_nan_can_be_skipped_and_is_reported():
    def body(group):
        with zr.open(group=group, nonfinite="skip", optimizer=zr.SGD(lr=1.0)) as rt:
            unit = rt.register("block", {"a": ones(100)})
            unit.reduce({"a": ones(100) * (np.nan if rt.rank == 2 else 1)})
            report = rt.step()
            assert not report.updated
            assert report.why == "NaN or infinity in the gradient of 'block.a' on rank 2"
            assert "not updated" in str(report)

    run_threads(3, body)


@pytest.mark.parametrize("way", ["views", "micro_steps"])
def test_a_nan_is_found_whichever_way_it_comes(way):
    def body(group):
        with zr.open(group=group, nonfinite="skip", micro_steps=2) as rt:
            unit = rt.register("block", {"a": ones(100)})
            for turn in range(2):
                bad = np.nan if turn == 1 and rt.rank == 1 else 1.0
                if way == "views":
                    unit.gradients()["a"][:] = bad
                    unit.reduce()
                else:
                    unit.reduce({"a": np.full(100, bad, F4)})
            assert "'block.a' on rank 1" in rt.step().why

    run_threads(2, body)


def test_a_sum_that_overflows_is_named_by_tensor():
    def body(group):
        with zr.open(group=group, nonfinite="skip") as rt:
            unit = rt.register("block", {"a": np.ones(10, np.float16), "b": np.ones(100, np.float16)})
            huge = np.full(100, 6e4, np.float16)
            unit.reduce({"a": np.ones(10, np.float16), "b": huge})
            assert rt.step().why == "NaN or infinity in the gradient of 'block.b', summed over the ranks"

    run_threads(3, body)


def test_dynamic_loss_scaling_backs_off_and_grows():
    def body(group):
        scale = zr.LossScale(initial=4.0, interval=2)
        with zr.open(group=group, loss_scale=scale, optimizer=zr.SGD(lr=1.0)) as rt:
            unit = rt.register("block", {"w": np.zeros(3, np.float16)})
            told = []
            for bad in (False, True, False, False, False):
                gradient = np.full(3, rt.loss_scale, np.float16)
                unit.reduce({"w": gradient * np.float16(np.inf) if bad and rt.rank == 0 else gradient})
                report = rt.step()
                told.append((report.loss_scale, report.updated))
            assert told == [(4, True), (4, False), (2, True), (2, True), (4, True)]
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["w"], np.full(3, -4.0))  # unscaled

    run_threads(2, body)


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    zr.SGD(lr=0.1, momentum=0.9, nesterov=True),
    zr.Lion(lr=0.01, weight_decay=0.1),
    zr.Adafactor(lr=0.1),
    zr.AdamW(lr=0.1),
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_optimizer_gives_the_same_under_every_plan(optimizer, dtype):
    """To the bit; Adafactor sums over ranks in another order: over steps in float64, in others the first step."""
    adafactor = isinstance(optimizer, zr.Adafactor)
    count = 1 if adafactor and dtype != "float64" else 4
    bound = {"float64": OVER_STEPS, "float32": rounding("float32", 12), "bfloat16": 2.0**-7}[dtype]  # bf16: a digit
    kind = numpy_dtype(dtype)
    rng = np.random.default_rng(3)
    start = {"w": rng.standard_normal((17, 9)).astype(kind), "t": rng.standard_normal((3, 4, 5)).astype(kind)}
    start["b"] = rng.standard_normal(70).astype(kind)
    steps = [
        {name: rng.standard_normal(value.shape).astype(kind) for name, value in start.items()} for _ in range(count)
    ]

    def train(group, stage):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=optimizer, gradient_dtype="float32") as rt:
            unit = rt.register("block", start)
            for gradients in steps:
                unit.reduce(gradients)  # the same on every rank, so their mean is exact
                rt.step()
            with unit.gathered() as p:
                return {name: np.array(p[name]).astype(np.float64) for name in p}

    with open_group(kind="solo") as solo:
        expected = train(solo, 0)
    for stage in STAGES:
        for found in run_threads(4, lambda group, stage=stage: train(group, stage)):
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=bound if adafactor else 0, err_msg=name)


def test_parameter_groups_and_schedules_reach_their_tensors():
    with open_group(kind="solo") as group:
        groups = [zr.ParameterGroup("*.b", lr=lambda update: 10.0 * update), zr.ParameterGroup("a.*", weight_decay=1.0)]
        with zr.open(group=group, optimizer=zr.SGD(lr=1.0), param_groups=groups) as rt:
            one, two = (rt.register(name, {"w": ones(3), "b": ones(3)}) for name in ("a", "c"))
            for unit in (one, two):
                unit.reduce({"w": ones(3), "b": ones(3)})
            assert rt.step().lr == 1.0
            with one.gathered() as p, two.gathered() as q:
                assert (p["w"][0], p["b"][0], q["w"][0], q["b"][0]) == (-1.0, -9.0, 0.0, -9.0)


# -- bytes -------------------------------------------------------------------------------------------------------------

SPECS = {
    "embed": {"table": TensorSpec((50, 7)), "ids": TensorSpec((9,), "int64")},
    "block": {"w": TensorSpec((33, 33), "bfloat16"), "b": TensorSpec((33,), "bfloat16"), "n": TensorSpec((33,))},
    "empty": {"none": TensorSpec((0, 4))},
    "wide": {"w": TensorSpec((21, 5), "float64"), "b": TensorSpec((40,), "float64"), "n": TensorSpec((3,))},
}


@settings(max_examples=25)
@given(
    stage=st.sampled_from(STAGES),
    size=st.integers(1, 5),
    optimizer=st.sampled_from([*OPTIMIZERS, zr.SGD(lr=0.1)]),
    weighted=st.booleans(),
    micro_steps=st.sampled_from([1, 2]),
    accumulate=st.sampled_from([None, "local"]),
    gradient_dtype=st.sampled_from([None, "float32"]),
)
def test_bytes_at_rest_are_those_of_the_forecast(
    stage, size, optimizer, weighted, micro_steps, accumulate, gradient_dtype
):
    weights = [float(rank % 3 + 1) for rank in range(size)] if weighted else None
    told = {
        "shard_weights": weights,
        "gradient_dtype": gradient_dtype,
        "micro_steps": micro_steps,
        "accumulate": accumulate,
    }

    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), optimizer=optimizer, group=group, **told) as rt:
            for name, tensors in SPECS.items():
                rt.register(name, tensors, frozen="ids")
            return rt.memory()

    for rank, found in enumerate(run_threads(size, body)):
        expected = zr.forecast(
            SPECS, plan=zr.Plan.zero(stage), optimizer=optimizer, size=size, rank=rank, frozen="ids", **told
        )
        for part in ("parameter", "gradient", "state"):
            assert getattr(found, part) == getattr(expected, part), (part, rank)


def test_zero_3_on_n_ranks_holds_an_nth():
    def body(group):
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            rt.register("block", {"w": TensorSpec((1024, 1024))})
            return rt.memory()

    for memory in run_threads(4, body):
        assert (memory.parameter, memory.gradient, memory.state) == (1 << 20, 1 << 20, 2 << 20)
