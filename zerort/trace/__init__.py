"""Record what happened and when: spans, counters, and the last collectives before a failure.

    with span("reduce_scatter", track="comm", nbytes=n):   what took how long        (off until `enable()`)
    count("comm.bytes", n)                                  how much, in total        (always on)
    FlightRecorder(256)                                     the last calls, for the post-mortem

tracer.py has spans and counters, chrome.py their file format, flight.py the flight recorder, files.py whole files,
ledger.py what a runtime counts between two steps.

To look at a trace, gather `rank_events` of all ranks on one of them, `write_chrome` the file there, and open it in
https://ui.perfetto.dev (or ``chrome://tracing``): one process per rank, one line per track. A flight record is JSON;
the first row whose ``finished_ns`` is null is where that rank stood.
"""

from __future__ import annotations

from zerort.trace.chrome import rank_events, write_chrome
from zerort.trace.flight import FlightEntry, FlightRecorder
from zerort.trace.tracer import (
    Span,
    add_span,
    count,
    counters,
    disable,
    dropped,
    enable,
    is_enabled,
    reset,
    span,
    spans,
)

__all__ = [
    "FlightEntry",
    "FlightRecorder",
    "Span",
    "add_span",
    "count",
    "counters",
    "disable",
    "dropped",
    "enable",
    "is_enabled",
    "rank_events",
    "reset",
    "span",
    "spans",
    "write_chrome",
]
