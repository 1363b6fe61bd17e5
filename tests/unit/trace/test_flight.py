"""The flight recorder: the last calls in their order, and a dump that never makes matters worse."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from zerort.errors import CallError
from zerort.trace import FlightRecorder


def filled(length: int, calls: int) -> FlightRecorder:
    recorder = FlightRecorder(length)
    for sequence in range(calls):
        recorder.end(recorder.begin(sequence, "all_gather", "float32", 8, f"b{sequence}", "train.py:3"), "done")
    return recorder


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow: what the kernel says then differs from a full disk only in its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_call_is_a_row_from_begin_to_end() -> None:
    recorder = FlightRecorder(4)
    before = time.perf_counter_ns()
    entry = recorder.begin(7, "reduce_scatter", np.dtype("float32"), np.int64(1024), None, ("train.py", 12))
    (row,) = recorder.rows()
    submitted = row.pop("submitted_ns")
    assert before <= submitted <= time.perf_counter_ns()
    assert row == {
        "sequence": 7,
        "op": "reduce_scatter",
        "dtype": "float32",
        "numel": 1024,
        "name": None,
        "site": "train.py:12",
        "finished_ns": None,
        "status": "running",
    }
    recorder.end(entry, "timeout")
    (row,) = recorder.rows()
    assert row["status"] == "timeout"
    assert submitted <= row["finished_ns"] <= time.perf_counter_ns()


@pytest.mark.parametrize(("calls", "kept"), [(0, []), (2, [0, 1]), (3, [0, 1, 2]), (4, [1, 2, 3]), (10, [7, 8, 9])])
def test_the_ring_keeps_the_last_calls_oldest_first(calls: int, kept: list[int]) -> None:
    assert [row["sequence"] for row in filled(3, calls).rows()] == kept


def test_calls_of_one_number_are_rows_of_their_own() -> None:
    recorder = FlightRecorder(3)
    for name in "abcd":
        recorder.begin(6, "barrier", "uint8", 0, name, None)
    assert [row["name"] for row in recorder.rows()] == ["b", "c", "d"]


def test_an_end_that_comes_late_touches_no_other_row() -> None:
    recorder = FlightRecorder(2)
    late = recorder.begin(0, "all_reduce", "float32", 1, "late", None)
    for sequence in (1, 2):
        recorder.begin(sequence, "all_reduce", "float32", 1, None, None)
    recorder.end(late, "failed")
    assert [(row["sequence"], row["status"]) for row in recorder.rows()] == [(1, "running"), (2, "running")]


def test_threads_record_at_once() -> None:
    recorder = FlightRecorder(4000)

    def work(first: int) -> None:
        for sequence in range(first, first + 1000):
            recorder.end(recorder.begin(sequence, "barrier", "uint8", 0, None, None))

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = recorder.rows()
    assert sorted(row["sequence"] for row in rows) == list(range(4000))
    assert {row["status"] for row in rows} == {"done"}


@pytest.mark.parametrize("length", [0, -3, 2.5])
def test_a_recorder_has_room(length: int) -> None:
    with pytest.raises(CallError, match="length to be an integer of at least 1"):
        FlightRecorder(length)


def test_a_dump_makes_the_directory_and_reads_back(tmp_path: Path) -> None:
    recorder = filled(3, 5)
    path = recorder.dump(tmp_path / "deep" / "flight", rank=3, reason="timeout in all_gather")
    assert path is not None
    assert path.parent == tmp_path / "deep" / "flight"
    assert path.name.endswith("-rank3.json")
    assert str(os.getpid()) in path.name
    document = json.loads(path.read_text())
    assert document["calls"] == recorder.rows()
    assert len(document["calls"]) == 3
    assert (document["rank"], document["reason"], document["pid"]) == (3, "timeout in all_gather", os.getpid())
    assert abs(document["dumped_ns"] + document["wall_offset_ns"] - time.time_ns()) < 60 * 10**9
    assert os.listdir(path.parent) == [path.name]


def test_a_dump_is_for_its_user_alone(tmp_path: Path) -> None:
    path = filled(3, 1).dump(tmp_path / "flight", rank=0, reason="x")
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_link_that_somebody_put_where_records_go_is_not_followed(tmp_path: Path) -> None:
    """In a directory like /tmp, where everybody could have guessed the name."""
    (tmp_path / "elsewhere").mkdir()
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    (public / "flight").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="a link or another user's"):
        assert filled(3, 1).dump(public / "flight", rank=0, reason="x") is None
    assert not list((tmp_path / "elsewhere").iterdir())
    assert filled(3, 1).dump(tmp_path / "elsewhere", rank=0, reason="x") is not None


def test_dumps_of_two_groups_do_not_meet(tmp_path: Path) -> None:
    paths = {filled(3, 1).dump(tmp_path, rank=0, reason="x") for _ in range(2)}
    assert len(paths) == len(os.listdir(tmp_path)) == 2


def test_a_named_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("old")
    assert filled(3, 1).dump(str(path), rank=0, reason="x") == path
    assert json.loads(path.read_text())["reason"] == "x"


def test_a_directory_that_cannot_be_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match=r"Rank 2 could not write .*file/flight.*: .*ZERORT_FLIGHT_DIR"):
        assert filled(3, 1).dump(tmp_path / "file", rank=2, reason="x") is None
    with pytest.warns(RuntimeWarning, match=r"Rank 2 could not write .*/proc/nowhere/flight.*: No such file"):
        assert filled(3, 1).dump("/proc/nowhere", rank=2, reason="x") is None


def test_a_full_disk_is_a_warning_and_leaves_nothing(tmp_path: Path) -> None:
    recorder = filled(200, 200)
    with pytest.warns(RuntimeWarning, match="Rank 0 could not write its flight record .*: File too large"), full_disk():
        assert recorder.dump(tmp_path, rank=0, reason="x") is None
    assert os.listdir(tmp_path) == []
    assert recorder.dump(tmp_path, rank=0, reason="x") is not None
