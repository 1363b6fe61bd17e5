"""Norms by unit, gradients before the step, learning rates set by hand, optimizers of parameter groups."""

from dataclasses import dataclass

import numpy as np
import pytest

import zerort as zr
from zerort.comm import open_group
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, CheckpointError, PlanError, UnitStateError
from zerort.optim import ElementwiseOptimizer, StateSpec
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

F8 = np.float64
STAGES = [0, 1, 2, 3]
RNG = np.random.default_rng(0)
SHAPES = {"a": {"w": (13, 7), "b": (7,)}, "c": {"w": (70,), "head": (5, 3)}}
START = {unit: {name: RNG.standard_normal(shape) for name, shape in SHAPES[unit].items()} for unit in SHAPES}


def gradients_of(step, rank):
    rng = np.random.default_rng([step, rank])
    return {unit: {name: rng.standard_normal(shape) for name, shape in SHAPES[unit].items()} for unit in SHAPES}


def mean_gradients(step, size):
    each = [gradients_of(step, rank) for rank in range(size)]
    return {u: {n: sum(one[u][n] for one in each) / size for n in SHAPES[u]} for u in SHAPES}


def register(rt):
    return {unit: rt.register(unit, values) for unit, values in START.items()}


def reduce_all(rt, units, step):
    for name, gradients in gradients_of(step, rt.rank).items():
        units[name].reduce(gradients)


def parameters(units):
    found = {}
    for name, unit in units.items():
        with unit.gathered() as p:
            found |= {f"{name}.{local}": np.array(p[local]) for local in p}
    return found


def same(found, expected, *, rtol=OVER_STEPS):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol, err_msg=name)


# -- norms by unit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"virtual_shards": 3}])
@pytest.mark.parametrize("stage", STAGES)
def test_norms_by_unit_are_those_of_the_averaged_gradients(stage, settings):
    expected = {
        unit: np.sqrt(sum((value**2).sum() for value in gradients.values()))
        for unit, gradients in mean_gradients(0, 3).items()
    }

    def body(group):
        with zr.open(group=group, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=1.0), **settings) as rt:
            units = register(rt)
            rt.register("frozen", {"w": np.ones(3)}, frozen=True)
            rt.register("unused", {"w": np.ones(3)})
            reduce_all(rt, units, 0)
            report = rt.step()
            return dict(report.norms), report.norms.matching("*"), report.norms.matching("x*"), report.grad_norm

    for found, together, none, norm in run_threads(3, body):
        same(found, expected)
        assert together == pytest.approx(norm, rel=1e-14)
        assert none == 0.0


def test_norms_by_unit_are_unscaled_and_name_the_unit_that_overflowed():
    with open_group(kind="solo") as group, zr.open(group=group, loss_scale=zr.LossScale(initial=8.0)) as rt:
        units = register(rt)
        for name, gradients in gradients_of(0, 0).items():
            units[name].reduce({local: 8 * value for local, value in gradients.items()})
        norms = rt.step().norms
        plain = {n: np.sqrt(sum((v**2).sum() for v in g.values())) for n, g in gradients_of(0, 0).items()}
        same(dict(norms), plain)
        bad = {local: np.full(shape, np.inf) for local, shape in SHAPES["c"].items()}
        units["a"].reduce(gradients_of(1, 0)["a"])
        units["c"].reduce(bad)
        report = rt.step()
        assert not report.updated
        assert np.isfinite(report.norms["a"])
        assert not np.isfinite(report.norms["c"])


# -- gradients before the step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", [zr.Plan.zero(stage) for stage in STAGES] + [zr.Plan.zero(3, gradient=zr.Tier.NVME)], ids=str
)
def test_gradients_before_the_step_are_what_it_uses(plan, tmp_path):
    """Looking at them changes nothing: the step gives the bits of one that nobody looked at."""

    def run(group, *, look):
        with zr.open(group=group, plan=plan, optimizer=zr.AdamW(lr=0.1), scratch=str(tmp_path)) as rt:
            units = register(rt)
            found = {}
            for step in range(2):
                reduce_all(rt, units, step)
                if look:
                    found = {name: unit.reduced_gradients() for name, unit in units.items()}
                rt.step()
            return found, parameters(units)

    looked = run_threads(3, lambda group: run(group, look=True))
    blind = run_threads(3, lambda group: run(group, look=False))
    for (found, after), (_, expected) in zip(looked, blind, strict=True):
        for unit, gradients in mean_gradients(1, 3).items():
            same(found[unit], gradients)
        same(after, expected, rtol=0)


