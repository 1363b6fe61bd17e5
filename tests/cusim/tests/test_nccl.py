"""NCCL: right results for every type, verb, group and split; calls that differ are named on both ranks."""

import os
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
    from mpi4py import MPI
    from cupy.cuda import nccl, Stream

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    cupy.cuda.Device(rank).use()
    comm = nccl.NcclCommunicator(size, world.bcast(nccl.get_unique_id() if rank == 0 else None), rank)
    stream = Stream(non_blocking=True)
    F = nccl.NCCL_FLOAT32

    def device(array):
        made = cupy.asarray(array)
        Stream.null.synchronize()
        return made

    def all_reduce(a, b, count, type=F, op=nccl.NCCL_SUM):
        comm.allReduce(a.data.ptr, b.data.ptr, count, type, op, stream.ptr)

    def error_of(comm):
        try:
            comm.check_async_error()
        except nccl.NcclError as error:
            return str(error)
"""


@pytest.fixture
def ranks(program):
    def run(count, code, **settings):
        return program(textwrap.dedent(PRELUDE) + textwrap.dedent(code), ranks=count, **settings)

    return run


@pytest.mark.parametrize("count", [2, 3])
def test_every_verb_gives_the_right_result(ranks, count):
    done = ranks(
        count,
        """
        N = 300_001  # more than one chunk, and uneven
        types = {"f": 7, "d": 8, "e": 6, "i": 2, "I": 3, "l": 4, "Q": 5, "B": 1, "b": 0}
        for letter, type in types.items():
            mine = [(np.arange(N) % 7 + k).astype(letter) for k in range(size)]
            a, b = device(mine[rank]), device(np.zeros(N, letter))
            all_reduce(a, b, N, type)
            stream.synchronize()
            assert (b.get() == sum(mine)).all(), letter
            all_reduce(a, a, N, type, nccl.NCCL_MAX)
            stream.synchronize()
            assert (a.get() == mine[-1]).all(), letter

        import ml_dtypes
        half = [(np.arange(1000) % 5 + k).astype(ml_dtypes.bfloat16) for k in range(size)]
        a = device(half[rank].view("u2"))
        all_reduce(a, a, 1000, nccl.NCCL_BFLOAT16)
        stream.synchronize()
        assert (a.get().view(ml_dtypes.bfloat16) == sum(half)).all()

        M = 100_003
        x = np.random.default_rng(5).standard_normal((size, M * size)).astype("f")
        a, part, whole = device(x[rank]), device(np.zeros(M, "f")), device(np.zeros(M * size, "f"))
        comm.reduceScatter(a.data.ptr, part.data.ptr, M, F, nccl.NCCL_SUM, stream.ptr)
        comm.allGather(part.data.ptr, whole.data.ptr, M, F, stream.ptr)
        stream.synchronize()
        assert np.allclose(whole.get(), x.sum(0), atol=1e-5)
        comm.broadcast(a.data.ptr, a.data.ptr, M * size, F, size - 1, stream.ptr)
        comm.reduce(part.data.ptr, part.data.ptr, M, F, nccl.NCCL_SUM, 0, stream.ptr)
        stream.synchronize()
        assert (a.get() == x[-1]).all()

        sent, got = device(np.full(N, rank, "f")), device(np.zeros(N, "f"))
        nccl.groupStart()
        comm.send(sent.data.ptr, N, F, (rank + 1) % size, stream.ptr)
        comm.recv(got.data.ptr, N, F, (rank - 1) % size, stream.ptr)
        nccl.groupEnd()
        stream.synchronize()
        assert (got.get() == (rank - 1) % size).all()

        if hasattr(comm, "commSplit"):  # not in CuPy 13
            part = comm.commSplit(rank % 2, -rank)  # even and odd ranks, backwards
            mates = list(range(rank % 2, size, 2))[::-1]
            assert (part.size(), part.rank_id()) == (len(mates), mates.index(rank))
            a = device(np.full(10, rank, "f"))
            part.allReduce(a.data.ptr, a.data.ptr, 10, F, nccl.NCCL_SUM, stream.ptr)
            stream.synchronize()
            assert (a.get() == sum(mates)).all()
            part.destroy()
            assert comm.commSplit(-1, 0) is None
        assert error_of(comm) is None
        comm.destroy()
        print("right")
        """,
    )
    assert done.stdout.count("right") == count, done.stdout + done.stderr  # lines of two ranks may run together
    assert done.findings == []


def test_an_all_reduce_is_asynchronous_and_in_stream_order(ranks):
    done = ranks(
        2,
        """
        host = np.frombuffer(cupy.cuda.alloc_pinned_memory(4000), "f", 1000)
        host[:] = rank + 1
        a = device(np.zeros(1000, "f"))
        if rank == 1:
            import time
            stream.launch_host_func(lambda _: time.sleep(0.3), None)
        runtime.memcpyAsync(a.data.ptr, host.ctypes.data, 4000, runtime.memcpyDefault, stream.ptr)
        all_reduce(a, a, 1000)
        runtime.memcpyAsync(host.ctypes.data, a.data.ptr, 4000, runtime.memcpyDefault, stream.ptr)
        assert not stream.done
        stream.synchronize()
        assert (host == 3).all()
        other = Stream(non_blocking=True)  # beside the collective that reads `a`: a race
        all_reduce(a, a, 1000)
        runtime.memsetAsync(a.data.ptr, 0, 4, other.ptr)
        runtime.deviceSynchronize()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.findings) == 2
    for line in done.findings:
        assert line.startswith("race: ")
        assert "NCCL's AllReduce(1000 x float32, sum)" in line
        assert "fill of 4 bytes" in line


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        (
            "all_reduce(a, a, 10 + rank)",
            ["AllReduce(10 x float32, sum)", "AllReduce(11 x float32, sum)"],
        ),
        (
            "all_reduce(a, a, 10) if rank else comm.allGather(a.data.ptr, b.data.ptr, 10, F, stream.ptr)",
            ["AllGather(10 x float32)", "AllReduce(10 x float32, sum)"],
        ),
        (
            "comm.broadcast(a.data.ptr, a.data.ptr, 10, F, rank, stream.ptr)",
            ["Broadcast(10 x float32, root 0)", "Broadcast(10 x float32, root 1)"],
        ),
        (
            "comm.send(a.data.ptr, 10, F, 1, stream.ptr) if rank == 0 else comm.recv(a.data.ptr, 9, F, 0, stream.ptr)",
            ["Send(10 x float32, to rank 1)", "Recv(9 x float32, from rank 0)"],
        ),
        (
            "all_reduce(a, a, 10) if rank == 0 else comm.recv(a.data.ptr, 10, F, 0, stream.ptr)",
            ["AllReduce(10 x float32, sum)", "Recv(10 x float32, from rank 0)"],
        ),
    ],
)
def test_differing_calls_are_named_on_both_ranks(ranks, calls, named):
    done = ranks(
        2,
        f"""
        a, b = device(np.zeros(64, "f")), device(np.zeros(64, "f"))
        {calls}
        stream.synchronize()
        print(error_of(comm))
        world.barrier()
        comm.abort()
        """,
    )
    assert done.stdout.count("NCCL_ERROR_INVALID_USAGE") == 2, done.stdout + done.stderr
    assert len(done.findings) == 2
    for line in done.findings:
        assert line.startswith("nccl: rank ")
        assert all(name in line for name in named), line


