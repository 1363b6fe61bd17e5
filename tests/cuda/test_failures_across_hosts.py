"""A rank of another host that fails is heard by ranks that wait for their GPUs: over MPI, which tells by alarms."""

import pytest

pytest.importorskip("cupy")

from gpu_jobs import ranks_that

OPEN = """
import cupy
from mpi4py import MPI
from zerort.comm.bootstrap.opening import best_transport
from zerort.comm.transports.nccl.opening import open_on_gpus

def open_over(kind, hosts, timeout=40.0):
    # Ranks of one machine that think they are on several.
    machine = MPI.COMM_WORLD.Split(hosts[rank])
    options = zr.GroupOptions.from_environment(timeout=timeout)
    host = best_transport(MPI.COMM_WORLD, name="world", options=options, kind=kind, machine=machine)
    return zr.Group(open_on_gpus(host, local_rank=rank, hosts=hosts, device=None))
"""

FAULT = """
write = cupy.RawKernel('extern "C" __global__ void write() { *(volatile char *)64 = 1; }', "write")
array = cupy.ones(1000, np.float32)
group.all_reduce(array).wait()
with cupy.cuda.Stream(non_blocking=True):
    if rank == group.size - 1:
        write((1,), (1,), ())
    ticket = group.all_reduce(array, name="gradients")
try:
    ticket.wait()
except (RankFailedError, DeviceError) as error:
    say("rank", rank, "raised", type(error).__name__, "IllegalAddress" in str(error))
group.close()
"""


def test_a_fault_of_a_gpu_is_heard_on_other_hosts(job):
    """Its own abort ends NCCL's call on that rank alone, so the others would wait until time is up."""
    result = job(3, OPEN, 'group = open_over("hierarchical", [0, 0, 1])', FAULT)
    assert ranks_that("raised RankFailedError True", result.output)[:2] == ["0", "1"], result.output
    assert ranks_that(r"raised \w+ True", result.output) == ["0", "1", "2"], result.output


def test_below_thread_multiple_only_the_callers_thread_talks_to_mpi(job):
    """The watch finds the fault, on a thread of its own; the thread that waits for the GPU tells the other rank."""
    result = job(
        2,
        """
        import mpi4py, threading
        mpi4py.rc.thread_level = "serialized"
        """,
        OPEN,
        """
        from zerort.comm.transports.messages.alarms import Alarm
        group = open_over("mpi", [0, 1])
        exchange = group._transport.host._exchange
        assert group._transport.runs_on == "caller"
        if rank == 1:
            other = threading.Thread(target=exchange.sound, args=(Alarm(1, 10**6, "left", "test"),))
            other.start()
            other.join()
            say("rank", rank, "sent", len(exchange._mail), len(exchange._unsent))
        MPI.COMM_WORLD.Barrier()
        deaf = threading.Thread(target=exchange.listen)
        deaf.start()
        deaf.join()
        heard = list(exchange.alarms)
        exchange.listen()
        MPI.COMM_WORLD.Barrier()
        while rank == 0 and not exchange.alarms:
            exchange.listen()
        say("rank", rank, "heard", heard, list(exchange.alarms), len(exchange._mail))
        exchange._alarms.known.clear()
        exchange._alarms._has_spoken = False
        MPI.COMM_WORLD.Barrier()
        """,
        FAULT,
    )
    assert "rank 1 sent 0 1" in result.output, result.output
    assert r"rank 0 heard [] [1] 0" in result.output, result.output
    assert r"rank 1 heard [] [] 1" in result.output, result.output
    assert ranks_that("raised RankFailedError True", result.output)[:1] == ["0"], result.output
    assert ranks_that(r"raised \w+ True", result.output) == ["0", "1"], result.output
