"""What only a group over GPUs has: two kinds of arrays, streams that wait for it, pinned memory."""

import mmap
import threading
import time
import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from zerort import trace  # noqa: E402
from zerort.comm import open_group  # noqa: E402
from zerort.comm.agreed import gather_json, raise_together  # noqa: E402
from zerort.comm.transports.nccl.pinned import open_pinned  # noqa: E402
from zerort.errors import CallError, CollectiveMismatchError, DeviceMemoryError  # noqa: E402
from zerort.testing.contracts.collective import assert_same, pattern  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def group(options):
    with open_group(kind="nccl", options=options) as group:
        yield group


@pytest.fixture(scope="module")
def device(group):
    return group._transport.device


def total(group, numel, times=1):
    return np.stack([pattern(rank, numel) for rank in range(group.size)]).sum(0) * np.float32(times)


def test_each_rank_has_its_gpu(group, device):
    assert gather_json(group, device.ordinal) == list(range(group.size))
    assert f"cuda:{group.rank}" in repr(group)
    assert "agreed over" in repr(group)
    assert group.kind == "nccl"
    assert not group.one_memory


def test_the_hosts_arrays_travel_too(group):
    assert_same(group.all_reduce(pattern(group.rank, 5000)).wait(), total(group, 5000))
    assert_same(group.all_gather(np.array([group.rank])).wait(), np.arange(group.size))
    with pytest.raises(DeviceMemoryError, match="of rank 0"):
        raise_together(group, DeviceMemoryError("no memory of rank 0") if group.rank == 0 else None)


def test_the_hosts_arrays_do_not_wait_for_the_gpu(group):
    """Neither for what the caller has there, nor for a call over the GPU's arrays before; only their order is kept."""
    gate = threading.Event()
    with cupy.cuda.Stream(non_blocking=True) as busy:
        ones = cupy.ones(1000)
        busy.launch_host_func(lambda _: gate.wait(20), None)
        before = group.all_reduce(ones)
        try:
            assert_same(group.all_reduce(pattern(group.rank, 5000)).wait(timeout=10), total(group, 5000))
            group.barrier().wait(timeout=10)
            assert not before.done()
        finally:
            gate.set()
    assert_same(before.wait(), np.full(1000, float(group.size)))


def test_host_and_gpu_are_told_apart(group):
    if group.size == 1:
        pytest.skip("needs 2 ranks")
    array = np.ones(4, np.float32)
    with pytest.raises(CollectiveMismatchError, match=r"gpu:float32\[4\]"):
        group.all_reduce(cupy.asarray(array) if group.rank == 0 else array).wait()
    assert_same(group.all_reduce(cupy.asarray(array)).wait(), array * group.size)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda g: g.all_reduce(cupy.ones(4, np.float32), out=np.ones(4, np.float32)), "as out, like the source"),
        (lambda g: g.all_reduce(cupy.ones((4, 4))[:, 1]), "contiguous"),
        (lambda g: g.all_reduce(cupy.ones(4, np.complex64)), "can be reduced"),
        (lambda g: g.all_reduce(cupy.ones(4), out=cupy.ones(5)), "4 elements, got 5"),
        (lambda g: (lambda x: g.all_reduce(x[:4], out=x[2:6]))(cupy.ones(8)), "share no memory"),
        (lambda g: g.all_reduce([1.0]), "cupy.ndarray on GPU"),
        (lambda g: g.all_gather(cupy.ones(4), counts=[4 if r == g.rank else 2**40 for r in range(g.size)]), "free of"),
    ],
    ids=["kinds", "strided", "complex", "size", "overlap", "list", "no-memory"],
)
def test_wrong_arrays_fail_on_every_rank(group, call, match):
    if group.size == 1 and match == "free of":
        pytest.skip("needs 2 ranks")
    with pytest.raises(CallError, match=match):
        (call(group) if group.rank == group.size - 1 else group.all_reduce(cupy.ones(4))).wait()
    assert_same(group.all_reduce(cupy.ones(3)).wait(), np.full(3, float(group.size)))


def test_arrays_of_another_gpu_are_refused(group, device):
    count = cupy.cuda.runtime.getDeviceCount()
    if count == 1:
        pytest.skip("needs 2 GPUs, found 1")
    with cupy.cuda.Device((device.ordinal + 1) % count):
        elsewhere = cupy.ones(4)
    with pytest.raises(CallError, match=f"on GPU {group.size - 1}"):
        group.all_reduce(elsewhere if group.rank == group.size - 1 else cupy.ones(4)).wait()


def test_a_call_comes_after_what_its_caller_computed(group):
    """Whatever stream the caller is on, and without waiting for it."""
    with cupy.cuda.Stream(non_blocking=True):
        values = cupy.asarray(pattern(group.rank, 100_000))
        for _ in range(5):
            values *= 2
        ticket = group.all_reduce(values)
    assert_same(ticket.wait(), total(group, 100_000, 32))


