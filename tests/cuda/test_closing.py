"""Closing a group over GPUs: together it is destroyed, and whoever closes alone waits for nobody."""

import pytest

pytest.importorskip("cupy")

from gpu_jobs import ranks_that

HOW = """
import cupy
from mpi4py import MPI
group = open_group(timeout=30.0)
assert int(group.all_reduce(cupy.ones(3, np.int32)).wait()[0]) == group.size
watch = group._transport._watch
finish = watch._finish
watch._finish = lambda verb: (finish(verb), say("rank", rank, "did", verb))
"""


def test_ranks_that_close_together_destroy_the_communicator(job):
    result = job(
        2,
        "import zerort.comm.transports.nccl.transport\nzerort.comm.transports.nccl.transport._CLOSED_WITHIN = 20.0\n",
        HOW,
        "group.close()",
    )
    assert result.code == 0, result.output
    assert ranks_that("did destroy", result.output) == ["0", "1"], result.output


def test_a_rank_that_closes_alone_waits_for_nobody(job):
    """NCCL would hold it up until the others destroy the communicator, too; here they do so only when it is out."""
    result = job(
        3,
        HOW,
        """
        if rank:
            MPI.COMM_WORLD.Barrier()
        group.close()
        if not rank:
            MPI.COMM_WORLD.Barrier()
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that("did abort", result.output) == ["0", "1", "2"], result.output
    assert "got no answer" not in result.output
