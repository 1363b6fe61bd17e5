"""Cuts: one rule for layouts and partitions, with padding at the end where ranks want equal shards."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.layout import Cut, FlatLayout, Partition

shapes = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.integers(0, 40), max_size=2).map(tuple), max_size=5
)
cuts = st.builds(Cut, size=st.integers(1, 9), granule=st.sampled_from([64, 128, 192, 1024]), equal=st.booleans())


@given(shapes, cuts)
@settings(max_examples=200)
def test_ranges_tile_the_buffer_and_start_at_granules(tensors: dict[str, tuple[int, ...]], cut: Cut) -> None:
    layout, partition = cut.of(tensors)
    end = 0
    for rank in range(cut.size):
        first, last = partition.of(rank)
        assert first == end
        assert first % cut.granule == 0 or first == last == layout.numel
        end = last
    assert end == partition.numel == layout.numel


@given(shapes, cuts)
@settings(max_examples=200)
def test_equal_shards_are_equal_and_padded_behind_the_last_parameter_only(
    tensors: dict[str, tuple[int, ...]], cut: Cut
) -> None:
    plain, _ = replace(cut, equal=False).of(tensors)
    layout, partition = replace(cut, equal=True).of(tensors)
    assert partition.even
    assert layout.extents == plain.extents  # nothing moves
    assert layout.end == plain.end == plain.numel  # what is saved, counted and summed up does not grow
    assert 0 <= layout.numel - layout.end < cut.size * cut.granule
    if cut.size == 1:
        assert layout == plain


@given(shapes, cuts)
@settings(max_examples=200)
def test_no_shard_is_longer_than_the_longest_of_a_fair_cut_rounded_up_to_granules(
    tensors: dict[str, tuple[int, ...]], cut: Cut
) -> None:
    _, fair = replace(cut, equal=False).of(tensors)
    _, equal = replace(cut, equal=True).of(tensors)
    assert equal.counts[0] <= -(-max(fair.counts) // cut.granule) * cut.granule


def test_each_parameter_is_held_by_the_ranks_whose_ranges_it_lies_in() -> None:
    layout, partition = Cut(size=4, equal=True).of({"w": (10,)})
    held = [layout.overlaps(*partition.of(rank)) for rank in range(4)]
    assert [len(parts) for parts in held] == [1, 0, 0, 0]
    assert partition.counts == (64,) * 4


def test_weights_that_differ_are_not_evened_out() -> None:
    layout, partition = Cut(size=3, weights=(1.0, 0.0, 3.0), equal=True).of({"w": (256,)})
    assert layout.numel == layout.end == 256
    assert partition.counts == (64, 0, 192)


def test_the_module_says_what_a_cut_does() -> None:
    assert Cut(size=3).of({"w": (256,)})[1].counts == (128, 64, 64)
    assert Cut(size=3, equal=True).of({"w": (256,)})[1] == Partition.build(384, 3, alignment=64)
    assert FlatLayout.build({}, multiple=128).numel == FlatLayout.build({}).end == 0
