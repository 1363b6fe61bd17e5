"""An operation of a worker pool ends when all who work on it have ended; a file is open once for all who work on it."""

import threading

import pytest

from zerort.errors import ClosedError
from zerort.storage.files.blocks import BlockFile
from zerort.storage.files.shared_file import SharedFile
from zerort.storage.stores.operation import Span, StoreOperation
from zerort.storage.stores.worker_pool import WorkerPool


@pytest.fixture
def pool():
    pool = WorkerPool("disk", threads=2)
    yield pool
    pool.close()


def submit(pool, part, *, pieces=4):
    """One operation, each piece of which has a part computed."""

    def work(numbers):
        for number in numbers:
            pool.compute(operation, lambda number=number: part(number), name="sums")

    operation = StoreOperation(Span("value", 0, 1, writes=False))
    pool.submit(operation, work, pieces=pieces, name="read")
    return operation


def test_an_operation_ends_when_what_is_computed_for_it_has(pool):
    go_on, computed = threading.Event(), []

    def part(number):
        go_on.wait()
        computed.append(number)

    operation = submit(pool, part)
    with pytest.raises(TimeoutError):
        operation.wait(0.05)
    go_on.set()
    operation.wait()
    assert sorted(computed) == [0, 1, 2, 3]


def test_an_error_in_what_is_computed_is_the_operations(pool):
    operation = submit(pool, lambda number: [][number])
    with pytest.raises(IndexError):
        operation.wait()


def test_an_operation_ends_also_if_nobody_computes_any_more(pool):
    pool._sums.close()
    with pytest.raises(ClosedError):
        submit(pool, print).wait()


def test_closing_finishes_what_is_computed(pool):
    computed = []
    submit(pool, computed.append, pieces=50)
    pool.close()
    assert sorted(computed) == list(range(50))


def test_a_file_is_open_once_for_all_and_not_longer(tmp_path):
    path, opened = str(tmp_path / "file"), []
    BlockFile(path, create_nbytes=4096).close()

    def open_file():
        opened.append(BlockFile(path))
        return opened[-1]

    shared = SharedFile(open_file)
    with shared.opened() as first, shared.opened() as second:
        assert first is second
    with pytest.raises(OSError, match="Bad file descriptor"):
        _ = first.nbytes
    with shared.opened() as third:
        assert third is not first
        assert third.nbytes == 4096
    assert len(opened) == 2


def test_a_file_that_could_not_be_opened_is_tried_again(tmp_path):
    path = str(tmp_path / "file")
    shared = SharedFile(lambda: BlockFile(path))
    with pytest.raises(FileNotFoundError), shared.opened():
        pass
    BlockFile(path, create_nbytes=4096).close()
    with shared.opened() as file:
        assert file.nbytes == 4096
