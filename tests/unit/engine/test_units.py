"""What units hold: states and legal moves, gradients in every form, ties, frozen and empty tensors."""

import numpy as np
import pytest

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError, ClosedError, CollectiveMismatchError, StaleViewError, UnitStateError
from zerort.testing import run_threads
from zerort.testing.tolerance import rounding

F4 = np.float32


def ones(*shape):
    return np.ones(shape, F4)


@pytest.fixture
def rt():
    with open_group(kind="solo") as group, zr.open(group=group, optimizer=zr.SGD(lr=1.0)) as rt:
        yield rt


def test_a_gathered_unit_holds_what_was_registered(rt):
    params = {"w": np.arange(6, dtype=F4).reshape(2, 3), "b": np.arange(3, dtype=F4), "s": np.array(4, F4)}
    unit = rt.register("block", params)
    with unit.gathered() as p:
        assert list(p) == ["w", "b", "s"]
        for name, value in params.items():
            np.testing.assert_array_equal(p[name], value)
            assert p[name].shape == value.shape
    assert unit.names == unit.trainable == ("w", "b", "s")


def test_views_are_read_only_and_lie_in_one_buffer(rt):
    unit = rt.register("block", {"w": ones(4, 4), "b": ones(4)})
    with unit.gathered() as p:
        with pytest.raises(ValueError, match="read-only"):
            p["w"][0, 0] = 2
        first, second = (p[name].__array_interface__["data"][0] for name in ("w", "b"))
        assert second - first == 64 * 4  # the next multiple of the alignment


def test_views_end_with_their_block(rt):
    unit = rt.register("block", {"w": ones(2)})
    with unit.gathered() as p:
        pass
    with pytest.raises(StaleViewError, match=r"Expected 'w' of unit 'block' to be used while the unit is gathered"):
        p["w"]
    assert p.stale
    assert "released" in repr(p)


def test_a_view_of_another_name_is_refused(rt):
    unit = rt.register("block", {"w": ones(2)})
    with unit.gathered() as p, pytest.raises(CallError, match=r"Expected one of the parameters 'w'"):
        p["v"]


@pytest.mark.parametrize(
    ("verbs", "text"),
    [
        (("gather", "gather"), r"Unit 'block' cannot gather: it is GATHERED. Release it first"),
        (("release",), r"Unit 'block' cannot release: it is RELEASED. Gather it first"),
        (("reduce", "reduce"), r"Expected at most 1 reduce\(\) of unit 'block' per step, got one more. Call rt.step"),
        (("reduce", "gradients"), r"Expected at most 1 reduce\(\)"),
    ],
)
def test_verbs_in_the_wrong_order_say_which_comes_first(rt, verbs, text):
    unit = rt.register("block", {"w": ones(2)})
    for verb in verbs[:-1]:
        getattr(unit, verb)()
    with pytest.raises(UnitStateError, match=text):
        getattr(unit, verbs[-1])()


def test_a_step_needs_gradients_and_released_units(rt):
    unit = rt.register("block", {"w": ones(2)})
    with pytest.raises(UnitStateError, match=r"Expected gradients before step\(\), got none"):
        rt.step()
    unit.reduce({"w": ones(2)})
    unit.gather().wait()
    with pytest.raises(UnitStateError, match=r"Expected all units released before step\(\), got block gathered"):
        rt.step()
    unit.release()
    with pytest.raises(UnitStateError, match="got none"):  # the failed step forgot them
        rt.step()
    unit.reduce({"w": ones(2)})
    assert rt.step().updated


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        ({"v": ones(2)}, r"Expected one of 'w', 'cold' of unit 'block'; got 'v'\."),
        ({"w": ones(3)}, r"in the parameter's shape \[2\], got \[3\]\."),
        ({"w": np.ones(2)}, r"in float32, got float64\. .*astype\('float32'\)"),
        ({"w": [1.0, 1.0]}, r"as a NumPy array, got list"),
        ({"cold": ones(2)}, r"'cold' \(unit 'block'\), which is frozen"),
    ],
)
def test_gradients_that_cannot_be_are_refused(rt, gradients, text):
    unit = rt.register("block", {"w": ones(2), "cold": ones(2)}, frozen="cold")
    with pytest.raises(CallError, match=text):
        unit.reduce(gradients)