def test_a_rank_that_ends_is_named(program):
    done = program(
        """
        import os, pickle, subprocess, sys
        from cupy.cuda import nccl

        child = len(sys.argv) > 1
        id = pickle.loads(bytes.fromhex(sys.argv[1])) if child else nccl.get_unique_id()
        if not child:
            other = subprocess.Popen([sys.executable, "-W", "ignore", __file__, pickle.dumps(id).hex()])
        comm = nccl.NcclCommunicator(2, id, int(child))
        if child:
            os._exit(0)  # without destroying its communicator, which would wait for the other rank
        a = cupy.zeros(10, "f")
        comm.allReduce(a.data.ptr, a.data.ptr, 10, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
        runtime.deviceSynchronize()
        try:
            comm.check_async_error()
        except nccl.NcclError as error:
            print(error)
        """
    )
    assert "NCCL_ERROR_REMOTE_ERROR" in done.stdout, done.stdout + done.stderr
    assert done.findings == ["nccl: rank 0 of 2: rank 1 has ended during AllReduce(10 x float32, sum)"]


def test_a_wait_ends(ranks):
    done = ranks(
        2,
        """
        a = device(np.zeros(10, "f"))
        if rank == 0:
            all_reduce(a, a, 10)
            stream.synchronize()
            print(error_of(comm))
        world.barrier()
        comm.abort()
        """,
        nccl_timeout=2,
    )
    assert "NCCL_ERROR_SYSTEM_ERROR" in done.stdout, done.stdout + done.stderr
    [line] = done.findings
    assert "rank 0 is in AllReduce(10 x float32, sum), rank 1 is in nothing" in line