def test_gradients_before_the_step_of_several_micro_steps_and_ties():
    def body(group):
        with zr.open(group=group, micro_steps=2, loss_scale=zr.LossScale(initial=4.0)) as rt:
            table = rt.register("table", {"w": np.ones((4, 2))})
            head = rt.register("head", {"b": np.ones(4)}, ties={"w": (table, "w")})
            for _ in range(2):
                table.reduce({"w": np.full((4, 2), 4.0 * (rt.rank + 1))})
                head.reduce({"w": np.full((4, 2), 8.0), "b": np.full(4, 12.0)})
            found = head.reduced_gradients()
            assert (found["w"] == 1.5 + 2.0).all()
            assert (found["b"] == 3.0).all()
            assert rt.step().updated

    run_threads(2, body)


def test_gradients_are_asked_for_after_the_last_reduce():
    def body(group):
        with zr.open(group=group, micro_steps=2) as rt:
            unit = rt.register("a", {"w": np.ones(3)})
            unit.reduce({"w": np.ones(3)})
            with pytest.raises(UnitStateError, match=r"before reduced_gradients\(\), got 1 of 2"):
                unit.reduced_gradients()

    run_threads(1, body)


# -- learning rates by hand --------------------------------------------------------------------------------------------


def train(rt, units, first, count):
    rates = []
    for step in range(first, first + count):
        reduce_all(rt, units, step)
        rates.append(rt.step().lr)
    return rates


def test_a_rate_set_by_hand_holds_until_it_is_given_back():
    schedule = zr.warmup_linear(1.0, warmup=2, total=10)
    own = zr.ParameterGroup("*.b", lr=0.5)
    follows = zr.ParameterGroup("*.head", weight_decay=0.1)
    settings = {"optimizer": zr.SGD(lr=schedule), "param_groups": [own, follows]}
    with open_group(kind="solo") as group, zr.open(group=group, **settings) as rt:
        units = register(rt)
        before = parameters(units)
        rt.set_lr(0.25)
        assert train(rt, units, 0, 1) == [0.25]
        after, g = parameters(units), gradients_of(0, 0)
        np.testing.assert_allclose(after["a.w"], before["a.w"] - 0.25 * g["a"]["w"])
        np.testing.assert_allclose(after["a.b"], before["a.b"] - 0.5 * g["a"]["b"])  # a rate of its own
        expected = before["c.head"] - 0.25 * (g["c"]["head"] + 0.1 * before["c.head"])
        np.testing.assert_allclose(after["c.head"], expected)
        rt.set_lr(0.0, group=own)
        train(rt, units, 1, 1)
        np.testing.assert_array_equal(parameters(units)["a.b"], after["a.b"])
        rt.set_lr(None)
        assert train(rt, units, 2, 1) == [schedule(3)]
        rt.set_lr(None, group=own)
        kept = parameters(units)["a.b"]
        train(rt, units, 3, 1)
        np.testing.assert_allclose(parameters(units)["a.b"], kept - 0.5 * gradients_of(3, 0)["a"]["b"])


def test_ranks_that_set_different_rates_all_raise():
    def body(group):
        with zr.open(group=group, optimizer=zr.SGD(lr=1.0)) as rt:
            units = register(rt)
            rt.set_lr(0.1 * (1 + rt.rank))
            reduce_all(rt, units, 0)
            with pytest.raises(UnitStateError, match=r"same learning rates on every rank.*rt\.set_lr alike"):
                rt.step()

    run_threads(2, body)


