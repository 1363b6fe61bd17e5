"""A GPU, a rank or NCCL that fails is a named error on every rank: nothing hangs, and the GPU's memory comes back."""

import signal
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("cupy")

import hardware
from gpu_jobs import PRELUDE, ranks_that

from zerort.comm.transports.node.meeting import open_control


def test_a_killed_rank_is_named_and_the_gpu_is_freed(tmp_path):
    """Rank 1 dies when the others' GPUs are in the middle of a collective with it."""
    code = """
    import cupy
    from zerort.comm.transports.nccl.opening import open_on_gpus
    from zerort.comm.transports.node.transport import NodeTransport
    rank, options = int(sys.argv[1]), zr.GroupOptions.from_environment(timeout=30.0)
    host = NodeTransport(
        sys.argv[2], rank, 3, name="world", options=options, in_native=zr.native.AVAILABLE, sees_processes=True
    )
    host.start()
    group = zr.Group(open_on_gpus(host, local_rank=rank, hosts=[0] * 3, device=None))
    array = cupy.ones(100_000, np.float32)
    group.all_reduce(array).wait()
    if rank == 1:
        with block_this_rank(60):
            group.all_reduce(array, name="gradients")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(array, name="gradients").wait()
    except RankFailedError as error:
        say("rank", rank, "raised", "'gradients'" in str(error), "rank 1: gone" in str(error))
    try:
        group.barrier()
    except CollectiveError as error:
        say("rank", rank, "refused")
    del array
    close_and_count(group)
    """
    script = tmp_path / "job.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    control = open_control(3, "/dev/shm")  # without a launcher: one would end all ranks with the first
    env = hardware.environment(devices=3) | {"ZERORT_FLIGHT_DIR": str(tmp_path)}
    words = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), control.path], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(3)
    ]
    try:
        # The one that is killed first: until someone has asked how it ended, it counts as a process.
        output = "".join(ranks[rank].communicate(timeout=60)[0] for rank in (1, 0, 2))
    finally:
        for process in ranks:
            process.kill()
        control.close()
    assert [process.returncode for process in ranks] == [0, -signal.SIGKILL, 0], output
    assert ranks_that("raised True True", output) == ["0", "2"], output
    assert ranks_that("refused", output) == ["0", "2"], output
    assert ranks_that("released True", output) == ["0", "2"], output


@hardware.only_emulated("NCCL waits where calls differ, and reports nothing")
def test_an_error_of_nccl_is_an_error_on_every_rank(job):
    """Rank 1 goes to NCCL behind the group's back, so that the ranks are in different calls there."""
    code = """
    import cupy
    group = open_group(timeout=30.0)
    array = cupy.ones(1000, np.float32)
    group.all_reduce(array).wait()
    if rank == 1:
        communicator = group._transport._watch._communicator
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Stream.null.synchronize()
        communicator.allReduce(array.data.ptr, array.data.ptr, 7, 7, 0, stream.ptr)
    try:
        group.all_reduce(array, name="gradients").wait()
    except RankFailedError as error:
        say("rank", rank, "raised", "error of NCCL on rank" in str(error), "gradients" in str(error))
    del array
    close_and_count(group)
    """
    result = job(2, code)
    assert result.code == 0, result.output
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output
    assert ranks_that("released True", result.output) == ["0", "1"], result.output


def test_a_fault_of_a_gpu_is_an_error_on_every_rank(job):
    """Rank 1's GPU dies of a kernel when both ranks have queued a collective behind it."""
    code = """
    import cupy
    group = open_group(timeout=30.0)
    array = cupy.ones(1000, np.float32)
    group.all_reduce(array).wait()
    write = cupy.RawKernel('extern "C" __global__ void write() { *(volatile char *)64 = 1; }', "write")
    with block_this_rank(1):
        if rank == 1:
            write((1,), (1,), ())
        ticket = group.all_reduce(array, name="gradients")
    group.barrier()
    began = time.monotonic()
    try:
        ticket.wait()
        group.all_reduce(array, name="more").wait()
    except (DeviceError, CollectiveError) as error:
        say("rank", rank, "raised", "IllegalAddress" in str(error), time.monotonic() - began < 15, repr(error))
    group.close()
    say("rank", rank, "closed", time.monotonic() - began < 20)
    """
    result = job(2, code)
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output
    assert ranks_that("closed True", result.output) == ["0", "1"], result.output


def test_a_stuck_gpu_is_a_timeout_that_names_the_call(job):
    code = """
    import cupy
    group = open_group(timeout=2.0)
    array = cupy.ones(1000, np.float32)
    group.all_reduce(array).wait()
    with block_this_rank(8 if rank == 1 else 0):
        ticket = group.all_reduce(array, name="gradients")
    try:
        ticket.wait()
    except (CollectiveTimeoutError, RankFailedError) as error:
        say("rank", rank, "raised", "'gradients'" in str(error), "within 2.0 s" in str(error), type(error).__name__)
    group.close()
    """
    result = job(2, code)
    assert result.code == 0, result.output
    assert ranks_that("raised True True", result.output) == ["0", "1"], result.output
    assert "CollectiveTimeoutError" in result.output


