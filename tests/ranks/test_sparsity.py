"""Pruned parameters: those of dense training with the same masks, whatever the plan and the number of ranks."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport
from zerort.errors import CallError
from zerort.testing.contracts.forecast import ForecastContract

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]

SHARDS = 4
SHAPES = {"a.weight": (75, 48), "a.bias": (24,), "b.weight": (64, 52), "ties.weight": (4100,)}  # cut between ranks
GRADUAL = zr.Sparsity(0.6, start=2, end=5)
HALVES = zr.Sparsity(0.5, pattern="2:4", start=3)
OPTIMIZERS = {
    "adamw": zr.AdamW(lr=0.05, weight_decay=0.1),
    "momentum": zr.SGD(lr=0.05, momentum=0.9),
    "lion": zr.Lion(lr=0.05),
}
PLANS = {f"zero{stage}": zr.Plan.zero(stage) for stage in (0, 1, 3)}
STEPS = 7


@pytest.fixture
def scratch(tmp_path):
    return WORLD.bcast(str(tmp_path))


def lot(*numbers):
    return np.random.default_rng(numbers)


def initial(name, dtype):
    values = lot(len(name)).standard_normal(SHAPES[name])
    if name == "ties.weight":  # magnitudes of few values, some of them zero
        values = np.round(values) / 2
    return values.astype(dtype)


def gradient(name, step, shard, dtype):
    if name == "ties.weight":  # none moves: which are pruned is for their indices to say
        return np.zeros(SHAPES[name], dtype)
    return lot(step, shard, len(name)).standard_normal(SHAPES[name]).astype(dtype)


def open_run(plan, optimizer, dtype=np.float64, group=None, pattern=None, **settings):
    groups = [zr.ParameterGroup("*.weight", sparsity=HALVES if pattern else GRADUAL)]
    rt = zr.open(plan, optimizer, param_groups=groups, group=group, virtual_shards=SHARDS, **settings)
    for unit in ("a", "b", "ties"):
        names = [name for name in SHAPES if name.startswith(f"{unit}.")]
        rt.register(unit, {name.removeprefix(f"{unit}."): initial(name, dtype) for name in names})
    return rt


def train(rt, steps, dtype=np.float64):
    """Return the report of each step, and all parameters after it."""
    reports, weights = [], []
    for step in steps:
        for shard in rt.micro_batches:
            for unit in rt.units.values():
                found = {local: gradient(f"{unit.name}.{local}", step, shard, dtype) for local in unit.names}
                unit.reduce(found)
        reports.append(rt.step())
        weights.append(weights_of(rt))
    return reports, weights


def weights_of(rt):
    found = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found |= {f"{unit.name}.{local}": np.array(p[local]) for local in unit.names}
    return found


def mask_of(values, pruned, sparsity, update):
    """Return which elements are pruned after an update: by sorting whole tensors."""
    if update < sparsity.start:
        return pruned
    flat, gone = np.abs(values.reshape(-1)), pruned.reshape(-1).copy()
    if sparsity.pattern == "2:4":
        if not gone.any():
            for row in range(0, flat.size, 4):
                gone[row + np.argsort(flat[row : row + 4], kind="stable")[:2]] = True
        return gone.reshape(values.shape)
    share = sparsity.share
    if update < sparsity.end:
        share *= 1 - (1 - (update - sparsity.start) * 100 // (sparsity.end - sparsity.start) / 100) ** 3
    kept = np.flatnonzero(~gone)
    order = kept[np.argsort(flat[kept], kind="stable")]
    gone[order[: round(share * flat.size) - gone.sum()]] = True
    return gone.reshape(values.shape)


class Dense:
    """Training of whole tensors in NumPy, with masks: an oracle without chunks, ranks and kernels."""

    def __init__(self, optimizer, sparsity):
        self.optimizer, self.sparsity = optimizer, sparsity
        self.values = {name: initial(name, np.float64) for name in SHAPES}
        self.masks = {name: np.zeros(shape, bool) for name, shape in SHAPES.items() if name.endswith("weight")}
        self.first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.second = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def step(self, update):
        one = self.optimizer
        for name, w in self.values.items():
            g = sum(gradient(name, update - 1, shard, np.float64) for shard in range(SHARDS)) / SHARDS
            if name in self.masks:
                g[self.masks[name]] = 0
            m, v = self.first[name], self.second[name]
            if isinstance(one, zr.AdamW):
                m[:] = one.betas[0] * m + (1 - one.betas[0]) * g
                v[:] = one.betas[1] * v + (1 - one.betas[1]) * g * g
                w *= 1 - one.lr * one.weight_decay
                root = np.sqrt(v / (1 - one.betas[1] ** update)) + one.eps
                w -= one.lr * (m / (1 - one.betas[0] ** update)) / root
            elif isinstance(one, zr.SGD):
                m[:] = g if update == 1 else one.momentum * m + g
                w -= one.lr * m
            else:
                w -= one.lr * np.sign(one.betas[0] * m + (1 - one.betas[0]) * g)
                m[:] = one.betas[1] * m + (1 - one.betas[1]) * g
            if name in self.masks:
                gone = self.masks[name] = mask_of(w, self.masks[name], self.sparsity, update)
                w[gone] = m[gone] = v[gone] = 0
        return {name: value.copy() for name, value in self.values.items()}


@pytest.mark.parametrize(
    ("name", "optimizer", "pattern"),
    [
        ("zero0", "adamw", None),
        ("zero1", "momentum", None),
        ("zero3", "adamw", None),
        ("zero3", "lion", "2:4"),
        ("zero1", "adamw", "2:4"),
    ],
)
def test_training_is_dense_training_with_the_same_masks(name, optimizer, pattern):
    with open_run(PLANS[name], OPTIMIZERS[optimizer], pattern=pattern) as rt:
        reports, weights = train(rt, range(STEPS))
    dense = Dense(OPTIMIZERS[optimizer], HALVES if pattern else GRADUAL)
    for update in range(1, STEPS + 1):
        expected, found = dense.step(update), weights[update - 1]
        for tensor, value in expected.items():
            np.testing.assert_allclose(found[tensor], value, rtol=1e-10, atol=1e-12, err_msg=f"{update} {tensor}")
            if tensor in dense.masks:
                mask = dense.masks[tensor]
                assert (found[tensor][mask] == 0).all()
                assert reports[update - 1].sparsity[tensor] == mask.mean()
    assert "a.bias" not in reports[-1].sparsity
    assert "3 tensors pruned, " in str(reports[-1])
    assert reports[-1].sparsity["a.weight"] == pytest.approx(0.5 if pattern else 0.6, abs=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_masks_do_not_depend_on_the_number_of_ranks(dtype, scratch):
    """Nor on the plan, with master weights or without; and a checkpoint goes on with the same bits anywhere."""
    with open_group(kind="solo") as solo, open_run(zr.Plan.zero(0), OPTIMIZERS["adamw"], dtype, solo) as rt:
        _, expected = train(rt, range(STEPS), dtype)
    with open_run(zr.Plan.zero(3), OPTIMIZERS["adamw"], dtype) as rt:
        _, found = train(rt, range(4), dtype)
        rt.save(f"{scratch}/saved")
        rt.rebalance(shard_weights=[1 + rank for rank in range(rt.size)])
        reports, more = train(rt, range(4, STEPS), dtype)
    with open_run(zr.Plan.zero(1), OPTIMIZERS["adamw"], dtype) as rt:
        rt.load(f"{scratch}/saved")
        again, last = train(rt, range(4, STEPS), dtype)
    for at, weights in enumerate(expected):
        for run in ([*found, *more], [*found, *last]):
            for name, value in weights.items():
                assert run[at][name].tobytes() == value.tobytes(), (at, name)
    assert [one.sparsity for one in again] == [one.sparsity for one in reports]


def test_new_values_are_pruned_anew(scratch):
    """Values that are assigned or loaded without state have no mask; a dense checkpoint has none either."""
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.05), virtual_shards=SHARDS) as rt:
        for unit in ("a", "b", "ties"):
            names = [name for name in SHAPES if name.startswith(f"{unit}.")]
            rt.register(unit, {name.removeprefix(f"{unit}."): initial(name, np.float64) for name in names})
        train(rt, range(2))
        rt.save(f"{scratch}/dense")
    with open_run(zr.Plan.zero(3), OPTIMIZERS["adamw"]) as rt:
        train(rt, range(6))
        ones = np.ones(SHAPES["a.weight"])
        rt.units["a"].assign({"weight": ones})
        np.testing.assert_array_equal(weights_of(rt)["a.weight"], ones)
        reports, weights = train(rt, range(6, 7))
        assert (weights[0]["a.weight"] == 0).mean() == reports[0].sparsity["a.weight"] == round(0.6 * 3600) / 3600
        for optimizer in (True, False):
            rt.load(f"{scratch}/dense", optimizer=optimizer)
            assert (weights_of(rt)["b.weight"] != 0).all()
            reports, weights = train(rt, range(2, 7))
            assert (weights[-1]["b.weight"] == 0).mean() == reports[-1].sparsity["b.weight"] == round(0.6 * 3328) / 3328


def test_bytes_are_those_of_the_forecast(scratch):
    groups = (zr.ParameterGroup("block.*", sparsity=GRADUAL),)
    for kind in ("node", "mpi"):
        with open_group(kind=kind) as group:
            for plan in (zr.Plan.zero(1), zr.Plan.zero(3), zr.Plan.zero(3, secondary="host")):
                ForecastContract().expect_as_told(group, scratch, plan, param_groups=groups)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("mpi", PLANS["zero3"]),
        ("hierarchical", PLANS["zero3"]),
        ("hierarchical", zr.Plan.zero(3, secondary="host")),
    ],
    ids=["mpi", "hierarchical", "copies"],
)
def test_between_hosts_only_what_is_not_zero_is_gathered(kind, plan, options, scratch):
    """The same bits as on one host, before anything is pruned and after it, and after a load; in fewer bytes."""
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    transport = best_transport(WORLD, name="hosts", options=options, kind=kind, machine=machine)
    with Group(transport) as group, open_run(plan, OPTIMIZERS["adamw"], np.float32, group) as rt:
        reports, found = train(rt, range(STEPS), np.float32)
        rt.save(f"{scratch}/saved")
        rt.load(f"{scratch}/saved")
        assert {name: value.tobytes() for name, value in weights_of(rt).items()} == {
            name: value.tobytes() for name, value in found[-1].items()
        }
        unit = rt.units["a"]
        with unit.gathered() as p:
            changed = np.where(p["weight"] == 0, np.float32(-0.0), np.float32(3))  # whose bits are not zero
        unit.assign({"weight": changed})
        with unit.gathered() as p:
            assert p["weight"].tobytes() == changed.tobytes()
    with open_group(kind="solo") as solo, open_run(PLANS["zero0"], OPTIMIZERS["adamw"], np.float32, solo) as rt:
        _, expected = train(rt, range(STEPS), np.float32)
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
    if WORLD.size > 1:
        first, last = reports[0], reports[-1]
        assert first.bytes_moved["all_gather"] < 1.02 * last.bytes_uncoded["all_gather"] + 4096
        assert last.bytes_moved["all_gather"] < 0.6 * last.bytes_uncoded["all_gather"]


@pytest.mark.filterwarnings("ignore:.*stays in memory")
def test_what_is_pruned_stays_in_memory(scratch):
    with open_run(zr.Plan.zero(3, state=zr.Tier.NVME), OPTIMIZERS["adamw"], scratch=scratch) as rt:
        reports, _ = train(rt, range(6))
        assert reports[-1].sparsity["a.weight"] == round(0.6 * 3600) / 3600
        sections = [one for unit in rt.units.values() for one in unit.sections if one.state.sparsities]
        assert len(sections) == 3
        assert not any(one.tiers.streams for one in sections)


def test_what_cannot_be_pruned_is_refused_everywhere():
    for words, text in (
        ({"share": 1.0}, "Expected the share of a Sparsity to be a float above 0 and below 1, got 1.0"),
        ({"share": 0.5, "pattern": "1:2"}, "Expected pattern to be None or '2:4', got '1:2'"),
        ({"share": 0.5, "start": 0}, "Expected start of a Sparsity to be an int of at least 1, got 0"),
        ({"share": 0.5, "start": 9, "end": 8}, "Expected end of a Sparsity to be an int of at least 9, got 8"),
        ({"share": 0.6, "pattern": "2:4"}, "Expected a share of 0.5, all at once, with pattern='2:4', got 0.6"),
    ):
        with pytest.raises(CallError, match=text):
            zr.Sparsity(**words)
    for overrides, text in (
        ({"sparsity": 0.5}, r"Expected sparsity to be one such as zr.Sparsity\(0.5\), got 0.5"),
        ({"sparsity": GRADUAL, "moments": "int8"}, "Expected master='float32' and moments='float32' with sparsity"),
        ({"sparsity": GRADUAL, "optimizer": zr.Adafactor(lr=0.1)}, "to override fields of Adafactor .*'sparsity'"),
    ):
        with pytest.raises(CallError, match=text):
            zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), param_groups=[zr.ParameterGroup("*.weight", **overrides)])
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), param_groups=[zr.ParameterGroup("*", sparsity=HALVES)]) as rt:
        with pytest.raises(
            CallError, match=r"last axis that 4 divides with pattern='2:4', got 'unit.w' of shape \[8, 6\]"
        ):
            rt.register("unit", {"w": np.zeros((8, 6), np.float32)})
        assert not rt.units