def test_rates_that_cannot_be_are_refused():
    with open_group(kind="solo") as group, zr.open(group=group) as rt:
        for lr in (-1.0, np.nan, "fast", True):
            with pytest.raises(CallError, match="Expected lr"):
                rt.set_lr(lr)
        with pytest.raises(CallError, match=r"parameter groups that the runtime was opened with, got ParameterGroup"):
            rt.set_lr(0.1, group=zr.ParameterGroup("*"))


# -- an optimizer of a group's own -------------------------------------------------------------------------------------

MIXES = {
    "sgd": zr.SGD(lr=0.1, momentum=0.9),
    "lion": zr.Lion(lr=0.01),
    "adafactor": zr.Adafactor(lr=0.1),
}


def updated_alone(optimizer, names):
    """The parameters of some tensors after three updates by one optimizer on one rank, with the mean of three ranks."""
    with open_group(kind="solo") as group, zr.open(group=group, plan=zr.Plan.zero(0), optimizer=optimizer) as rt:
        unit = rt.register("", {name: START[name[0]][name[2:]] for name in names})
        for step in range(3):
            mean = mean_gradients(step, 3)
            unit.reduce({name: mean[name[0]][name[2:]] for name in names})
            rt.step()
        with unit.gathered() as p:
            return {name: np.array(p[name]) for name in p}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "plan", [*(zr.Plan.zero(stage) for stage in STAGES), zr.Plan.zero(3, state=zr.Tier.NVME)], ids=str
)
@pytest.mark.filterwarnings("ignore:.*stays in memory:RuntimeWarning")
def test_each_tensor_is_updated_by_its_groups_optimizer(mix, plan, tmp_path):
    base, own = zr.AdamW(lr=0.1, weight_decay=0.1), MIXES[mix]
    names = {f"{unit}.{name}" for unit in SHAPES for name in SHAPES[unit]}
    theirs = {"a.b", "c.head"}
    expected = updated_alone(base, sorted(names - theirs)) | updated_alone(own, sorted(theirs))

    def body(group):
        groups = [zr.ParameterGroup(("*.b", "*.head"), optimizer=own)]
        with zr.open(group=group, plan=plan, optimizer=base, param_groups=groups, scratch=str(tmp_path)) as rt:
            units = register(rt)
            train(rt, units, 0, 3)
            return parameters(units)

    for found in run_threads(3, body):
        same(found, expected)


def test_a_group_overrides_fields_of_its_own_optimizer():
    group = zr.ParameterGroup("*.b", optimizer=zr.SGD(lr=0.1), momentum=0.9)
    assert repr(group).endswith("momentum=0.9)")
    assert group.optimizer == zr.SGD(lr=0.1)
    with pytest.raises(CallError, match=r"fields of SGD .*got 'betas'"):
        zr.open(group=None, param_groups=[zr.ParameterGroup("*", optimizer=zr.SGD(lr=0.1), betas=(0.9, 0.9))])
    with pytest.raises(CallError, match=r"Expected optimizer to be one such as zr\.SGD"):
        zr.ParameterGroup("*", optimizer="sgd")

    class Rough(zr.Adafactor):
        sums_exactly = False

    with pytest.raises(PlanError, match="sums do not depend on how tensors are cut with virtual_shards, got Rough"):
        zr.open(virtual_shards=1, param_groups=[zr.ParameterGroup("*", optimizer=Rough(lr=0.1))])


def test_bytes_of_groups_with_their_own_optimizers_are_those_of_the_forecast():
    specs = {unit: {name: TensorSpec(shape) for name, shape in SHAPES[unit].items()} for unit in SHAPES}
    settings = {
        "optimizer": zr.AdamW(lr=0.1),
        "param_groups": [zr.ParameterGroup("*.w", optimizer=zr.Lion(lr=0.1))],
    }

    def body(group):
        with zr.open(group=group, **settings) as rt:
            for name, tensors in specs.items():
                rt.register(name, tensors)
            return rt.memory().state

    for rank, found in enumerate(run_threads(2, body)):
        assert found == zr.forecast(specs, plan=zr.Plan.zero(3), size=2, rank=rank, **settings).state