def test_streams_wait_for_a_call_on_the_gpu(group, device):
    compute = device.named_stream("compute")
    out, seen = cupy.empty(100_000, np.float32), cupy.empty(100_000, np.float32)
    for _ in range(5):
        source = cupy.asarray(pattern(group.rank, 100_000))
        group.all_reduce(source, out=out).on(compute)
        looked = compute.submit(lambda: cupy.multiply(out, 2, out=seen))
        looked.wait()
        assert_same(seen, total(group, 100_000, 2))


def test_spans_are_as_long_as_their_calls(group):
    ones, ended = cupy.ones(1000), []

    def slow(_):
        time.sleep(0.5)
        ended.append(time.perf_counter_ns())

    cupy.cuda.Stream.null.synchronize()
    trace.reset()
    trace.enable()
    try:
        with cupy.cuda.Stream(non_blocking=True) as busy:
            busy.launch_host_func(slow, None)  # before the call, on the GPU
            group.all_reduce(ones, name="traced").wait()
    finally:
        trace.disable()
    spans = {span.name: span for span in trace.spans()}
    trace.reset()
    assert {"meet", "move", "all_reduce traced"} <= set(spans)
    assert spans["move"].end_ns >= ended[0]


def test_memory_that_one_gpu_lacks_no_rank_gets(group, device):
    group.barrier().wait()
    cupy.get_default_memory_pool().free_all_blocks()
    free, total_nbytes = device.memory()
    with pytest.raises(DeviceMemoryError, match=rf"on GPU {group.size - 1}, got .* \(rank {group.size - 1}\)"):
        group.zeros(total_nbytes * 2 if group.rank == group.size - 1 else 1000, "uint8")
    assert device.memory()[0] == free
    assert group.zeros(1000, "uint8").nbytes == 1000


@pytest.fixture
def room(group):
    """Bytes, all that CuPy's pool may still take: to use up a whole GPU takes long."""
    group.all_reduce(cupy.ones(1)).wait()  # after which the group holds nothing of calls before
    pool, nbytes = cupy.get_default_memory_pool(), 5 * 1024**2
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + nbytes)
    yield nbytes
    pool.set_limit(size=0)
    pool.free_all_blocks()


def test_results_take_the_place_of_what_finished_calls_hold(group, room):
    """A call that nobody waited for holds its arrays until someone looks, at the latest when memory runs out."""
    numel = room * 2 // 5
    first = cupy.zeros(numel, np.uint8)
    group.all_reduce(first)  # dropped, with a result as large: less than half of that is left
    del first
    group.barrier().wait()
    group._calls._stream.cuda.synchronize()
    assert group._transport.device_arrays.empty(numel, np.dtype(np.uint8)).nbytes == numel


def test_only_arrays_of_the_gpu_can_be_freed(group):
    array = group.zeros(10, "float32")
    with pytest.raises(CallError, match="from elsewhere"):
        group.free(np.ones(10, np.float32) if group.rank == group.size - 1 else array)
    group.free(array)


def test_pinned_memory_is_one_window(group, device):
    """A node holds it once: what one rank's GPU wrote, the others' read."""
    with open_pinned(group, 10 * mmap.PAGESIZE + 5, chunk_nbytes=4 * mmap.PAGESIZE) as pinned:
        assert pinned.pinned
        assert pinned.nbytes == 10 * mmap.PAGESIZE + 5
        board = pinned.empty(group.size * 2000, "float32")
        mine = board[group.rank * 2000 :][:2000]
        device.copy(cupy.asarray(pattern(group.rank, 2000)), out=mine).wait()
        group.barrier().wait()
        on_gpu = device.copy(board, out=device.empty(board.size, "float32")).wait()
        assert_same(on_gpu, np.concatenate([pattern(rank, 2000) for rank in range(group.size)]))
        group.barrier().wait()


def test_pinned_memory_must_agree(group):
    if group.size > 1:
        with pytest.raises(CollectiveMismatchError):
            open_pinned(group, 4096 + group.rank)
    with pytest.raises(CallError, match="multiple of the page size"):
        open_pinned(group, 4096, chunk_nbytes=1000 if group.rank == 0 else mmap.PAGESIZE)
    with open_group(kind="solo") as alone, pytest.raises(CallError, match="kind 'nccl'"):
        open_pinned(alone, 4096)


def test_a_group_of_parts_works_beside_its_whole(group):
    part = group.split(group.rank % 2, name="half")
    mates = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    for numel in (1, 1000, 70_001):
        in_part, in_whole = (g.all_reduce(cupy.asarray(pattern(group.rank, numel))) for g in (part, group))
        assert_same(in_whole.wait(), total(group, numel))
        assert_same(in_part.wait(), np.stack([pattern(rank, numel) for rank in mates]).sum(0))
    part.close()


def test_closing_gives_memory_back(group, device):
    group.barrier().wait()
    cupy.get_default_memory_pool().free_all_blocks()
    before, streams = device.memory()[0], len(device._streams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = group.split(0)
        arrays = [part.zeros(1_000_000, "float32") for _ in range(3)]
        part.all_reduce(arrays[0], out=arrays[1]).wait()
        del arrays
        part.close()
    assert len(device._streams) == streams
    cupy.get_default_memory_pool().free_all_blocks()
    assert device.memory()[0] >= before  # more, if an earlier call has let go of its arrays meanwhile