def test_an_abort_frees_its_rank_alone(ranks):
    done = ranks(
        2,
        """
        a = device(np.zeros(10, "f"))
        if rank == 0:
            all_reduce(a, a, 10)
        else:
            comm.abort()
        world.barrier()
        if rank == 0:
            print("waits", not stream.done, error_of(comm))
            comm.abort()
            stream.synchronize()
            print("freed")
        """,
    )
    assert "waits True None" in done.stdout, done.stdout + done.stderr
    assert "freed" in done.stdout, done.stdout + done.stderr


def test_two_communicators_on_a_device_need_an_order(found):
    import cupy
    from cupy.cuda import nccl

    one, other = (nccl.NcclCommunicator(1, nccl.get_unique_id(), 0) for _ in range(2))
    here, there = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    a, b = cupy.zeros(10, "f"), cupy.zeros(20, "f")
    cupy.cuda.Stream.null.synchronize()

    def all_reduce(comm, array, stream):
        comm.allReduce(array.data.ptr, array.data.ptr, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)

    all_reduce(one, a, here)
    there.wait_event(here.record())
    all_reduce(other, b, there)
    all_reduce(one, a, here)  # of one communicator after the other's, without an order
    [line] = found()
    assert line.startswith("nccl: ")
    assert "are of two communicators and have no order on device 0" in line
    assert "AllReduce(10 x float32, sum)" in line
    assert "AllReduce(20 x float32, sum)" in line
    all_reduce(one, a, here)  # the host has waited for the other's
    assert found() == []
    one.destroy()
    other.destroy()


def test_memory_that_nccl_cannot_use_is_refused(ranks):
    done = ranks(
        2,
        """
        a, host = device(np.zeros(10, "f")), np.zeros(10, "f")
        try:
            comm.allReduce(host.ctypes.data, a.data.ptr, 10, F, nccl.NCCL_SUM, stream.ptr)
        except nccl.NcclError as error:
            print(error)
        block = runtime.malloc(40)
        try:
            comm.allReduce(block, block, 11, F, nccl.NCCL_SUM, stream.ptr)
        except nccl.NcclError as error:
            print(error)
        comm.destroy()
        """,
    )
    assert done.stdout.count("INVALID_ARGUMENT") == 4, done.stdout + done.stderr
    assert len(done.findings) == 2
    assert all(
        "NCCL's AllReduce(11 x float32, sum) of 44 bytes goes 4 bytes past the end" in line for line in done.findings
    )


def test_what_killed_processes_left_behind_goes():
    from cupy.cuda import nccl

    shared = Path("/dev/shm")
    left, used = (
        shared / "cusim_nccl_4194305_0_left",
        shared / f"cusim_nccl_{os.getpid()}_0_used",
    )  # no such process; me
    left.touch()
    used.touch()
    nccl.get_unique_id()
    assert not left.exists()
    assert used.exists()
    used.unlink()


def test_two_ranks_in_one_process():
    import cupy
    import numpy as np
    from cupy.cuda import nccl

    comms = nccl.NcclCommunicator.initAll(2)
    arrays = []
    for rank in range(2):
        with cupy.cuda.Device(rank):
            arrays.append(cupy.full(100, rank + 1, "f"))
    nccl.groupStart()
    for comm, array in zip(comms, arrays, strict=True):
        with cupy.cuda.Device(array.device):
            comm.allReduce(array.data.ptr, array.data.ptr, 100, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)
    nccl.groupEnd()
    for array in arrays:
        with cupy.cuda.Device(array.device):
            assert (array.get() == np.float32(3)).all()
