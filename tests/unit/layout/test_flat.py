"""Flat layouts: what build computes, what the constructor proves, and what a range of the buffer covers."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort.errors import CallError
from zerort.layout import ITEMSIZES, Extent, FlatLayout, itemsize

shapes = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    max_size=8,
)
layouts = st.builds(
    FlatLayout.build, shapes, dtype=st.sampled_from(list(ITEMSIZES)), alignment=st.sampled_from([1, 2, 3, 8, 64])
)


@pytest.mark.slow
@given(shapes, st.sampled_from(list(ITEMSIZES)), st.integers(1, 70))
@settings(max_examples=150)
def test_build_places_every_parameter_once_aligned_and_in_order(
    given_shapes: dict[str, tuple[int, ...]], dtype: str, alignment: int
) -> None:
    layout = FlatLayout.build(given_shapes, dtype=dtype, alignment=alignment)
    owners = np.full(layout.numel, -1)
    for number, (name, shape) in enumerate(given_shapes.items()):
        extent = layout.of(name)
        assert layout.extents[number] is extent
        assert (extent.shape, extent.numel) == (shape, math.prod(shape))
        assert extent.offset % alignment == 0
        assert (owners[extent.slice] == -1).all()
        owners[extent.slice] = number
        assert (owners == number).sum() == extent.numel
    assert layout.padding == (owners == -1).sum()
    assert layout.padding <= len(given_shapes) * (alignment - 1)
    assert layout.numel % alignment == 0
    assert layout.nbytes == layout.numel * itemsize(dtype)


@given(layouts, st.data())
@settings(max_examples=150)
def test_overlaps_are_exactly_the_parameters_elements_in_the_range(layout: FlatLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.numel))
    last = data.draw(st.integers(first, layout.numel))
    # Every element is its own label: what an overlap selects on both sides has to be the same labels.
    buffer = np.arange(layout.numel)
    belongs = np.zeros(layout.numel, bool)
    for extent in layout.extents:
        belongs[extent.slice] = True
    seen = []
    for extent, in_extent, in_range in layout.overlaps(first, last):
        from_parameter = buffer[extent.slice][in_extent]
        from_range = buffer[first:last][in_range]
        assert from_parameter.size > 0
        np.testing.assert_array_equal(from_parameter, from_range)
        seen.extend(from_range.tolist())
    assert seen == [index for index in range(first, last) if belongs[index]]


def test_scalars_have_one_element_and_empty_parameters_none() -> None:
    layout = FlatLayout.build({"empty": (3, 0), "scalar": (), "vector": (5,)}, alignment=4)
    assert [(extent.offset, extent.numel) for extent in layout.extents] == [(0, 0), (0, 1), (4, 5)]
    assert layout.numel == 12
    assert [overlap.extent.name for overlap in layout.overlaps(0, 12)] == ["scalar", "vector"]


def test_no_parameters_are_ordinary() -> None:
    layout = FlatLayout.build({})
    assert (layout.numel, layout.nbytes, layout.padding) == (0, 0, 0)
    assert layout.overlaps(0, 0) == ()


def test_offsets_do_not_depend_on_the_dtype() -> None:
    given_shapes = {"a": (7,), "b": (65,), "c": ()}
    assert FlatLayout.build(given_shapes, dtype="bfloat16").extents == FlatLayout.build(given_shapes).extents


def test_layouts_are_values() -> None:
    layout = FlatLayout.build({"w": (2, 3), "b": (3,)})
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.of("b") == layout.of("b")
    assert again.overlaps(60, 70) == layout.overlaps(60, 70) != ()
    assert layout != FlatLayout.build({"w": (2, 3), "b": (3,)}, dtype="bfloat16")
    with pytest.raises(FrozenInstanceError):
        layout.numel = 3  # type: ignore[misc]


def test_numpy_integers_come_in_and_plain_ones_stay() -> None:
    layout = FlatLayout.build({"w": (np.int64(2), np.int32(3))}, alignment=np.int64(8))
    assert json.loads(json.dumps([asdict(extent) for extent in layout.extents])) == [
        {"name": "w", "shape": [2, 3], "offset": 0, "numel": 6}
    ]
    assert json.dumps([layout.numel, layout.alignment]) == "[8, 8]"


def extent(name: str, offset: int, numel: int) -> Extent:
    return Extent(name=name, shape=(numel,), offset=offset, numel=numel)


@pytest.mark.parametrize(
    ("extents", "numel", "message"),
    [
        ((extent("a", 0, 4), extent("a", 4, 4)), 8, "Expected unique names, got 'a' twice"),
        ((extent("a", 0, 4), extent("b", 6, 2)), 8, "'b' to start at a multiple of 4 elements, got offset 6"),
        ((extent("a", 0, 5), extent("b", 4, 2)), 8, "'b' to start at 5 or later, behind 'a', got offset 4"),
        ((extent("a", 4, 4), extent("b", 0, 2)), 8, "'b' to start at 8 or later, behind 'a', got offset 0"),
        ((extent("a", 0, 9),), 8, "multiple of 4 and at least 9, where 'a' ends, got 8"),
        ((extent("a", 0, 5),), 7, "multiple of 4 and at least 5, where 'a' ends, got 7"),
        ([extent("a", 0, 4)], 4, "Expected the extents to be a tuple, got list"),
        ((), -4, "numel to be a plain int of at least 0, got -4"),
    ],
)
def test_the_constructor_refuses_what_build_never_makes(extents: tuple[Extent, ...], numel: int, message: str) -> None:
    with pytest.raises(CallError, match=message):
        FlatLayout(dtype="float32", extents=extents, numel=numel, alignment=4)


def test_replace_proves_again() -> None:
    layout = FlatLayout.build({"a": (5,)}, alignment=8)
    assert replace(layout, dtype="float16").nbytes == 16
    with pytest.raises(CallError, match="multiple of 3"):
        replace(layout, alignment=3)
    with pytest.raises(CallError, match="Expected the name of a dtype"):
        replace(layout, dtype="half")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "non-empty str, got ''"),
        ({"shape": [6]}, "shape of 'w' to be a tuple of ints"),
        ({"shape": (-2, -3)}, "axis 0 of the shape of 'w' to be a plain int of at least 0, got -2"),
        ({"shape": (6.0,)}, "axis 0 of the shape of 'w'"),
        ({"offset": -1}, "offset of 'w'"),
        ({"offset": True}, "offset of 'w'"),
        ({"numel": 7}, r"Expected 6 elements for 'w' of shape \(2, 3\), got 7"),
    ],
)
def test_extents_prove_themselves(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CallError, match=message):
        Extent(**{"name": "w", "shape": (2, 3), "offset": 0, "numel": 6, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("shape", "alignment"), [((-1,), 1), ((2.5,), 1), ((True,), 1), ((2,), 0), ((2,), 1.5)])
def test_build_refuses_bad_arguments(shape: tuple[int, ...], alignment: int) -> None:
    with pytest.raises(CallError, match="to be an integer of at least"):
        FlatLayout.build({"w": shape}, alignment=alignment)


def test_unknown_names_and_ranges_outside_are_refused() -> None:
    layout = FlatLayout.build({f"p{number}": (4,) for number in range(9)}, alignment=4)
    with pytest.raises(CallError, match=r"one of the parameters 'p0', .*'p7', …; got 'q'"):
        layout.of("q")
    with pytest.raises(CallError, match=r"parameters \(none\); got 'q'"):
        FlatLayout.build({}).of("q")
    for first, last in [(-1, 3), (3, 2), (0, 37)]:
        with pytest.raises(CallError, match="0 <= first <= stop <= 36"):
            layout.overlaps(first, last)