def test_optimizers_that_mean_different_state_by_one_name_are_refused():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Counting(ElementwiseOptimizer):
        lr: float

        def states(self, shape):
            return (StateSpec(name="exp_avg", dtype="int32"),)

        def update_(self, param, grad, state, **settings):
            raise AssertionError

    def body(group):
        groups = [zr.ParameterGroup("*.b", optimizer=Counting(lr=0.1))]
        refused = pytest.raises(CallError, match=r"'a\.w' and 'a\.b' to mean the same by state 'exp_avg'")
        with zr.open(group=group, param_groups=groups) as rt, refused:
            register(rt)

    run_threads(2, body)


# -- in checkpoints ----------------------------------------------------------------------------------------------------

HEAD = zr.ParameterGroup(("*.b", "*.head"), optimizer=zr.SGD(lr=0.1, momentum=0.9))


@pytest.mark.parametrize(("before", "after"), [((3, 3), (1, 0)), ((2, 1), (3, 3))])
def test_a_checkpoint_holds_every_groups_state_and_the_rates_set_by_hand(before, after, tmp_path):
    settings = {"optimizer": zr.AdamW(lr=zr.warmup_linear(0.1, warmup=5, total=20)), "param_groups": [HEAD]}

    def mean_of_three(rt, units, step):
        for name, gradients in mean_gradients(step, 3).items():
            units[name].reduce(gradients)
        return rt.step().lr

    def straight(group):
        with zr.open(group=group, plan=zr.Plan.zero(0), **settings) as rt:
            units = register(rt)
            mean_of_three(rt, units, 0)
            rt.set_lr(0.03)
            rt.set_lr(0.2, group=HEAD)
            for step in range(1, 4):
                mean_of_three(rt, units, step)
            return parameters(units)

    def first(group):
        with zr.open(group=group, plan=zr.Plan.zero(before[1]), **settings) as rt:
            units = register(rt)
            mean_of_three(rt, units, 0)
            rt.set_lr(0.03)
            rt.set_lr(0.2, group=HEAD)
            mean_of_three(rt, units, 1)
            rt.save(tmp_path / "saved")

    def second(group):
        with zr.open(group=group, plan=zr.Plan.zero(after[1]), **settings) as rt:
            units = register(rt)
            rt.set_lr(7.0)  # the checkpoint's holds
            rt.load(tmp_path / "saved")
            assert mean_of_three(rt, units, 2) == 0.03
            mean_of_three(rt, units, 3)
            return parameters(units)

    [expected] = run_threads(1, straight)
    run_threads(before[0], first)
    for found in run_threads(after[0], second):
        same(found, expected)


def test_checkpoints_of_other_optimizers_and_groups_are_refused(tmp_path):
    with open_group(kind="solo") as group:
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1), param_groups=[HEAD]) as rt:
            units = register(rt)
            rt.set_lr(0.2, group=HEAD)
            train(rt, units, 0, 1)
            rt.save(tmp_path / "saved")
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            units = register(rt)
            kept = parameters(units)
            with pytest.raises(CheckpointError, match=r"state of AdamW for 'a\.b', got one of SGD"):
                rt.load(tmp_path / "saved")
            same(parameters(units), kept, rtol=0)
            rt.load(tmp_path / "saved", optimizer=False)
        other = zr.ParameterGroup(("*.b", "*.head", "c.w"), optimizer=zr.SGD(lr=0.1, momentum=0.9))
        with zr.open(group=group, optimizer=zr.AdamW(lr=0.1), param_groups=[other]) as rt:
            register(rt)
            with pytest.raises(CheckpointError, match=r"state of SGD for 'c\.w', got one of AdamW"):
                rt.load(tmp_path / "saved")
        with zr.open(group=group, optimizer=zr.SGD(lr=0.1), param_groups=[zr.ParameterGroup("a.w", lr=0.5)]) as rt:
            units = register(rt)
            rt.set_lr(0.3)
            train(rt, units, 0, 1)
            rt.save(tmp_path / "rates")
        with zr.open(group=group, optimizer=zr.SGD(lr=0.1)) as rt:
            register(rt)
            with pytest.raises(CheckpointError, match=r"one learning rate for .* share their settings, got the sched"):
                rt.load(tmp_path / "rates")