@hardware.only_emulated("a limit of pinned memory for one rank")
def test_a_rank_that_cannot_pin_makes_all_fall_back(job):
    result = job(
        2,
        """
        if rank == 1:
            os.environ["CUSIM_PINNED_MB"] = "1"
        import cupy
        from zerort.comm.transports.nccl.pinned import open_pinned
        with open_group() as group:
            device = group._transport.device
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pinned = open_pinned(group, 3_000_000, chunk_nbytes=512 * 1024)
            told = [str(one.message) for one in caught]
            array = pinned.empty(300_000, "float32")
            device.copy(cupy.full(300_000, 5.0, np.float32), out=array).wait()
            right = bool((array == 5).all())
            say("rank", rank, "fell back", not pinned.pinned, right, ["1 of 2 ranks" in text for text in told])
            pinned.close()
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the warning is then rank 0's own trouble, not the group's
                try:
                    open_pinned(group, 3_000_000, chunk_nbytes=512 * 1024)
                except RuntimeWarning as error:
                    say("rank", rank, "warned", error.__traceback__.tb_frame.f_code.co_name == "<module>")
            say("rank", rank, "goes on", int(group.all_reduce(cupy.ones(3, np.int32)).wait()[0]))
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that(r"fell back True True \[True\]", result.output) == ["0"], result.output
    assert ranks_that(r"fell back True True \[\]", result.output) == ["1"], result.output
    assert ranks_that("warned True", result.output) == ["0"], result.output
    assert ranks_that("goes on 2", result.output) == ["0", "1"], result.output


def test_a_rank_that_does_not_come_is_named(job):
    """The ranks that wait on the host have nothing on their GPUs yet; the group breaks all the same."""
    result = job(
        2,
        """
        import cupy
        group = open_group(timeout=2.0)
        group.all_reduce(cupy.ones(10)).wait()
        if rank == 1:
            time.sleep(5)
        try:
            group.all_reduce(cupy.ones(8), name="loss").wait()
        except CollectiveTimeoutError as error:
            say("rank", rank, "raised", "all_reduce(gpu:float64[8], sum) 'loss'" in str(error))
        close_and_count(group)
        """,
    )
    assert result.code == 0, result.output
    assert ranks_that("raised True", result.output) == ["0", "1"], result.output
    assert ranks_that("released True", result.output) == ["0", "1"], result.output


def test_an_error_behind_the_meeting_breaks_the_group(job):
    """Rank 1 has no memory to widen its integers in; the others are in NCCL by then."""
    result = job(
        2,
        """
        import cupy
        group = open_group()
        numbers = cupy.zeros(2_000_000, np.int16)
        hoard = group.zeros((group._transport.device.memory()[0] - 1024**2) if rank == 1 else 1, "uint8")
        try:
            group.all_reduce(numbers, out=numbers, name="counts").wait()
        except (RankFailedError, MemoryError) as error:
            say("rank", rank, "raised", type(error).__name__, "counts" in str(error), "ut of memory" in str(error))
        try:
            group.barrier()
        except CollectiveError as error:
            say("rank", rank, "refused")
        group.close()
        """,
    )
    assert result.code == 0, result.output
    assert "rank 0 raised RankFailedError True True" in result.output, result.output
    assert "rank 1 raised OutOfMemoryError False True" in result.output, result.output
    assert ranks_that("refused", result.output) == ["0", "1"], result.output


def test_a_gpu_without_memory_leaves_the_group_usable(job):
    result = job(
        2,
        """
        import cupy
        group = open_group()
        hoard = group.zeros(200 * 1024**2, "uint8")
        try:
            group.zeros(100 * 1024**2 if rank == 1 else 1000, "uint8")
        except DeviceMemoryError as error:
            say("rank", rank, "raised", "Expected 104,857,600 bytes on GPU 1" in str(error), "(rank 1)" in str(error))
        total = group.all_reduce(cupy.ones(10)).wait()
        say("rank", rank, "goes on", float(total[0]) == 2.0)
        del hoard, total
        close_and_count(group)
        """,
        mem_mb=256,
    )
    assert result.code == 0, result.output
    for what in ("raised True True", "goes on True", "released True"):
        assert ranks_that(what, result.output) == ["0", "1"], result.output


def test_a_process_that_ends_with_calls_under_way_does_not_hang(job):
    """It never waited, nor closed the group."""
    result = job(
        2,
        """
        import cupy
        group = open_group()
        for _ in range(20):
            group.all_reduce(cupy.ones(100_000))
        group.barrier().wait()
        say("rank", rank, "ends")
        """,
        timeout=40,
    )
    # How far the other one's GPU is when the first process ends is up to chance: it ends as well, or it is told.
    assert ranks_that("ends", result.output) in (["0", "1"], ["0"], ["1"]), result.output
    assert result.code == 0 or "RankFailedError" in result.output, result.output
