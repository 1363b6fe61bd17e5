"""Spans and counters, and the file they end in: written, read back, and looked at."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerort import trace
from zerort.errors import CallError
from zerort.trace import files


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    trace.disable()
    trace.reset()
    yield
    trace.disable()
    trace.reset()
    trace.enable()  # back to the default capacity
    trace.disable()


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    """The thread tracks' names by (pid, tid)."""
    named = [event for event in events(document, "M") if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def payload(rank: int, spans: list[list[Any]], **fields: Any) -> dict[str, Any]:
    plain = {"rank": rank, "host": "node", "pid": 1, "wall_offset_ns": 0, "dropped": 0, "counters": {}}
    return {**plain, "spans": spans, **fields}


# ── the tracer ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_disabled_tracer_records_nothing_and_shares_one_object() -> None:
    assert not trace.is_enabled()
    with trace.span("a", track="comm", nbytes=3):
        trace.add_span("b", track="comm", begin_ns=1, end_ns=2)
    assert trace.spans() == []
    assert trace.span("a") is trace.span("b", track="other", nbytes=3)


def test_a_disabled_span_lets_errors_through() -> None:
    with pytest.raises(KeyError), trace.span("a"):
        raise KeyError


def test_spans_nest() -> None:
    trace.enable()
    before = time.perf_counter_ns()
    with trace.span("outer", step=3), trace.span("inner"):
        pass
    after = time.perf_counter_ns()
    inner, outer = trace.spans()
    assert (inner.name, outer.name, outer.args, inner.args) == ("inner", "outer", {"step": 3}, {})
    assert before <= outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns <= after


def test_a_span_that_raises_is_recorded_with_its_error() -> None:
    trace.enable()
    with pytest.raises(KeyError), trace.span("a", step=1):
        raise KeyError
    assert [span.args for span in trace.spans()] == [{"step": 1, "error": "KeyError"}]


def test_what_is_open_when_the_tracer_is_disabled_is_not_recorded() -> None:
    trace.enable()
    with trace.span("a"):
        trace.disable()
    assert trace.spans() == []


def test_disable_and_enable_keep_and_reset_forgets() -> None:
    trace.enable()
    trace.add_span("a", track="x", begin_ns=5, end_ns=9, nbytes=2)
    trace.disable()
    trace.enable()
    assert trace.spans() == [trace.Span("a", "x", 5, 9, {"nbytes": 2})]
    trace.count("n")
    trace.reset()
    assert (trace.spans(), trace.counters(), trace.dropped(), trace.is_enabled()) == ([], {}, 0, True)


def test_the_newest_spans_are_kept_and_the_dropped_counted() -> None:
    trace.enable(capacity=3)
    for number in range(8):
        trace.add_span(str(number), track="x", begin_ns=number, end_ns=number)
    assert [span.name for span in trace.spans()] == ["5", "6", "7"]
    assert trace.dropped() == 5
    with pytest.raises(CallError, match="capacity to be an integer of at least 1, got 0"):
        trace.enable(capacity=0)


def test_counters_count_while_disabled_and_lose_nothing_between_threads() -> None:
    def work() -> None:
        for _ in range(5000):
            trace.count("comm.bytes", 3)
            trace.count("comm.calls")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        trace.counters()  # reading meanwhile disturbs nobody
    for thread in threads:
        thread.join()
    work()
    assert trace.counters() == {"comm.bytes": 5 * 15000, "comm.calls": 5 * 5000}


def test_no_count_is_lost_when_threads_switch_in_the_middle_of_one() -> None:
    class Interrupted(int):
        def __radd__(self, total: int) -> int:  # called after the total was read and before it is written
            other = threading.Thread(target=trace.count, args=("n", 100))
            other.start()
            other.join()
            return total + int(self)

    trace.count("n", 1)
    trace.count("n", Interrupted(10))
    assert trace.counters() == {"n": 111}


def test_counters_are_a_copy_and_start_again_after_reset() -> None:
    trace.count("a", 2)
    trace.counters()["a"] = 7
    assert trace.counters() == {"a": 2}
    trace.reset()
    trace.count("a", 5)
    assert trace.counters() == {"a": 5}


# ── the file ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_spans_of_several_threads_land_on_their_tracks(tmp_path: Path) -> None:
    trace.enable()

    def work(track: str) -> None:
        for number in range(20):
            with trace.span("outer", track=track, number=number), trace.span("inner", track=track):
                pass

    threads = [threading.Thread(target=work, args=(track,)) for track in ("comm", "nvme")]
    for thread in threads:
        thread.start()
    work("main")
    for thread in threads:
        thread.join()

    path = trace.write_chrome(tmp_path / "trace.json", [trace.rank_events(3, "node-a")])
    document = read(path)
    assert tracks(document) == {(3, 0): "main", (3, 1): "comm", (3, 2): "nvme"}
    for tid in range(3):
        mine = [event for event in events(document, "X") if event["tid"] == tid]
        outer = [event for event in mine if event["name"] == "outer"]
        inner = [event for event in mine if event["name"] == "inner"]
        assert [event["args"]["number"] for event in outer] == list(range(20))
        assert len(inner) == 20
        for out, within in zip(outer, inner, strict=True):
            assert out["ts"] <= within["ts"]
            # The file holds decimal microseconds; sums of them are exact to well below a nanosecond.
            assert within["ts"] + within["dur"] <= out["ts"] + out["dur"] + 1e-4


def test_ranks_are_processes_in_order_and_line_up_on_the_wall_clock(tmp_path: Path) -> None:
    # Two hosts whose performance counters started a second apart; both spans began at the same wall time.
    wall = 1_700_000_000 * 10**9
    payloads = [
        payload(1, [["step", "comm", 5_000, 7_500, {}]], host="b", wall_offset_ns=wall - 5_000),
        payload(0, [["step", "comm", 10**9, 10**9 + 1, {}]], host="a", wall_offset_ns=wall - 10**9),
        payload(2, [["late", "main", 123, 124, {}]], host="b", wall_offset_ns=wall - 23),
    ]
    document = read(trace.write_chrome(str(tmp_path / "t.json"), json.loads(json.dumps(payloads))))
    names = [(e["pid"], e["args"]["name"]) for e in events(document, "M") if e["name"] == "process_name"]
    assert names == [(0, "rank 0 (a)"), (1, "rank 1 (b)"), (2, "rank 2 (b)")]
    order = {e["pid"]: e["args"]["sort_index"] for e in events(document, "M") if e["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}
    times = {event["pid"]: (event["ts"], event["dur"]) for event in events(document, "X")}
    assert times == {0: (0.0, 0.001), 1: (0.0, 2.5), 2: (0.1, 0.001)}
    # A track has one number on all ranks, and only the ranks that use it show it.
    assert tracks(document) == {(0, 1): "comm", (1, 1): "comm", (2, 0): "main"}
    assert document["otherData"]["started"] == "2023-11-14T22:13:20+00:00"


def test_the_offset_leads_to_the_wall_clock() -> None:
    before = time.time_ns()
    now = time.perf_counter_ns() + trace.rank_events(0, "h")["wall_offset_ns"]
    after = time.time_ns()
    assert before - 10**6 <= now <= after + 10**6


def test_counters_and_dropped_spans_are_in_the_file(tmp_path: Path) -> None:
    trace.enable(capacity=2)
    trace.count("comm.bytes", 12)
    for number in range(5):
        trace.add_span("s", track="main", begin_ns=number, end_ns=number + 1)
    mine = trace.rank_events(0, "h")
    assert mine["pid"] == os.getpid()
    document = read(trace.write_chrome(tmp_path / "t.json", [mine, payload(1, [])]))
    assert document["otherData"]["counters"] == {"0": {"comm.bytes": 12}, "1": {}}
    assert document["otherData"]["dropped"] == {"0": 3, "1": 0}
    labels = [(event["pid"], event["args"]) for event in events(document, "M") if event["name"] == "process_labels"]
    assert labels == [(0, {"labels": "3 older spans dropped"})]


def test_any_argument_can_be_shown(tmp_path: Path) -> None:
    trace.enable()
    with trace.span("s", shape=(2, 3), n=np.int64(7), x=np.float32(0.5), bad=float("nan"), what={1: {2}}, none=None):
        pass
    document = read(trace.write_chrome(tmp_path / "t.json", [trace.rank_events(0, "h")]))
    (event,) = events(document, "X")
    assert event["args"] == {"shape": [2, 3], "n": 7, "x": 0.5, "bad": "nan", "what": {"1": "{2}"}, "none": None}


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    document = read(trace.write_chrome(tmp_path / "t.json", [trace.rank_events(0, "h")]))
    assert events(document, "X") == []
    assert len(events(document, "M")) == 2


def test_a_trace_replaces_the_last_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    trace.write_chrome(path, [payload(0, [])])
    assert "traceEvents" in read(path)
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_directory_that_is_not_there_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "t.json"
    with pytest.raises(FileNotFoundError) as caught:
        trace.write_chrome(path, [])
    assert caught.value.filename == str(path)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    with contextlib.suppress(ValueError):
        files.write_json(path, {"a": [1, 2, float("nan")]})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]
