"""Tied parameters on GPUs: gradients rest there, on the host, or on a disk."""

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.testing.contracts.ties import TIED_UNITS, TiesContract, register_tied, tied_gradients, tied_totals

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="at most 3 ranks")]


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture
def scratch(shared_tmp_path):
    return shared_tmp_path


class TestOnGpus(TiesContract):
    orders = TiesContract.orders[::5]  # the first and the last


@pytest.mark.parametrize("gradient", [zr.Tier.DEVICE, zr.Tier.HOST])
def test_trees_of_tied_units_are_added_before_the_update_reads_them(gradient, group):
    """With virtual shards each unit that has a tied tensor sums a tree of its own; the roots are added in the step."""
    plan, small = zr.Plan.zero(3, gradient=gradient), zr.OffloadOptions(chunk_nbytes=8192, threads=1)
    options = {"virtual_shards": 2 * group.size, "reduction": "sum", "offload": small}
    with zr.open(plan, zr.SGD(lr=1.0), group=group, **options) as rt:
        units = register_tied(rt)
        for step in (1, 2):
            for name in TIED_UNITS:
                for micro_batch in rt.micro_batches:
                    units[name].reduce(
                        {one: cupy.asarray(value) for one, value in tied_gradients(name, micro_batch, 0).items()}
                    )
            rt.step()
            for (unit, name), total in tied_totals(2 * group.size, 1).items():
                with units[unit].gathered() as values:
                    np.testing.assert_array_equal(rt.device.fetch(values[name]), -step * total)
