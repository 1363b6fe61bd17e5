"""``zerort bench wire``: every codec against memcpy, repetition by repetition in turn, and its error against its bound.

memcpy copies the decoded values: float32 for the formats, bfloat16 for deltas. All speeds count these bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zerort import native
from zerort.cli.bench.harness import Benchmark, Result, wrong_line
from zerort.cli.bench.pictures import check_plot
from zerort.cli.bench.timing import time_interleaved
from zerort.cli.bench.wire.link import measure_links, run_link_ranks
from zerort.cli.bench.wire.shares import LEARNING_RATES, share_table, shares_of
from zerort.cli.machine import available_nbytes
from zerort.cli.screen import new_table
from zerort.codec import FORMATS, Format, Stochastic, apply_delta, encode_delta, join_planes, split_planes
from zerort.comm.bootstrap.environment import launched_size
from zerort.config import format_bytes
from zerort.errors import CallError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["WireRow", "run_wire"]

_CHANGED = (0.0, 0.01, 0.1)
"""Shares of elements that the measured deltas hold."""


@dataclass(frozen=True, slots=True)
class WireRow:
    """One codec over one array. Times are medians in ms."""

    codec: str
    nbytes: int
    """Of the decoded values."""
    encoded_nbytes: int
    encode_ms: float
    decode_ms: float
    memcpy_ms: float
    error: float
    """The largest error of an element, in parts of its bound; 0: lossless."""

    @property
    def encode_ratio(self) -> float:
        """Speed of encoding over memcpy's."""
        return self.memcpy_ms / self.encode_ms

    @property
    def decode_ratio(self) -> float:
        """Speed of decoding over memcpy's."""
        return self.memcpy_ms / self.decode_ms

    @property
    def part(self) -> float:
        """Encoded bytes over decoded ones."""
        return self.encoded_nbytes / self.nbytes

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived values by name."""
        ratios = {"encode_ratio": self.encode_ratio, "decode_ratio": self.decode_ratio, "part": self.part}
        return {**dataclasses.asdict(self), **ratios}


def run_wire(options: argparse.Namespace, words: list[str]) -> int:
    """Run the benchmark and return the exit code."""
    check_plot(options.plot)
    if options.step and launched_size() is not None:
        return run_link_ranks(options)
    needed = options.numel * 64
    if needed > 0.9 * available_nbytes():
        raise CallError(
            f"--numel: Expected {format_bytes(needed)} of memory, got {format_bytes(available_nbytes())} available. "
            "Use fewer elements."
        )
    return _WireBenchmark(options, words).run()


class _WireBenchmark(Benchmark):
    """Formats, deltas and planes on one thread."""

    name = "wire"

    def __init__(self, options: argparse.Namespace, words: list[str]) -> None:
        super().__init__(options)
        self._words = words

    def head(self, machine: dict[str, Any]) -> list[str]:
        return []

    def measure(self) -> Result:
        seconds = self.options.seconds
        values = np.random.default_rng(1).standard_normal(self.options.numel, np.float32)
        rows: list[WireRow] = []
        roundings = [(format, None) for format in FORMATS.values()]
        coded = [(format, Stochastic(1)) for format in FORMATS.values() if format.bits < 16]
        with self.screen.bar(len(roundings) + len(coded) + len(_CHANGED) + len(LEARNING_RATES)) as bar:
            for format, rounding in (*roundings, *coded):
                bar.step(format.name)
                rows.append(_format_row(format, rounding, values, seconds))
                bar.step(format.name, advance=1)
            half = np.empty(values.size, native.BFLOAT16)
            native.cast_into(half, values)
            for share in _CHANGED:
                bar.step("delta")
                rows.append(_delta_row(half, share, seconds))
                bar.step("delta", advance=1)
            rows.append(_planes_row(half, seconds))
            shares = []
            for lr in LEARNING_RATES:
                bar.step(f"updates, {lr:g}")
                shares.append(shares_of(lr))
                bar.step(f"updates, {lr:g}", advance=1)
        wrong = sum(row.error > 1.0 for row in rows) + sum(row.part > row.bound for row in shares)
        link = measure_links(self.options, self._words) if self.options.step else Result([], [], {}, failed=False)
        return Result(
            tables=[_table(rows), share_table(shares), *link.tables],
            legend=[
                "# one thread; medians of 7 interleaved repetitions. GB/s of decoded values; / memcpy of these, in the "
                "same repetitions.",
                "# error: the largest one, in parts of its bound (half a step of its block; a whole step if "
                "stochastic; bfloat16: half its spacing).",
                wrong_line("values", wrong),
                *link.legend,
            ],
            figures={
                "rows": [row.as_json() for row in rows],
                "shares": [row.as_json() for row in shares],
                **link.figures,
            },
            failed=wrong > 0,
        )


def _format_row(format: Format, rounding: Stochastic | None, values: Any, seconds: float) -> WireRow:
    payload, out = np.zeros(format.nbytes(values.size), np.uint8), np.zeros_like(values)
    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: native.copy_into(out, values),
        "encode": lambda: format.encode(payload, values, rounding=rounding),
        "decode": lambda: format.decode(out, payload),
    }
    name = format.name if rounding is None else f"{format.name} stochastic"
    row = _timed(name, values.nbytes, payload.nbytes, work, seconds)
    format.encode(payload, values, rounding=rounding)
    format.decode(out, payload)
    parts = np.abs(out.astype(np.float64) - values) / format.bound(values, rounding=rounding)
    return dataclasses.replace(row, error=float(parts.max()))


def _delta_row(base: Any, share: float, seconds: float) -> WireRow:
    now = base.copy()
    now.view(np.uint16)[np.random.default_rng(2).random(base.size) < share] ^= 1
    payload, out = encode_delta(base, now), base.copy()
    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: native.copy_into(out, base),
        "encode": lambda: encode_delta(base, now),
        "decode": lambda: apply_delta(out, payload),
    }
    row = _timed(f"delta, {share:.0%} changed", base.nbytes, payload.nbytes, work, seconds)
    native.copy_into(out, base)
    apply_delta(out, payload)
    same = out.tobytes() == now.tobytes()
    return dataclasses.replace(row, error=0.0 if same else float("inf"))


def _planes_row(values: Any, seconds: float) -> WireRow:
    planes, out = split_planes(values), np.zeros_like(values)
    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: native.copy_into(out, values),
        "encode": lambda: native.split_planes(planes, values),
        "decode": lambda: join_planes(out, planes),
    }
    row = _timed("byte planes", values.nbytes, planes.nbytes, work, seconds)
    join_planes(out, planes)
    return dataclasses.replace(row, error=0.0 if out.tobytes() == values.tobytes() else float("inf"))


def _timed(name: str, nbytes: int, encoded: int, work: dict[str, Callable[[], object]], seconds: float) -> WireRow:
    timings = {key: timing.median * 1e3 for key, timing in time_interleaved(work, seconds=seconds).items()}
    return WireRow(name, nbytes, encoded, timings["encode"], timings["decode"], timings["memcpy"], 0.0)


def _table(rows: list[WireRow]) -> Table:
    table = new_table(f"codecs, {rows[0].nbytes // 4:,} values")
    table.add_column("codec", no_wrap=True)
    heads = (
        "bytes of\ndecoded",
        "encode\nGB/s",
        "/ memcpy",
        "decode\nGB/s",
        "/ memcpy",
        "memcpy\nGB/s",
        "error /\nbound",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        table.add_row(
            row.codec,
            f"{row.part:.4f}",
            f"{row.nbytes / row.encode_ms / 1e6:.1f}",
            f"{row.encode_ratio:.2f}",
            f"{row.nbytes / row.decode_ms / 1e6:.1f}",
            f"{row.decode_ratio:.2f}",
            f"{row.nbytes / row.memcpy_ms / 1e6:.1f}",
            "lossless" if row.error == 0 else f"{row.error:.3f}",
        )
    return table
