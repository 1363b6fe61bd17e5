"""The one loop: every chunk once, in order, on the caller's thread, at any depth; and errors that leave nothing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerort import native, trace
from zerort.device import Done, HostStream
from zerort.errors import CallError, ClosedError, StorageError
from zerort.storage import NvmeOptions, NvmeStore
from zerort.storage.files.faults import injected
from zerort.streaming import Pipeline, StoreTransfer, cut_evenly, slot_nbytes_of
from zerort.testing.memory_store import MemoryStore

CHUNK, COUNT = 70_000, 11


@pytest.fixture(params=["memory", "nvme"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else NvmeStore(tmp_path, options=NvmeOptions(retries=0))
    with store:
        yield store


def fill(store, names=("m", "v")):
    """Make values of COUNT chunks and return the chunks."""
    for at, name in enumerate(names):
        store.create(name, CHUNK * COUNT * 4)
        store.write(name, np.arange(CHUNK * COUNT, dtype=np.float32) + at)
    return [
        [StoreTransfer(store=store, name=name, numel=CHUNK, offset=k * CHUNK * 4) for name in names]
        for k in range(COUNT)
    ]


def value(store, name):
    return store.read(name, np.empty(CHUNK * COUNT, np.float32)).wait()


@pytest.mark.parametrize("depth", [1, 2, 3, 6, 20])
def test_every_chunk_is_computed_once_in_order_on_this_thread(store, depth):
    chunks = fill(store)
    seen = []

    def compute(number, m, v):
        assert threading.current_thread() is threading.main_thread()
        seen.append(number)
        assert m[0] == number * CHUNK + (len(seen) > COUNT)
        m += 1
        v *= 2

    with Pipeline(slot_nbytes=slot_nbytes_of(chunks), depth=depth) as pipeline:
        for _ in range(2):
            report = pipeline.run(chunks, compute)
        assert report.chunks == COUNT
        assert report.read_nbytes == report.written_nbytes == 2 * 4 * CHUNK * COUNT
        assert report.seconds >= report.compute_seconds
        assert report.depth == pipeline.depth == depth
        assert pipeline.nbytes <= min(report.depth, COUNT) * slot_nbytes_of(chunks)
    assert seen == [*range(COUNT)] * 2
    assert np.array_equal(value(store, "m"), np.arange(CHUNK * COUNT, dtype=np.float32) + 2)
    assert np.array_equal(value(store, "v"), (np.arange(CHUNK * COUNT, dtype=np.float32) + 1) * 4)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_streamed_step_equals_one_in_memory_to_the_bit(store, depth):
    """AdamW over three values of state and a gradient that is only read, five steps."""
    numel = CHUNK * 4 + 123
    generator = np.random.default_rng(0)
    names = ("master", "exp_avg", "exp_avg_sq")
    memory = {name: np.zeros(numel, np.float32) for name in names}
    memory["master"][:] = generator.standard_normal(numel, np.float32)
    gradients = [generator.standard_normal(numel, np.float32) for _ in range(5)]
    for name in (*names, "gradient"):
        store.create(name, numel * 4)
    store.write("master", memory["master"].copy())
    chunks = []
    for begin in range(0, numel, CHUNK):
        count = min(CHUNK, numel - begin)
        parts = [StoreTransfer(store=store, name=name, numel=count, offset=begin * 4) for name in names]
        chunks.append([*parts, StoreTransfer(store=store, name="gradient", numel=count, offset=begin * 4, write=False)])
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    with Pipeline(slot_nbytes=slot_nbytes_of(chunks), depth=depth) as pipeline:
        for step, gradient in enumerate(gradients, start=1):
            native.adamw_(memory["master"], gradient, memory["exp_avg"], memory["exp_avg_sq"], step=step, **settings)
            store.write("gradient", gradient)

            def update(number, master, exp_avg, exp_avg_sq, grad, *, step=step):
                native.adamw_(master, grad, exp_avg, exp_avg_sq, step=step, **settings)

            pipeline.run(chunks, update, finish=False)  # the next step reads what this one still writes
    for name in names:
        found = store.read(name, np.empty(numel, np.float32)).wait()
        assert found.tobytes() == memory[name].tobytes(), name


def test_parts_of_several_stores_and_dtypes(tmp_path):
    """Read from one tier, write to another: what is not read comes as it is, what is not written stays."""
    with MemoryStore() as fast, NvmeStore(tmp_path) as slow:
        slow.create("weights", 4000)
        slow.write("weights", np.arange(1000, dtype=np.float32))
        fast.create("half", 2000)
        chunks = [
            [
                StoreTransfer(store=slow, name="weights", numel=100, offset=k * 400, write=False),
                StoreTransfer(store=fast, name="half", numel=100, dtype="bfloat16", offset=k * 200, read=False),
            ]
            for k in range(10)
        ]

        def cast(number, weights, half):
            native.cast_into(half, weights)
            weights[:] = -1

        with Pipeline(slot_nbytes=slot_nbytes_of(chunks)) as pipeline:
            report = pipeline.run(chunks, cast)
        assert (report.read_nbytes, report.written_nbytes) == (4000, 2000)
        found = fast.read("half", np.empty(1000, native.BFLOAT16)).wait()
        assert np.array_equal(found, np.arange(1000, dtype=np.float32).astype(native.BFLOAT16))
        assert (slow.read("weights", np.empty(1000, np.float32)).wait() == np.arange(1000)).all()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 5, COUNT - 1])
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_compute_leaves_nothing_under_way(store, depth, at, kind):
    """Chunks before it are written, those after it are as they were, and the pipeline can go on."""
    chunks = fill(store)

    def fail(number, m, v):
        m += 1000
        if number == at:
            raise kind("on purpose")

    with Pipeline(slot_nbytes=slot_nbytes_of(chunks), depth=depth) as pipeline:
        with pytest.raises(kind, match="on purpose"):
            pipeline.run(chunks, fail)
        expected = np.arange(CHUNK * COUNT, dtype=np.float32)
        expected[: at * CHUNK] += 1000
        assert np.array_equal(value(store, "m"), expected)

        def again(number, m, v):
            m -= 5

        pipeline.run(chunks, again)
        assert np.array_equal(value(store, "m"), expected - 5)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("fault", ["eio@8:op=read:times=all", "eio@8:op=write:times=all", "enospc@4:op=write"])
def test_an_error_of_the_disk_reaches_the_caller_and_leaves_nothing_under_way(tmp_path, depth, fault):
    before = threading.active_count()
    with NvmeStore(tmp_path, options=NvmeOptions(retries=0), rank=3) as store:
        chunks = fill(store)
        store.flush()
        with Pipeline(slot_nbytes=slot_nbytes_of(chunks), depth=depth) as pipeline:
            with injected(fault), pytest.raises(StorageError, match=r"\.chunk.* on rank 3, got"):
                pipeline.run(chunks, lambda number, m, v: None)
            pipeline.run(chunks, lambda number, m, v: None)  # the disk has recovered
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


def test_reads_computing_and_writes_overlap_and_a_trace_shows_it(tmp_path):
    """With three slots the next chunk is read while one is computed; with one slot nothing overlaps."""
    overlaps = {}
    for depth in (1, 3):
        with NvmeStore(tmp_path) as store, injected("delay@1:seconds=0.01:times=all"):
            chunks = fill(store, names=("m",))
            store.flush()
            trace.reset()
            trace.enable()
            try:
                with Pipeline(slot_nbytes=slot_nbytes_of(chunks), depth=depth) as pipeline:
                    pipeline.run(chunks, lambda number, m: time.sleep(0.01))
            finally:
                trace.disable()
        spans = trace.spans()
        trace.reset()
        tracks = {span.track for span in spans}
        assert "pipeline compute" in tracks
        assert any(track.startswith("nvme read") for track in tracks)
        assert any(track.startswith("nvme write") for track in tracks)
        computing = [span for span in spans if span.track == "pipeline compute"]
        moving = [span for span in spans if span.track.startswith(("nvme read", "nvme write"))]
        overlaps[depth] = sum(
            one.begin_ns < other.end_ns and other.begin_ns < one.end_ns for one in computing for other in moving
        )
    assert overlaps[1] == 0
    assert overlaps[3] > COUNT // 2


@given(st.integers(0, 10**10), st.integers(1, 10**9))
def test_chunks_begin_at_grains_and_tile(numel, most):
    if numel // most > 10**4:
        most = numel // 10**4 + 1
    ranges = cut_evenly(numel, most=most)
    assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert not ranges or (ranges[0][0], ranges[-1][1]) == (0, numel)
    for begin, end in ranges:
        assert begin % 2**18 == 0
        assert 0 < end - begin <= max(most, 2**18)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_computed_elsewhere_is_written_when_its_ticket_is_done(store, depth):
    """As on a GPU: the next chunk is begun meanwhile, and the next run sees all of it."""
    chunks = fill(store)
    begun = [threading.Event() for _ in range(COUNT + 1)]

    def compute(number, m, v):
        begun[number].set()

        def work():
            if depth > 1:
                assert begun[min(number + 1, COUNT - 1)].wait(200)  # the next one's compute
            m[:] += 1

        return worker.submit(work)

    with HostStream("elsewhere", helping=False) as worker, Pipeline(slot_nbytes=600_000, depth=depth) as pipeline:
        for _ in range(3):
            pipeline.run(chunks, compute, finish=False)
        assert np.array_equal(value(store, "m"), np.arange(CHUNK * COUNT, dtype=np.float32) + 3)


def test_a_run_returns_when_all_is_being_written(store):
    """Whoever reads a value next comes after its write, although computing ended late."""
    chunks, late = fill(store)[:1], threading.Event()

    def compute(number, m, v):
        timer = threading.Timer(0.02, late.set)
        timer.start()
        return worker.submit(lambda: late.wait(200) and m.fill(7))

    with HostStream("elsewhere", helping=False) as worker, Pipeline(slot_nbytes=600_000) as pipeline:
        pipeline.run(chunks, compute, finish=False)
        assert (store.read("m", np.empty(CHUNK, np.float32)).wait() == 7).all()


def test_an_error_of_what_is_computed_elsewhere_is_told(store):
    """Its chunk is not written."""
    chunks = fill(store)

    def compute(number, m, v):
        m += 1
        return worker.submit(lambda: 1 // (number != 5))

    with HostStream("elsewhere", helping=False) as worker, Pipeline(slot_nbytes=600_000) as pipeline:
        with pytest.raises(ZeroDivisionError):
            pipeline.run(chunks, compute)
        found = value(store, "m").reshape(COUNT, CHUNK)[:, 0] - np.arange(COUNT) * CHUNK
        assert found[:6].tolist() == [1, 1, 1, 1, 1, 0]
        pipeline.run(chunks[6:], lambda number, m, v: Done(None))


def test_what_makes_no_sense_is_refused(store):
    chunks = fill(store)
    for depth in (0, -1, True, 1.5, "auto"):
        with pytest.raises(CallError, match="Expected a depth"):
            Pipeline(slot_nbytes=10, depth=depth)
    with Pipeline(slot_nbytes=8192) as pipeline:
        with pytest.raises(CallError, match="larger slot_nbytes"):
            pipeline.run(chunks, lambda *arrays: None)
        assert pipeline.run([], lambda *arrays: None).chunks == 0
        one = [StoreTransfer(store=store, name="m", numel=10, offset=0)]
        two = [StoreTransfer(store=store, name="m", numel=10, offset=36)]
        reads = [[StoreTransfer(store=store, name="m", numel=10, offset=at, write=False)] for at in (0, 20)]
        for wrong in ([one, two], [one, one], [two, reads[1]], [[*one, *two]]):
            with pytest.raises(CallError, match="each byte is in one chunk"):
                pipeline.run(wrong, lambda *arrays: None)
        pipeline.run(reads, lambda number, m: None)
        with pytest.raises(CallError, match="'unknown'"):
            pipeline.run([[StoreTransfer(store=store, name="unknown", numel=1)]] * 1, lambda *arrays: None)
    pipeline.close()
    with pytest.raises(ClosedError):
        pipeline.run([], lambda *arrays: None)
    assert "closed" in repr(pipeline)
