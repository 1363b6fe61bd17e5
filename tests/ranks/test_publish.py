"""A runtime's feed over real ranks: readers have the gathered parameters' bits, under every plan and tier."""

import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.errors import CheckpointError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

PLANS = {
    "zero1": zr.Plan.zero(1),
    "zero3": zr.Plan.zero(3),
    "zero3-nvme": zr.Plan.zero(3, parameter=zr.Tier.NVME, state=zr.Tier.NVME),
}


@pytest.fixture
def path():
    """One directory for all ranks."""
    directory = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    yield Path(directory)
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(directory)


def params(dtype):
    lot = np.random.default_rng(0)
    shapes = {"w": (67, 31), "b": (31,)}
    return {name: lot.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
def test_readers_have_what_is_gathered(plan, dtype, path):
    """Rounded to bfloat16; a bfloat16 parameter is published itself, not its master weights."""
    reader = zr.Reader(path / "feed")
    options = {"scratch": path / "scratch", "create_scratch": True} if "nvme" in plan else {}
    with zr.open(plan=PLANS[plan], optimizer=zr.AdamW(lr=1e-3), **options) as rt:
        units = [rt.register(f"u{n}", params(dtype), frozen="b" if n else False) for n in range(2)]
        feed = rt.publish(path / "feed", full_every=3)
        for step in range(5):
            for unit in units:
                gradients = {"w": np.full((67, 31), 0.1 * step, dtype)}
                unit.reduce(gradients if unit is units[1] else gradients | {"b": np.ones(31, dtype)})
            rt.step()
            done = feed.push().wait()
            assert (done.version, done.is_full) == (step + 1, step % 3 == 0)
            wanted = {}
            for unit in units:
                with unit.gathered() as p:
                    wanted |= {f"{unit.name}.{name}": np.array(p[name]) for name in ("w", "b")}
            if rt.rank == 0:
                found = reader.update()
                assert set(found) == set(wanted)
                for name, array in wanted.items():
                    assert found[name].tobytes() == array.astype(ml_dtypes.bfloat16).tobytes(), name
                assert (reader.version, reader.updates) == (step + 1, step + 1)
            rt.group.barrier().wait()


def test_a_model_that_grew_is_refused_on_every_rank(path):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1)) as rt:
        rt.register("a", params(np.float32))
        feed = rt.publish(path / "feed")
        feed.push().wait()
        rt.register("c", params(np.float32))
        with pytest.raises(CheckpointError, match=r"they differ in 'c\.b'.*Register all units before the first push"):
            feed.push()
    with pytest.raises(zr.errors.ClosedError):
        feed.push()


def test_the_first_copy_of_the_model_publishes(path):
    if WORLD.size % 2:
        pytest.skip("two copies need an even number of ranks")
    mesh = zr.mesh(shard=WORLD.size // 2, replicate=2)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), mesh=mesh) as rt:
        rt.register("a", params(np.float32))
        done = rt.publish(path / "feed", dtype=None).push().wait()
        assert done.changed == sum(value.size for value in params(np.float32).values())
        if rt.rank == 0:
            found = zr.Reader(path / "feed").update()
            for name, array in params(np.float32).items():
                assert found[f"a.{name}"].tobytes() == array.tobytes()
        rt.group.barrier().wait()
