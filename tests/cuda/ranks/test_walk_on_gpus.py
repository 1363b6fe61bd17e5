"""A run on GPUs is the host's run: every plan, every dtype, and nothing that the emulated device could object to."""

import gc

import numpy as np
import pytest

pytest.importorskip("cupy")

import gpu_runs

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError, DeviceMemoryError, NonFiniteError, PlanError
from zerort.testing.tolerance import OVER_STEPS, rounding

pytestmark = pytest.mark.mpi

DECAY = {
    "optimizer": zr.AdamW(lr=zr.warmup_cosine(2e-2, warmup=2, total=4), weight_decay=0.1),
    "param_groups": [zr.ParameterGroup("*.b", weight_decay=0.0)],
    "clip_norm": 1.0,
}
STEPS = 4
BOUNDS = {"float64": OVER_STEPS, "float32": rounding("float32", 16), "bfloat16": 1e-2, "float16": 2e-3}
"""Relative, of the whole model: ranks' gradients are summed in another order, and a rounding may fall the other way.
float32 is compared over one step of about 12 operations and a sum over ranks; 16 bits round by 4e-3 and 5e-4."""


@pytest.fixture(scope="module")
def hosts(options):
    with open_group(options=options) as group:
        yield group


def distance(found, expected):
    """The distance of two models, as a fraction of the second's length."""
    assert found.keys() == expected.keys()
    difference = sum(float(((found[name] - expected[name]) ** 2).sum()) for name in expected)
    return np.sqrt(difference / sum(float((one**2).sum()) for one in expected.values()))


def compare(gpus, hosts, dtype, **options):
    """Train on both, and compare parameters and reports; return those of the GPUs."""
    steps = 1 if dtype == "float32" else STEPS
    expected, on_host = gpu_runs.expected(hosts, dtype, steps=steps, **options)
    with zr.open(group=gpus, **options) as rt:
        reports = gpu_runs.train(rt, dtype, steps=steps)
        assert distance(gpu_runs.weights(rt), expected) < BOUNDS[dtype]
    norms = [report.grad_norm for report in on_host]
    np.testing.assert_allclose([report.grad_norm for report in reports], norms, rtol=BOUNDS[dtype])
    for report, other in zip(reports, on_host, strict=True):
        assert (report.update, report.updated, report.without_gradient) == (
            other.update,
            other.updated,
            other.without_gradient,
        )
    return reports


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [*((stage, dtype) for stage in range(4) for dtype in ("float64", "bfloat16")), (3, "float16"), (3, "float32")],
)
def test_every_plan_is_the_hosts(stage, dtype, gpus, hosts):
    scale = zr.LossScale(initial=8.0) if dtype == "float16" else None
    reports = compare(gpus, hosts, dtype, plan=zr.Plan.zero(stage), loss_scale=scale, **DECAY)
    assert len(reports) == (1 if dtype == "float32" else STEPS)


@pytest.mark.parametrize(("stage", "accumulate"), [(1, "local"), (3, "local"), (3, "sharded")])
def test_micro_steps_are_added_to_the_shard(stage, accumulate, gpus, hosts):
    options = {"micro_steps": 3, "accumulate": accumulate, **DECAY}
    reports = compare(gpus, hosts, "float64", plan=zr.Plan.zero(stage), **options)
    assert gpus.size == 1 or reports[-1].bytes_moved["reduce_scatter"] > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_uneven_ranks(stage, gpus, hosts):
    weights = [float(rank % 3) for rank in range(1, gpus.size + 1)]
    assert len(compare(gpus, hosts, "float64", plan=zr.Plan.zero(stage), shard_weights=weights, **DECAY)) == STEPS


def test_hybrid_sharding(gpus, hosts):
    if gpus.size % 2:
        pytest.skip("two copies need an even number of ranks")
    expected, _ = gpu_runs.expected(hosts, "float64", plan=zr.Plan.zero(3), **DECAY)
    with zr.open(mesh=zr.mesh(replicate=2, group=gpus), plan=zr.Plan.zero(3), **DECAY) as rt:
        gpu_runs.train(rt, "float64")
        assert distance(gpu_runs.weights(rt), expected) < BOUNDS["float64"]


@pytest.mark.parametrize(
    ("plan", "more", "copies"),
    [
        (zr.Plan.zero(3), {}, 1),
        (zr.Plan.zero(3), {"accumulate": "local"}, 1),
        (zr.Plan.zero(3), {"accumulate": "local"}, 2),
        (zr.Plan.zero(2), {}, 2),
        (zr.Plan.zero(3, gradient=zr.Tier.HOST, state=zr.Tier.HOST), {}, 1),
        (zr.Plan.zero(3, gradient=zr.Tier.HOST), {"offload": zr.OffloadOptions(chunk_nbytes=8192)}, 2),
    ],
    ids=["sharded", "local", "local copies", "copies", "offloaded", "offloaded copies"],
)
def test_the_fixed_tree_gives_the_hosts_bits(plan, more, copies, gpus, hosts):
    options = {"plan": zr.Plan.zero(3), "virtual_shards": 7, **DECAY}
    expected, on_host = gpu_runs.expected(hosts, "float32", steps=2, **options)
    mesh = zr.mesh(replicate=1 if gpus.size % copies else copies, group=gpus)
    with zr.open(mesh=mesh, **{**options, "plan": plan, **more}) as rt:
        reports = gpu_runs.train(rt, "float32", steps=2)
        assert distance(gpu_runs.weights(rt), expected) == 0
    assert [report.digest for report in reports] == [report.digest for report in on_host]