def test_one_rank_with_a_wrong_gradient_stops_all():
    def body(group):
        with zr.open(group=group, optimizer=zr.SGD(lr=1.0)) as rt:
            unit = rt.register("block", {"w": ones(8)})
            wrong = rt.rank == 1
            if not wrong:
                unit.reduce({"w": ones(8)})
            with pytest.raises(CallError, match=r"shape \[8\], got \[9\]"):
                unit.reduce({"w": ones(9)}) if wrong else rt.step()

    run_threads(3, body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_unit_that_only_some_ranks_reduce_is_named_and_an_empty_reduce_is_the_cure(stage):
    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.SGD(lr=1.0)) as rt:
            one, two = (rt.register(name, {"w": ones(8)}) for name in ("one", "two"))
            one.reduce({"w": ones(8)})
            two.reduce({"w": ones(8)} if rt.rank else {})
            rt.step()
            with two.gathered() as p:
                np.testing.assert_allclose(p["w"], np.full(8, 1 / 3), rtol=rounding("float32", 4))
            one.reduce({"w": ones(8)})
            if rt.rank:
                two.reduce({"w": ones(8)})
            with pytest.raises((UnitStateError, CollectiveMismatchError), match="two"):
                rt.step()

    run_threads(3, body)


@pytest.mark.parametrize("way", ["reduce", "views", "contribute"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_come_in_three_ways(way, stage):
    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.SGD(lr=1.0)) as rt:
            unit = rt.register("block", {"w": np.zeros((3, 5), F4), "b": np.zeros(2, F4)})
            for _ in range(2):
                gradients = {"w": np.full((3, 5), rt.rank, F4), "b": ones(2)}
                if way == "reduce":
                    unit.reduce(gradients)
                elif way == "views":
                    for name, place in unit.gradients().items():
                        place[...] = gradients[name]
                    unit.reduce()
                else:
                    for name, gradient in gradients.items():
                        unit.contribute(name, gradient)
                rt.step()
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["w"], np.full((3, 5), -4.0))  # twice the mean of 0 … 4
                np.testing.assert_array_equal(p["b"], np.full(2, -2.0))

    run_threads(5, body)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_tensors_rest_and_cost_nothing_else(stage):
    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            table = np.arange(64, dtype=np.int64)
            base = rt.register("base", {"w": ones(64), "ids": table}, frozen=True)
            assert rt.memory().gradient == rt.memory().state == 0
            mixed = rt.register("mixed", {"base": ones(64), "lora": ones(64)}, frozen=["base"])
            assert mixed.trainable == ("lora",)
            mixed.reduce({"lora": ones(64)})
            report = rt.step()
            assert report.without_gradient == ()
            assert report.bytes_moved.get("reduce_scatter", 0) in (0, 64 * 4)
            with base.gathered() as p, mixed.gathered() as q:
                np.testing.assert_array_equal(p["ids"], table)
                np.testing.assert_array_equal(p["w"], q["base"])
                assert (q["lora"] < 1).all()

    run_threads(3, body)


def test_a_trainable_tensor_of_a_dtype_that_cannot_be_is_refused(rt):
    with pytest.raises(
        CallError, match=r"Expected 'ids' of unit 'block' in one of float32, bfloat16, float16, float64, got"
    ):
        rt.register("block", {"ids": np.arange(3)})


