"""Turn the spans of all ranks into one file for Perfetto or Chrome.

    each rank:  rank_events(rank, host)  ── gathered by the caller ──>  one rank:  write_chrome(path, payloads)

    rank 0 (node-a)   main  ▇▇▇▇▇▇▇▇▇ step
                      comm    ▇▇▇ reduce_scatter
    rank 1 (node-a)   main  ▇▇▇▇▇▇▇▇▇ step

A payload is plain JSON, and so can be gathered by any means. It carries its rank's offset to the wall clock, and by it
the ranks line up: exactly enough on one host, as well as NTP does between hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zerort.trace import tracer
from zerort.trace.files import plain, wall_offset_ns, write_json

__all__ = ["rank_events", "write_chrome"]


def rank_events(rank: int, host: str) -> dict[str, Any]:
    """Take what this process has recorded so far, as a value that JSON can hold.

    Args:
        rank: This process's rank in the group that writes the trace.
        host: The name of this process's host.
    """
    return {
        "rank": rank,
        "host": host,
        "pid": os.getpid(),
        "wall_offset_ns": wall_offset_ns(),
        "spans": [[name, track, begin, end, plain(args)] for name, track, begin, end, args in tracer.spans()],
        "dropped": tracer.dropped(),
        "counters": plain(tracer.counters()),
    }


def write_chrome(path: str | os.PathLike[str], payloads: Iterable[dict[str, Any]]) -> Path:
    """Write one trace file, with a process track per rank and in it a thread track per span track.

    Counters and dropped spans are in ``otherData``, by rank; a rank that dropped spans also says so beside its name.

    Args:
        path: The file, replaced if it exists; its directory has to exist.
        payloads: What `rank_events` returned on each rank, in any order.

    Returns:
        The path of the file.

    Raises:
        OSError: If it cannot be written; nothing is left behind.
    """
    target = Path(path)
    ranks = sorted(payloads, key=lambda payload: payload["rank"])
    # One number per track name, the same on all ranks, "main" first: so that the lines of all ranks are in one order.
    names = sorted({track for payload in ranks for _, track, *_ in payload["spans"]}, key=lambda it: (it != "main", it))
    threads = {name: number for number, name in enumerate(names)}
    begins = [begin + payload["wall_offset_ns"] for payload in ranks for _, _, begin, _, _ in payload["spans"]]
    start_ns = min(begins, default=0)

    events: list[dict[str, Any]] = []
    for payload in ranks:
        events += _names_of(payload, threads=threads)
        # Microseconds from the trace's start: since 1970 they would not fit a double to the nanosecond.
        shift = payload["wall_offset_ns"] - start_ns
        events += (
            {
                "ph": "X",
                "name": name,
                "pid": payload["rank"],
                "tid": threads[track],
                "ts": (begin + shift) / 1000,
                "dur": (end - begin) / 1000,
                "args": args,
            }
            for name, track, begin, end, args in payload["spans"]
        )
    write_json(
        target,
        {
            "traceEvents": events,
            "displayTimeUnit": "ns",
            "otherData": {
                "started": datetime.fromtimestamp(start_ns / 1e9, tz=timezone.utc).isoformat() if begins else None,
                "counters": {str(payload["rank"]): payload["counters"] for payload in ranks},
                "dropped": {str(payload["rank"]): payload["dropped"] for payload in ranks},
            },
        },
    )
    return target


def _names_of(payload: dict[str, Any], *, threads: dict[str, int]) -> list[dict[str, Any]]:
    """Return the metadata events that name and order the tracks of one rank."""
    rank = payload["rank"]

    def meta(kind: str, tid: int = 0, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args}

    events = [
        meta("process_name", name=f"rank {rank} ({payload['host']})"),
        meta("process_sort_index", sort_index=rank),
    ]
    if payload["dropped"]:
        events.append(meta("process_labels", labels=f"{payload['dropped']} older spans dropped"))
    own = {track for _, track, *_ in payload["spans"]}
    for track, number in threads.items():
        if track in own:
            events.append(meta("thread_name", number, name=track))
            events.append(meta("thread_sort_index", number, sort_index=number))
    return events
