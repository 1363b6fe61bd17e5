"""Partitions: they tile, they are fair, and every answer agrees with the ranges."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.errors import CallError
from zerort.layout import Move, Partition, Piece

weight = st.one_of(
    st.integers(0, 9),
    st.floats(0, 1e6, allow_nan=False),
    st.fractions(0, 5, max_denominator=50),
)
weights = st.lists(weight, min_size=1, max_size=9).filter(any)


@st.composite
def partitions(draw: st.DrawFn, numel: int | None = None) -> Partition:
    """Any partition, by shares or by counts, with empty ranges among them."""
    total = draw(st.integers(0, 300)) if numel is None else numel
    if draw(st.booleans()):
        shares = draw(weights)
        return Partition.build(total, len(shares), weights=shares, alignment=draw(st.sampled_from([1, 2, 3, 8, 64])))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=7)))
    return Partition.of_counts(np.diff([0, *cuts, total]))


def owners(partition: Partition) -> list[int]:
    """The rank of each element, the long way."""
    return [rank for rank, count in enumerate(partition.counts) for _ in range(count)]


@given(st.integers(0, 5000), weights, st.sampled_from([1, 2, 3, 7, 16, 64, 4096]))
@settings(max_examples=200)
def test_build_tiles_exactly_starts_at_blocks_and_is_fair(
    numel: int, shares: list[int | float | Fraction], alignment: int
) -> None:
    partition = Partition.build(numel, len(shares), weights=shares, alignment=alignment)
    end = 0
    for rank, share in enumerate(shares):
        first, last = partition.of(rank)
        assert (first, last - first) == (end, partition.counts[rank])
        assert first % alignment == 0 or first == last == numel
        ideal = numel * Fraction(share) / sum(map(Fraction, shares))
        assert abs((last - first) - ideal) < alignment
        assert share or first == last  # no weight, no elements
        end = last
    assert end == numel


@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([1, 5, 64]))
@settings(max_examples=150)
def test_equal_ranks_get_equal_parts_wherever_that_is_possible(numel: int, size: int, alignment: int) -> None:
    partition = Partition.build(numel, size, alignment=alignment)
    assert partition == Partition.build(numel, size, weights=[0.1] * size, alignment=alignment)
    # Only a last, short block lets counts differ by more than one block, and by less than two.
    assert max(partition.counts) - min(partition.counts) < (2 * alignment if numel % alignment else alignment + 1)
    assert partition.even == (len(set(partition.counts)) == 1)
    if numel % (size * alignment) == 0:
        assert partition.even


@given(weights, st.integers(0, 1000), st.integers(1, 10**6), st.integers(1, 10**6))
@settings(max_examples=100)
def test_only_proportions_matter(shares: list[float], numel: int, up: int, down: int) -> None:
    scaled = [Fraction(share) * up / down for share in shares]
    assert Partition.build(numel, len(shares), weights=shares) == Partition.build(numel, len(shares), weights=scaled)


@given(partitions())
@settings(max_examples=100)
def test_owner_agrees_with_the_ranges(partition: Partition) -> None:
    assert [partition.owner(index) for index in range(partition.numel)] == owners(partition)
    assert partition.offsets == tuple(partition.of(rank).first for rank in range(partition.size))


@given(partitions(), st.data())
@settings(max_examples=150)
def test_overlaps_partition_the_range_asked_for(partition: Partition, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, partition.numel))
    last = data.draw(st.integers(first, partition.numel))
    pieces = partition.overlaps(first, last)
    covered = [(index, rank) for rank, begin, end in pieces for index in range(begin, end)]
    assert covered == [(index, owners(partition)[index]) for index in range(first, last)]
    assert all(piece.first < piece.stop for piece in pieces)
    assert len({piece.rank for piece in pieces}) == len(pieces)


@given(st.integers(0, 300).flatmap(lambda numel: st.tuples(*[partitions(numel)] * 2)))
@settings(max_examples=150)
def test_reshard_moves_every_element_once_from_its_owner_to_its_next(pair: tuple[Partition, Partition]) -> None:
    before, after = pair
    moves = before.reshard(after)
    moved = [(index, source, target) for source, target, first, last in moves for index in range(first, last)]
    assert moved == list(zip(range(before.numel), owners(before), owners(after), strict=True))
    assert len({(move.source, move.target) for move in moves}) == len(moves)
    assert all(move.first < move.stop for move in moves)


@pytest.mark.parametrize(
    ("numel", "size", "shares", "alignment", "counts"),
    [
        (10, 4, None, 1, (3, 3, 2, 2)),
        (2, 4, None, 1, (1, 1, 0, 0)),
        (0, 3, None, 8, (0, 0, 0)),
        (20, 3, None, 4, (8, 8, 4)),
        (20, 3, (1, 0, 3), 1, (5, 0, 15)),
        (9, 3, None, 4, (4, 4, 1)),
        (3, 2, None, 8, (0, 3)),
        (7, 3, (1, 1, 0), 4, (4, 3, 0)),
        (7, 4, (5, 5, 5, 6), 4, (4, 0, 0, 3)),  # the largest remainder already has the short block
        (100, 2, (0.1, 0.3), 1, (25, 75)),
        (2**62 + 1, 2, None, 1, (2**61 + 1, 2**61)),
    ],
)
def test_known_cuts(
    numel: int, size: int, shares: tuple[float, ...] | None, alignment: int, counts: tuple[int, ...]
) -> None:
    assert Partition.build(numel, size, weights=shares, alignment=alignment).counts == counts


def test_the_module_says_what_build_does() -> None:
    from zerort.layout import partition as module

    text = module.__doc__ or ""
    for line in text.splitlines():
        if line.strip().startswith("Partition.build"):
            call, counts = line.split("counts")
            assert eval(call.strip(), {"Partition": Partition}).counts == eval(counts)
    assert text.count("counts (") == 2


def test_weights_may_be_any_exact_number() -> None:
    kinds = [2, 2.0, Fraction(2), Decimal(2), np.float32(2), np.int64(2)]
    assert Partition.build(12, 6, weights=kinds).counts == (2,) * 6


def test_partitions_are_values() -> None:
    partition = Partition.build(np.int64(10), np.int32(3), alignment=np.int8(2))
    again = pickle.loads(pickle.dumps(partition))
    assert again == partition
    assert hash(again) == hash(partition)
    assert (again.offsets, again.even) == (partition.offsets, partition.even)
    assert json.loads(json.dumps(partition.counts)) == list(partition.counts)
    assert partition != replace(partition, alignment=1)
    assert Partition.of_counts([4, 4, 2], alignment=2) == partition


def test_named_answers() -> None:
    partition = Partition.of_counts((4, 0, 2))
    assert partition.of(2).numel == 2
    assert partition.of(2).slice == slice(4, 6)
    assert partition.overlaps(3, 6) == (Piece(0, 3, 4), Piece(2, 4, 6))
    assert partition.reshard(Partition.of_counts([6])) == (Move(0, 0, 0, 4), Move(2, 0, 4, 6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": -1}, "numel to be an integer of at least 0, got -1"),
        ({"numel": 2.0}, "numel to be an integer of at least 0, got 2.0"),
        ({"size": 0}, "number of ranks to be an integer of at least 1, got 0"),
        ({"alignment": 0}, "alignment to be an integer of at least 1, got 0"),
        ({"weights": [1, 2]}, "one weight for each of 3 ranks, got 2"),
        ({"weights": [0, 0.0, 0]}, "above zero for at least one of 3 ranks, got only zeros"),
        ({"weights": [1, -1, 1]}, "weight of rank 1 not to be negative, got -1"),
        ({"weights": [1, 1, float("nan")]}, "weight of rank 2 to be a finite number, got nan"),
        ({"weights": [float("inf"), 1, 1]}, "weight of rank 0 to be a finite number, got inf"),
        ({"weights": [1, "2", 1]}, "weight of rank 1 to be a finite number, got '2'"),
    ],
)
def test_build_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CallError, match=message):
        Partition.build(**{"numel": 10, "size": 3, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"counts": (4, 5)}, "counts that sum to numel 10, got 9"),
        ({"counts": (12, -2)}, "count of rank 1 to be a plain int of at least 0, got -2"),
        ({"counts": [5, 5]}, "tuple with one int per rank"),
        ({"counts": (), "numel": 0}, "tuple with one int per rank"),
        ({"counts": (5, 5), "alignment": 2}, "rank 1 to start at a multiple of 2 elements, got 5"),
        ({"counts": (np.int64(10),)}, "count of rank 0 to be a plain int"),
    ],
)
def test_the_constructor_refuses_what_build_never_makes(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CallError, match=message):
        Partition(**{"numel": 10, **fields})  # type: ignore[arg-type]


def test_empty_ranges_may_start_at_an_end_that_is_no_block() -> None:
    assert Partition.of_counts((4, 3, 0), alignment=4).offsets == (0, 4, 7)


def test_questions_outside_are_refused() -> None:
    partition = Partition.build(10, 3)
    for rank in (-1, 3):
        with pytest.raises(CallError, match=f"rank from 0 to 2, got {rank}"):
            partition.of(rank)
    for index in (-1, 10):
        with pytest.raises(CallError, match=rf"element of \[0, 10\), got {index}"):
            partition.owner(index)
    for first, last in [(-1, 3), (3, 2), (0, 11)]:
        with pytest.raises(CallError, match="0 <= first <= stop <= 10"):
            partition.overlaps(first, last)
    with pytest.raises(CallError, match="partition of 10 elements, got one of 11"):
        partition.reshard(Partition.build(11, 3))
