"""Where parameters, gradients and state rest, on GPUs, on hosts or on disks, does not show in what is trained."""

import shutil
import tempfile

import gpu_runs
import numpy as np
import pytest
from mpi4py import MPI

pytest.importorskip("cupy")

import zerort as zr
from zerort.errors import PlanError
from zerort.native.dtypes import numpy_dtype

pytestmark = pytest.mark.mpi

DEVICE, HOST, NVME = zr.Tier.DEVICE, zr.Tier.HOST, zr.Tier.NVME
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2)  # chunks of 2048 elements
OPTIONS = {"optimizer": zr.AdamW(lr=1e-2, weight_decay=0.1), "clip_norm": 1.0, "offload": SMALL}


@pytest.fixture(scope="module")
def all_on_gpus(gpus):
    """What runs with everything on the GPUs give, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16", "float64"):
        with zr.open(group=gpus, plan=zr.Plan.zero(3), **OPTIONS) as rt:
            gpu_runs.train(rt, dtype)
            found[dtype] = gpu_runs.weights(rt)
    return found


def tiers(stage, **parts):
    title = "-".join([str(stage), *(f"{part}={tier.name}" for part, tier in parts.items())])
    return pytest.param(zr.Plan.zero(stage, **parts), id=title)


PLANS = [
    tiers(1, state=HOST),
    tiers(2, gradient=HOST, state=HOST),
    tiers(3, parameter=HOST),
    tiers(3, parameter=HOST, gradient=HOST, state=HOST),
    tiers(1, state=NVME),
    tiers(3, gradient=NVME, state=HOST),
    tiers(3, parameter=NVME, state=NVME),
    tiers(3, parameter=NVME, gradient=NVME, state=NVME),
    tiers(0, state=HOST),  # nothing is sharded, and yet updated chunk by chunk
]


CASES = [
    *(
        pytest.param(*plan.values, dtype, id=f"{plan.id}-{dtype}")
        for plan in PLANS
        for dtype in ("float32", "bfloat16")
    ),
    *(pytest.param(*plan.values, "float64", id=f"{plan.id}-float64") for plan in (PLANS[3], PLANS[7])),
]


@pytest.mark.parametrize(("plan", "dtype"), CASES)
def test_where_values_rest_does_not_show(plan, dtype, gpus, all_on_gpus, shared_tmp_path):
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **OPTIONS) as rt:
        gpu_runs.train(rt, dtype)
        for name, value in gpu_runs.weights(rt).items():
            np.testing.assert_array_equal(value, all_on_gpus[dtype][name], err_msg=name)


@gpu_runs.at_most(2)
@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("plan", [PLANS[3], PLANS[6]])
def test_an_update_is_the_same_on_either_side(update_on, plan, gpus, all_on_gpus, shared_tmp_path):
    options = {**OPTIONS, "offload": zr.OffloadOptions(chunk_nbytes=8192, threads=2, update_on=update_on)}
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **options) as rt:
        gpu_runs.train(rt, "bfloat16")
        for name, value in gpu_runs.weights(rt).items():
            np.testing.assert_array_equal(value, all_on_gpus["bfloat16"][name], err_msg=name)


@gpu_runs.at_most(3)
@pytest.mark.parametrize("plan", [PLANS[3], PLANS[7]])
def test_a_checkpoint_of_what_rests_elsewhere(plan, gpus, all_on_gpus, shared_tmp_path):
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **OPTIONS) as rt:
        gpu_runs.train(rt, "bfloat16")
        rt.save(shared_tmp_path / "saved")
    for other in (zr.Plan.zero(3), plan):
        with zr.open(group=gpus, plan=other, scratch=shared_tmp_path, **OPTIONS) as rt:
            gpu_runs.register(rt, "bfloat16")
            rt.load(shared_tmp_path / "saved")
            for name, value in gpu_runs.weights(rt).items():
                np.testing.assert_array_equal(value, all_on_gpus["bfloat16"][name], err_msg=name)


def test_bytes_rest_where_the_plan_says(gpus, shared_tmp_path):
    plan = zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=NVME)
    with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, **OPTIONS) as rt:
        gpu_runs.register(rt, "bfloat16")
        trained = [section for section in rt.units.trained_sections() if section.state is not None]
        for section in trained:
            assert isinstance(section.shard.memory, np.ndarray)
            assert section.shard.memory.nbytes == section.partition.counts[gpus.rank] * 2
            assert all(column.memory.size == 0 for column in section.state.columns.values())
        assert rt.memory().nvme == sum(12 * section.partition.counts[gpus.rank] for section in trained)


@gpu_runs.at_most(2)  # with more, a shard is shorter than the chunks that pass through the GPU: nothing is gained there
def test_a_budget_fills_the_gpu_then_the_host_then_the_disk(gpus, all_on_gpus, shared_tmp_path):
    """On the least GPU that will do state rests below it: on the host as far as there is room, the rest on a disk."""
    units = {f"unit{at}": tensors for at, tensors in enumerate(gpu_runs.first_values("bfloat16"))}
    options = {**OPTIONS, "offload": zr.OffloadOptions(chunk_nbytes=8192, threads=2, depth=1)}  # little is on its way
    for device in range(10_000, 1_000_000, 5_000):
        budget = zr.Plan.fit(device=device, host=270_000 // gpus.size, nvme="1MiB")
        with zr.open(group=gpus, plan=budget, scratch=shared_tmp_path, **options) as rt:
            try:
                rt.expect(units, frozen={f"unit{gpu_runs.UNITS - 1}": "c"})
            except PlanError:
                continue
            gpu_runs.train(rt, "bfloat16")
            assert {section.tiers.state for section in rt.units.trained_sections()} == {HOST, NVME}
            assert rt.memory().nvme > 0
            for name, value in gpu_runs.weights(rt).items():
                np.testing.assert_array_equal(value, all_on_gpus["bfloat16"][name], err_msg=name)
            return
    pytest.fail("no budget was enough")


@gpu_runs.at_most(3)
@pytest.mark.parametrize("tier", [HOST, NVME])
def test_micro_steps_are_added_to_what_was_put_away(tier, gpus, shared_tmp_path):
    found = []
    for gradient in (zr.Tier.DEVICE, tier):
        plan = zr.Plan.zero(3, gradient=gradient)
        with zr.open(group=gpus, plan=plan, scratch=shared_tmp_path, micro_steps=3, **OPTIONS) as rt:
            gpu_runs.train(rt, "float32")
            found.append(gpu_runs.weights(rt))
    for name, value in found[1].items():
        np.testing.assert_array_equal(value, found[0][name], err_msg=name)


@gpu_runs.at_most(2)
@pytest.mark.parametrize(("tier", "micro_steps"), [(HOST, 1), (HOST, 2), (NVME, 2)])
def test_offloaded_gradients_are_summed_over_copies(tier, micro_steps, gpus, shared_tmp_path):
    found = []
    for gradient in (zr.Tier.DEVICE, tier):
        mesh = zr.mesh(replicate=gpus.size, group=gpus)
        plan = zr.Plan.zero(3, gradient=gradient)
        with zr.open(mesh=mesh, plan=plan, scratch=shared_tmp_path, micro_steps=micro_steps, **OPTIONS) as rt:
            norms = [report.grad_norm for report in gpu_runs.train(rt, "float32")]
            found.append((gpu_runs.weights(rt), norms))
    assert found[1][1] == found[0][1]
    for name, value in found[1][0].items():
        np.testing.assert_array_equal(value, found[0][0][name], err_msg=name)


@pytest.mark.parametrize("option", [{"micro_steps": 2}, {"virtual_shards": 8}])
def test_gradients_that_are_summed_again_cannot_rest_on_the_host(option, gpus):
    with pytest.raises(PlanError, match=r"on HOST to be shards, got whole .* gradient=Tier\.DEVICE"):
        zr.open(group=gpus, plan=zr.Plan.zero(3, gradient=HOST), accumulate="local", **option)


@gpu_runs.at_most(2)
@pytest.mark.parametrize("plan", [PLANS[3], pytest.param(zr.Plan.zero(3), id="3")])
def test_saves_and_loads_follow_the_callers_stream(plan, gpus, all_on_gpus, shared_tmp_path):
    """Other threads read and write then, and the caller's stream may be any."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True), zr.open(group=gpus, plan=plan, **OPTIONS) as rt:
        gpu_runs.train(rt, "bfloat16")
        rt.save(shared_tmp_path / "saved")
        gpu_runs.train(rt, "bfloat16", steps=1)
        rt.load(shared_tmp_path / "saved")
        for name, value in gpu_runs.weights(rt).items():
            np.testing.assert_array_equal(value, all_on_gpus["bfloat16"][name], err_msg=name)


