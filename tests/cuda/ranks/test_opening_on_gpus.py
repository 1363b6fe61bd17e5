"""A runtime opens a group of its own on GPUs, and closes it; a mesh makes its groups there, too."""

import gpu_runs
import numpy as np
import pytest

pytest.importorskip("cupy")

from mpi4py import MPI

import zerort as zr
from zerort.errors import CallError, ClosedError, PlanError

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size > 4, reason="1 to 4 ranks")]
OPTIONS = {"plan": zr.Plan.zero(3), "optimizer": zr.AdamW(lr=1e-2)}


def trained(**ranks):
    with zr.open(**ranks, **OPTIONS) as rt:
        assert not rt.device.in_host_memory
        gpu_runs.train(rt, "float32")
        return gpu_runs.weights(rt), rt.group, rt.mesh


def test_a_runtime_opens_its_own_group_on_gpus_and_closes_it():
    found, group, _ = trained(device="cuda")
    assert group.kind == "nccl"
    with pytest.raises(ClosedError):
        group.barrier()
    with zr.open_group(kind="nccl") as given:
        expected, _, _ = trained(group=given)
        given.barrier().wait()  # which is the caller's
        with pytest.raises(CallError, match="Expected device='host' where the runtime opens its own group"):
            zr.open(group=given, device="host")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_mesh_of_other_ranks_is_refused_and_leaves_no_group():
    with pytest.raises(PlanError, match=r"Expected shard \* replicate to be the number of ranks"):
        zr.open(mesh=zr.mesh(shard=5), device="cuda")


@pytest.mark.skipif(WORLD.size % 2 == 1, reason="two copies need an even number of ranks")
def test_a_mesh_makes_its_groups_on_the_device():
    shape = zr.mesh(replicate=2)
    _, group, mesh = trained(mesh=shape, device="cuda")
    assert (mesh.shard.size, mesh.replicate.size) == (WORLD.size // 2, 2)
    assert {one.kind for one in mesh.groups} == {"nccl"}
    for one in mesh.groups:
        with pytest.raises(ClosedError):
            one.barrier()
    _, again, _ = trained(mesh=shape, device="cuda")  # a value: it serves another time
    assert again is not group