@gpu_runs.at_most(2)
@pytest.mark.parametrize("optimizer", [zr.SGD(lr=0.1, momentum=0.9, nesterov=True), zr.SGD(lr=0.1), zr.Lion(lr=1e-3)])
def test_other_optimizers(optimizer, gpus, hosts):
    assert len(compare(gpus, hosts, "bfloat16", plan=zr.Plan.zero(3), optimizer=optimizer)) == STEPS


def test_a_checkpoint_goes_from_gpus_to_hosts_and_back(gpus, hosts, shared_tmp_path):
    expected, _ = gpu_runs.expected(hosts, "bfloat16", plan=zr.Plan.zero(3), **DECAY)
    with zr.open(group=gpus, plan=zr.Plan.zero(1), **DECAY) as rt:
        gpu_runs.train(rt, "bfloat16", steps=2)
        rt.save(shared_tmp_path / "half", progress=2)
    for group, stage in ((hosts, 2), (gpus, 3)):
        with zr.open(group=group, plan=zr.Plan.zero(stage), **DECAY) as rt:
            gpu_runs.register(rt, "bfloat16")
            assert rt.load(shared_tmp_path / "half").progress == 2
            assert rt.updates == 2
            before = gpu_runs.weights(rt)
            gpu_runs.train(rt, "bfloat16", steps=1, seed=2)
            after = gpu_runs.weights(rt)
        assert 0 < distance(before, expected) < 0.5
        assert distance(after, before) > 0


def test_nan_names_the_tensor_and_the_rank(gpus):
    with zr.open(group=gpus, plan=zr.Plan.zero(3), nonfinite="raise") as rt:
        gpu_runs.register(rt, "float32")
        before = gpu_runs.weights(rt)
        for unit in rt.units.values():
            gradients = {name: rt.device.zeros(int(np.prod(s)), "float32").reshape(s) for name, s in _shapes(unit)}
            if unit.name == "unit1" and rt.rank == rt.size - 1:
                gradients["w"][3, 4] = np.nan
            unit.reduce(gradients)
        with pytest.raises(NonFiniteError, match=rf"'unit1.w' on rank {rt.size - 1}"):
            rt.step()
        assert distance(gpu_runs.weights(rt), before) == 0


def test_the_hosts_arrays_are_refused_as_gradients(gpus):
    with zr.open(group=gpus, plan=zr.Plan.zero(3)) as rt:
        unit = rt.register("unit", {"w": np.ones((3, 4), np.float32)})
        with pytest.raises(CallError, match=r"gradient of 'w' \(unit 'unit'\) as a CuPy array on GPU \d, got numpy"):
            unit.reduce({"w": np.ones((3, 4), np.float32)})


def test_parameters_may_come_from_the_gpu(gpus):
    import cupy

    with zr.open(group=gpus, plan=zr.Plan.zero(3)) as rt:
        table = cupy.arange(12, dtype=np.float32).reshape(3, 4)
        unit = rt.register("unit", {"w": table, "tied": table, "v": cupy.ones(5, np.float32)})
        with unit.gathered() as p:
            assert p["tied"].data.ptr == p["w"].data.ptr
            np.testing.assert_array_equal(p["w"].get(), np.arange(12, dtype=np.float32).reshape(3, 4))


@pytest.mark.parametrize("stage", [1, 3])
def test_sums_of_float16_do_not_overflow_on_their_way(gpus, stage):
    """NCCL adds in the array's dtype; so such gradients are summed in float32 unless asked otherwise."""
    with zr.open(group=gpus, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=2.0**-16)) as rt:
        unit = rt.register("unit", {"w": np.zeros(1000, np.float16)})
        with unit.gathered() as p:
            gradient = p["w"] + np.float16(40_000)
        unit.reduce({"w": gradient})
        report = rt.step()
        np.testing.assert_allclose(report.grad_norm, 40_000 * np.sqrt(1000), rtol=1e-6)
        np.testing.assert_array_equal(gpu_runs.weights(rt)["unit.w"], np.float16(-40_000 * 2.0**-16))


def test_a_model_that_does_not_fit_is_refused_on_every_rank(gpus):
    gc.collect()
    free, total = gpus.device.memory()
    with zr.open(group=gpus, plan=zr.Plan.zero(1)) as rt:
        for numel in (total // 4 + 1, total // 4 // 2):  # parameters, or gradients beside them
            with pytest.raises(DeviceMemoryError, match=r"Expected [\d,]+ bytes on GPU \d, got [\d,]+ free of"):
                rt.register("large", {"w": zr.TensorSpec((numel,))})
        gc.collect()
        assert gpus.device.memory()[0] > free - total // 100
        gpu_runs.train(rt, "float32", steps=1)


def test_an_optimizer_over_whole_tensors_is_refused(gpus):
    with pytest.raises(PlanError, match="elementwise optimizer on GPUs, got Adafactor"):
        zr.open(group=gpus, optimizer=zr.Adafactor(lr=1e-3))


def test_what_stays_in_the_memory_of_a_host_is_refused(gpus):
    with pytest.raises(PlanError, match=r"Expected ranks that compute on the host with secondary='host', got GPUs"):
        zr.open(zr.Plan.zero(3, secondary="host"), group=gpus)


def _shapes(unit):
    return [(name, gpu_runs.SHAPES[name]) for name in unit.trainable]


def test_a_step_asks_a_gpu_for_few_numbers(gpus, monkeypatch):
    """Where a NaN is, once for each section, however many tensors and micro-steps there are."""
    from zerort.optim import kernels_cuda

    asked = []
    look = kernels_cuda.look_for_nonfinite
    monkeypatch.setattr(kernels_cuda, "look_for_nonfinite", lambda array: asked.append(array.size) or look(array))
    with zr.open(group=gpus, plan=zr.Plan.zero(3), micro_steps=3) as rt:
        gpu_runs.train(rt, "float32", steps=1)
        assert len(asked) == 3 * len(list(rt.units.trained_sections()))
