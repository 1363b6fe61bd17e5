"""Works are timed in turn, the slowest rank counts, and rows derive what nccl-tests define."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest

from zerort.cli.bench.collectives.operations import OPERATIONS
from zerort.cli.bench.collectives.rows import Row, Side, make_side
from zerort.cli.bench.collectives.tables import collectives_legend, collectives_table
from zerort.cli.bench.limits import MemoryLimit
from zerort.cli.bench.timing import Timing, time_interleaved


def test_works_take_turns_and_the_order_rotates() -> None:
    seen: list[str] = []
    works = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    time_interleaved(works, seconds=1.0, repetitions=3, once=["a", "b", "c"])
    assert "".join(seen) == "abcbcacab"


def test_short_works_are_repeated_until_they_fill_their_time() -> None:
    timings = time_interleaved(
        {"short": lambda: time.sleep(1e-5), "long": lambda: time.sleep(0.02)}, seconds=0.1, repetitions=5
    )
    assert timings["short"].iterations > 4 * timings["long"].iterations == 4
    assert len(timings["long"].seconds) == 5
    assert timings["short"].median >= 1e-5


def test_the_slowest_rank_counts() -> None:
    def maxima(values: Sequence[float]) -> list[float]:
        return [value + 1.0 for value in values]  # another rank that takes a second longer

    timings = time_interleaved({"work": lambda: None}, seconds=0.01, repetitions=5, once=["work"], maxima=maxima)
    assert min(timings["work"].seconds) >= 1.0


def test_everybody_is_here_before_the_clock_starts() -> None:
    log: list[str] = []
    time_interleaved(
        {"work": lambda: log.append("work")}, seconds=1.0, repetitions=2, once=["work"], meet=lambda: log.append("meet")
    )
    assert log == ["meet", "work"] * 2


def side(seconds: float, *, nbytes: int, bus: float, wrong: int = 0) -> Side:
    made = make_side("x", {"x": Timing((seconds,), 1)}, {"x": wrong}, nbytes=nbytes, bus=bus)
    assert made is not None
    return made


def row(**changes: object) -> Row:
    nbytes = 1_000_000_000
    values: dict[str, object] = {
        "op": "reduce_scatter",
        "dtype": "float32",
        "redop": "sum",
        "nbytes": nbytes,
        "count": nbytes // 16,
        "out_of_place": side(0.2, nbytes=nbytes, bus=0.75),
        "in_place": side(0.1, nbytes=nbytes, bus=0.75),
        "mpi": side(0.5, nbytes=nbytes, bus=0.75),
        "mpi_in_place": side(0.4, nbytes=nbytes, bus=0.75),
        "moved_nbytes": 5 * nbytes,
        "limit_gbs": 100.0,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def test_a_row_derives_bandwidths_ratio_and_fraction() -> None:
    one = row()
    assert one.in_place is not None
    assert one.in_place.algbw == pytest.approx(10.0)
    assert one.in_place.busbw == pytest.approx(7.5)
    assert one.ratio == pytest.approx(4.0)  # the better of MPI's two over the better of ours
    assert one.fraction == pytest.approx(0.5)  # 5 GB in 0.1 s are half of 100 GB/s
    assert row(mpi=None, mpi_in_place=None).ratio is None
    assert row(moved_nbytes=0).fraction is None


def test_bus_factors_and_bytes_moved() -> None:
    found = {
        name: (one.bus(4), one.moved(4), one.moved_in_place(4) if one.moved_in_place else None)
        for name, one in OPERATIONS.items()
    }
    assert found == {
        "all_gather": (0.75, 8, 6),
        "reduce_scatter": (0.75, 5, 5),
        "all_reduce": (1.5, 8, 8),
        "broadcast": (1.0, 8, 6),
        "reduce": (1.0, 5, 5),
        "all_to_all": (0.75, 8, None),
    }


def test_a_table_shows_both_places_and_what_is_not_available() -> None:
    from rich.console import Console

    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(collectives_table("reduce_scatter", [row(), row(mpi=None, mpi_in_place=None)], compare=True))
    console.file.close()
    text = console.export_text()
    first, second = [line for line in text.splitlines() if "1000000000" in line]
    cells = "1000000000 62500000 float32 sum 200000 5.00 3.75 0 100000 10.00 7.50 0 500000 400000 4.00 50%"
    assert " ".join(first.split()) == cells
    assert second.split()[-4:] == ["n/a", "n/a", "n/a", "50%"]


def test_wrong_data_is_said_aloud() -> None:
    wrong = row(in_place=side(0.1, nbytes=1, bus=1.0, wrong=3))
    assert wrong.wrong == 3
    assert any(
        "wrong elements: 3" in line and "WRONG" in line for line in collectives_legend([wrong], None, compare=False)
    )
    assert any("wrong elements: 0" in line for line in collectives_legend([row()], None, compare=False))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_bare_sum_counts_every_array_that_it_reads_and_the_one_it_writes(ranks: int) -> None:
    limit = MemoryLimit(ranks=ranks)
    parts = limit._parts
    assert len(parts) == max(ranks, 2)
    spans = sorted((part.ctypes.data, part.ctypes.data + part.nbytes) for part in parts)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(spans))  # no element is read twice
    assert limit.sum_gbs(1.0) == pytest.approx(ranks * (len(parts) + 1) * parts[0].nbytes / 1e9)