def test_one_array_under_two_names_is_one_parameter(rt):
    shared = ones(4)
    unit = rt.register("block", {"embed": shared, "head": shared, "own": ones(4)})
    assert unit.nbytes == 2 * 64 * 4
    unit.reduce({"embed": ones(4), "head": ones(4), "own": ones(4)})
    rt.step()
    with unit.gathered() as p:
        np.testing.assert_array_equal(p["embed"], np.full(4, -1.0))  # both gradients
        np.testing.assert_array_equal(p["head"], p["embed"])
        np.testing.assert_array_equal(p["own"], np.zeros(4))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_ties_across_units_are_gathered_together_and_sum_their_gradients(stage, micro_steps):
    def body(group):
        settings = {"optimizer": zr.SGD(lr=1.0), "micro_steps": micro_steps}
        with zr.open(plan=zr.Plan.zero(stage), group=group, **settings) as rt:
            embed = rt.register("embed", {"table": ones(70)})
            block = rt.register("block", {"w": ones(3)})
            head = rt.register("head", {"b": ones(2)}, ties={"w": (embed, "table")})
            assert head.names == ("b", "w")
            assert "head.w" not in {name for unit in rt.units.values() for s in unit.sections for name in s.names}
            with head.gathered() as q, embed.gathered() as p:
                assert np.shares_memory(p["table"], q["w"])
            for _ in range(micro_steps):
                head.reduce({"b": ones(2), "w": ones(70)})
                block.reduce({"w": ones(3)})
                embed.reduce({"table": 2 * ones(70)})
            assert rt.step().without_gradient == ()
            with embed.gathered() as p:
                np.testing.assert_array_equal(p["table"], np.full(70, -2.0))

    run_threads(3, body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tensor_without_a_gradient_anywhere_stays_as_it_is(stage):
    def body(group):
        with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.AdamW(lr=0.1, weight_decay=0.5)) as rt:
            unit = rt.register("block", {"a": ones(100), "b": ones(100), "c": ones(100)})
            for step in range(3):
                given = {"a": ones(100), "c": ones(100)}
                if step == 2 and rt.rank == 1:
                    given["b"] = ones(100)  # one rank has one: zero on the others
                unit.reduce(given)
                report = rt.step()
                assert report.without_gradient == (("block.b",) if step < 2 else ())
            steps = unit.sections[0].state.steps
            assert steps == {"block.a": 3, "block.b": 1, "block.c": 3}
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["a"], p["c"])
                # Adam's first update is lr whatever the size of the gradient
                np.testing.assert_allclose(p["b"], np.full(100, 1 - 0.1 * 0.5 - 0.1), rtol=rounding("float32", 12))

    run_threads(4, body)


def test_empty_tensors_and_empty_units_are_ordinary():
    def body(group):
        for stage in range(4):
            with zr.open(plan=zr.Plan.zero(stage), group=group, optimizer=zr.SGD(lr=1.0)) as rt:
                empty = rt.register("empty", {"w": np.zeros((0, 3), F4)})
                some = rt.register("some", {"none": np.zeros((4, 0), F4), "one": np.array(1.0, F4)})
                nothing = rt.register("nothing", {})
                empty.reduce({"w": np.zeros((0, 3), F4)})
                some.reduce({"none": np.zeros((4, 0), F4), "one": np.array(1.0, F4)})
                nothing.reduce()
                rt.step()
                with empty.gathered() as p, some.gathered() as q, nothing.gathered() as r:
                    assert p["w"].shape == (0, 3)
                    assert q["none"].shape == (4, 0)
                    assert q["one"] == 0
                    assert not list(r)

    run_threads(3, body)


def test_several_runtimes_share_a_group():
    def body(group):
        with (
            zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.SGD(lr=1.0)) as student,
            zr.open(plan=zr.Plan.zero(1), group=group, optimizer=zr.SGD(lr=2.0)) as teacher,
        ):
            units = [student.register("block", {"w": ones(9)}), teacher.register("block", {"w": ones(9)})]
            for unit in units:
                unit.reduce({"w": ones(9)})
            student.step()
            teacher.step()
            with units[0].gathered() as p, units[1].gathered() as q:
                np.testing.assert_array_equal(p["w"], np.zeros(9))
                np.testing.assert_array_equal(q["w"], -np.ones(9))

    run_threads(3, body)


def test_after_close_every_verb_raises(rt):
    unit = rt.register("block", {"w": ones(2)})
    rt.close()
    rt.close()
    for verb in (rt.step, unit.gather, lambda: rt.save("x"), lambda: rt.register("y", {})):
        with pytest.raises(ClosedError, match="Expected an open runtime"):
            verb()
    assert "closed" in repr(rt)