def test_an_error_in_a_loop_leaves_pinned_memory_alone_until_copies_have_ended(gpus):
    def fail():
        with zr.open(group=gpus, plan=zr.Plan.zero(3, parameter=HOST, state=HOST), **OPTIONS) as rt:
            gpu_runs.train(rt, "float32", steps=2)
            with rt.units["unit0"].gathered():  # the next one is on its way
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gpus.all_reduce(np.ones(1)).wait()[0] == gpus.size


@gpu_runs.at_most(2)
@pytest.mark.parametrize("plan", [zr.Plan.zero(3), zr.Plan.zero(3, parameter=HOST, state=HOST)], ids=["gpu", "host"])
def test_readers_have_what_gpus_train(gpus, plan):
    """Published from GPUs, as whole version and delta; bits are those that the units show."""
    directory = MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if gpus.rank == 0 else None)
    with zr.open(group=gpus, plan=plan, **OPTIONS) as rt:
        gpu_runs.register(rt, "bfloat16")
        feed = rt.publish(directory, dtype=None)
        feed.push().wait()
        gpu_runs.train(rt, None)
        assert not feed.push().wait().is_full
        wanted = gpu_runs.weights(rt)
        if rt.rank == 0:
            found = zr.Reader(directory).update()
            assert set(found) == set(wanted)
            for name, array in wanted.items():
                assert found[name].dtype == numpy_dtype("bfloat16")
                assert found[name].astype(np.float64).tobytes() == array.tobytes(), name
        rt.group.barrier().wait()
    if gpus.rank == 0:
        shutil.rmtree(directory)
