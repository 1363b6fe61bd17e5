"""What is saved is what is loaded: any layout, partition, number of ranks and dtype, to the bit."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seams
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import trace
from zerort.checkpoint import Value, load, read_manifest, save, verify
from zerort.checkpoint.files.writer import write_shard
from zerort.checkpoint.format.extents import plan_shard
from zerort.checkpoint.reader import ShardFiles
from zerort.layout import ITEMSIZES, FlatLayout, Partition
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads


def content(name: str, shape: tuple[int, ...], dtype: str, kind: str = "parameter") -> Any:
    """Return the tensor that every test expects under this name: any bits for integers, finite floats."""
    seed = sum(map(ord, kind + name))
    numbers = np.random.default_rng(seed).integers(-100, 100, shape)
    return numbers.astype(numpy_dtype(dtype)) if dtype != "bool" else (numbers > 0)


def whole(layout: FlatLayout, kind: str = "parameter", *, filled: bool = True) -> Any:
    """Return the flat buffer: the tensors, and -1 (or True) in the padding."""
    buffer = np.full(layout.numel, -1).astype(numpy_dtype(layout.dtype))
    if filled:
        for extent in layout.extents:
            buffer[extent.slice] = content(extent.name, extent.shape, layout.dtype, kind).reshape(-1)
    return buffer


def values_of(group, layouts, buffers, weights=None, alignment=1):
    values = []
    for (kind, layout), buffer in zip(layouts.items(), buffers, strict=True):
        partition = Partition.build(layout.numel, group.size, weights=weights, alignment=alignment)
        values.append(Value(kind=kind, layout=layout, partition=partition, mine=buffer[partition.of(group.rank).slice]))
    return values


def store(path, layouts, ranks, weights=None, alignment=1, meta=None):
    buffers = [whole(layout, kind) for kind, layout in layouts.items()]

    def body(group):
        values = values_of(group, layouts, buffers, weights, alignment)
        return save(path, group, values, meta=meta or {"step": 1}, progress={"rank": group.rank})

    return run_threads(ranks, body)[0]


def check(path, layouts, ranks, weights=None, alignment=1):
    """Load into new buffers, which then hold every tensor, and -1 in the padding as before."""
    buffers = [whole(layout, kind, filled=False) for kind, layout in layouts.items()]
    manifest = run_threads(
        ranks, lambda group: load(path, group, values_of(group, layouts, buffers, weights, alignment))
    )[0]
    for (kind, layout), buffer in zip(layouts.items(), buffers, strict=True):
        expected = whole(layout, kind)
        assert buffer.tobytes() == expected.tobytes(), kind
    return manifest


@contextlib.contextmanager
def small_blocks(extent_nbytes=1000, block_nbytes=4096):
    """Cut extents and blocks so small that little tensors are split, packed and put together like large ones."""
    with (
        seams.inside(plan_shard, EXTENT_NBYTES=extent_nbytes, LARGE_NBYTES=8192),
        seams.inside(ShardFiles, LARGE_NBYTES=8192, BLOCK_NBYTES=block_nbytes),
        seams.inside(write_shard, BLOCK_NBYTES=block_nbytes),
    ):
        yield


SHAPES = {"block0.w": (900, 7), "block0.b": (7,), "scale": (), "none": (0, 4), "block1.w": (5, 60, 3), "last": (1,)}


@pytest.mark.slow
@pytest.mark.parametrize("saving", [1, 2, 3, 8])
@pytest.mark.parametrize("extent_nbytes", [1000, 10_000, 2**22])
def test_any_number_of_ranks_loads_what_any_number_saved(tmp_path: Path, saving: int, extent_nbytes: int) -> None:
    layouts = {"parameter": FlatLayout.build(SHAPES), "exp_avg": FlatLayout.build(SHAPES, dtype="float64")}
    with small_blocks(extent_nbytes, 16384):
        store(tmp_path / "c", layouts, saving)
        assert verify(tmp_path / "c") == []
        for loading in (1, 2, 4, 5, 8):
            check(tmp_path / "c", layouts, loading)
            check(tmp_path / "c", layouts, loading, weights=[rank % 3 + (rank == 0) for rank in range(loading)])


@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    layouts = {"parameter": FlatLayout.build(SHAPES, dtype=dtype)}
    with small_blocks():
        store(tmp_path / "c", layouts, 3)
        manifest = check(tmp_path / "c", layouts, 2)
    tensor = manifest.tensors["parameter"]["block0.w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, (900, 7), 6300 * ITEMSIZES[dtype])


def test_another_layout_finds_its_tensors_by_name(tmp_path: Path) -> None:
    store(tmp_path / "c", {"parameter": FlatLayout.build(SHAPES, alignment=64)}, 3)
    turned = FlatLayout.build(dict(reversed(SHAPES.items())), alignment=8)
    check(tmp_path / "c", {"parameter": turned}, 4)


def test_one_kind_in_several_values_and_in_another_number_of_them(tmp_path: Path) -> None:
    names = list(SHAPES)
    parts = [FlatLayout.build({name: SHAPES[name] for name in names[at::2]}) for at in range(2)]
    buffers = [whole(part) for part in parts]

    def body(group, targets, verb, **options):
        values = []
        for layout, buffer in zip(parts, targets, strict=True):
            partition = Partition.build(layout.numel, group.size)
            mine = buffer[partition.of(group.rank).slice]
            values.append(Value(kind="parameter", layout=layout, partition=partition, mine=mine))
        return verb(tmp_path / "c", group, values, **options)

    run_threads(2, lambda group: body(group, buffers, save, meta={}))
    targets = [np.zeros_like(buffer) for buffer in buffers]
    run_threads(3, lambda group: body(group, targets, load))
    for part, target in zip(parts, targets, strict=True):
        for extent in part.extents:
            assert np.array_equal(target[extent.slice].reshape(extent.shape), content(extent.name, extent.shape, "f4"))
    check(tmp_path / "c", {"parameter": FlatLayout.build(SHAPES)}, 2)


@pytest.mark.parametrize("phase", [0, 16, 4080])
def test_large_tensors_at_real_sizes(tmp_path: Path, phase: int) -> None:
    """Extents of 4 MiB over blocks of 4 MiB; straight into place where memory has the phase of the file."""
    layout = FlatLayout.build({"a": (3,), "w": (9_000_001,), "v": (2_000_000,), "b": (64,)})
    memory = np.zeros(layout.nbytes + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + phase
    numbers = np.arange(layout.numel, dtype=np.uint32)
    partition = Partition.build(layout.numel, 2, alignment=64)

    def value(group, buffer):
        return Value(
            kind="w", layout=layout, partition=partition, mine=buffer.view(np.uint32)[partition.of(group.rank).slice]
        )

    layout = FlatLayout(dtype="uint32", extents=layout.extents, numel=layout.numel, alignment=layout.alignment)
    run_threads(2, lambda group: save(tmp_path / "c", group, [value(group, numbers.view(np.uint8))], meta={}))
    target = memory[start : start + layout.nbytes]
    run_threads(2, lambda group: load(tmp_path / "c", group, [value(group, target)]))
    for extent in layout.extents:
        assert np.array_equal(target.view(np.uint32)[extent.slice], numbers[extent.slice]), extent.name
    assert verify(tmp_path / "c") == []
    stored = read_manifest(tmp_path / "c")
    sizes = [one.numel * 4 for one in stored.tensors["w"]["w"].extents]
    assert 3 * 2**20 < max(sizes) < 4 * 2**20
    assert stored.nbytes == sum(extent.numel for extent in layout.extents) * 4
    assert sum(file.nbytes for file in stored.files) < stored.nbytes + 40 * 4096  # padding is not stored


FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats_convert_as_rounding_to_nearest(tmp_path: Path, source: str, target: str) -> None:
    layout = FlatLayout.build({"w": (1001,), "b": (3,)}, dtype=source)
    original = np.random.default_rng(0).standard_normal(layout.numel).astype(numpy_dtype(source))
    original[:4] = np.array([np.inf, -np.inf, np.nan, -0.0]).astype(numpy_dtype(source))
    wanted = FlatLayout.build({"w": (1001,), "b": (3,)}, dtype=target)
    result = np.zeros(wanted.numel, numpy_dtype(target))

    def body(group, verb, layout, buffer, **options):
        partition = Partition.build(layout.numel, group.size)
        mine = buffer[partition.of(group.rank).slice]
        return verb(tmp_path / "c", group, [Value(kind="p", layout=layout, partition=partition, mine=mine)], **options)

    with small_blocks():
        run_threads(2, lambda group: body(group, save, layout, original, meta={}))
        run_threads(3, lambda group: body(group, load, wanted, result))
    with np.errstate(all="ignore"):
        expected = original.astype(np.float32).astype(numpy_dtype(target)) if source != target else original
        if {source, target} == {"float32", "float64"}:
            expected = original.astype(target)
    for extent in layout.extents:
        assert np.array_equal(result[extent.slice].astype("f8"), expected[extent.slice].astype("f8"), equal_nan=True)


def test_kinds_that_nobody_asked_for_are_not_read(tmp_path: Path) -> None:
    layout = FlatLayout.build(SHAPES)
    store(tmp_path / "c", {"parameter": layout}, 2)
    manifest = read_manifest(tmp_path / "c")
    store(tmp_path / "c", {"parameter": layout, "exp_avg": layout}, 2)
    check(tmp_path / "c", {"parameter": layout}, 3)
    # Spoiled moments do not disturb who does not read them.
    both = read_manifest(tmp_path / "c")
    for extent in both.tensors["exp_avg"]["block0.w"].extents:
        with (tmp_path / "c" / both.files[extent.file].name).open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"spoiled")
    check(tmp_path / "c", {"parameter": layout}, 3)
    assert {(damage.kind, damage.tensor) for damage in verify(tmp_path / "c")} == {("exp_avg", "block0.w")}
    assert manifest.nbytes * 2 == both.nbytes


def test_meta_and_progress_come_back(tmp_path: Path) -> None:
    layout = FlatLayout.build(SHAPES)
    random_state = np.random.default_rng(3).bit_generator.state
    meta = {"step": 7, "scale": 2.0**15, "plan": {"parameter": "SHARDED"}, "text": "ü", "state": random_state}
    saved = store(tmp_path / "c", {"parameter": layout}, 3, meta=meta)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.meta == json.loads(json.dumps(meta))
    assert manifest.progress == ({"rank": 0}, {"rank": 1}, {"rank": 2})
    assert (manifest.ranks, manifest.format, manifest.created[:2]) == (3, 1, "20")
    assert saved.nbytes == sum(file.nbytes for file in manifest.files)
    assert saved.path == str(tmp_path / "c")
    generator = np.random.default_rng()
    generator.bit_generator.state = manifest.meta["state"]
    assert generator.random() == np.random.default_rng(3).random()


def test_a_save_replaces_the_one_before_and_touches_nothing_else(tmp_path: Path) -> None:
    layout = {"parameter": FlatLayout.build(SHAPES)}
    path = tmp_path / "deep" / "c"
    store(path, layout, 3)
    strangers = ["notes.txt", "shard-00000.bin", "shard-1.0123456789abcdef.bin", "manifest.json.bak", "x.tmp"]
    for name in strangers:
        (path / name).write_text("mine")
    before = set(os.listdir(path)) - set(strangers) - {"manifest.json"}
    leftovers = {"shard-00007.0123456789abcdef.bin", "manifest.json.0123456789abcdef.tmp"}
    for name in leftovers:
        (path / name).write_text("of a killed save")
    saved = store(path, layout, 2, meta={"step": 2})
    assert set(saved.removed) == before | leftovers
    now = set(os.listdir(path))
    assert now == set(strangers) | {"manifest.json"} | {file.name for file in read_manifest(path).files}
    assert all((path / name).read_text() == "mine" for name in strangers)
    assert check(path, layout, 2).meta == {"step": 2}


def test_empty_shards_and_empty_checkpoints(tmp_path: Path) -> None:
    layouts = {"parameter": FlatLayout.build({"w": (3,)}, alignment=1)}
    store(tmp_path / "a", layouts, 8)
    assert len(read_manifest(tmp_path / "a").files) == 3
    check(tmp_path / "a", layouts, 2)
    store(tmp_path / "b", {"parameter": FlatLayout.build({"none": (0,)})}, 2)
    assert check(tmp_path / "b", {"parameter": FlatLayout.build({"none": (0,)})}, 3).nbytes == 0
    run_threads(2, lambda group: save(tmp_path / "d", group, [], meta={}))
    run_threads(3, lambda group: load(tmp_path / "d", group, []))
    assert verify(tmp_path / "d") == []


def test_the_trace_shows_what_took_how_long(tmp_path: Path) -> None:
    layouts = {"parameter": FlatLayout.build(SHAPES)}
    trace.reset()
    trace.enable()
    try:
        store(tmp_path / "c", layouts, 1)
        check(tmp_path / "c", layouts, 1)
        names = [span.name for span in trace.spans() if span.track == "checkpoint"]
    finally:
        trace.disable()
        trace.reset()
    assert names == ["checkpoint.write", "checkpoint.commit", "checkpoint.save", "checkpoint.read", "checkpoint.load"]


@st.composite
def cuts(draw):
    """A way to cut a buffer: ranks, weights and alignment."""
    ranks = draw(st.integers(1, 5))
    weights = draw(st.none() | st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any))
    return ranks, weights, draw(st.sampled_from([1, 3, 64]))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), max_size=5),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    alignments=st.tuples(st.sampled_from([1, 7, 64]), st.sampled_from([1, 16])),
    saving=cuts(),
    loading=cuts(),
    extent_nbytes=st.sampled_from([16, 100, 20_000]),
    order=st.randoms(use_true_random=False),
)
def test_any_cut_can_be_read_by_any_other(shapes, dtype, alignments, saving, loading, extent_nbytes, order) -> None:
    named = {f"t{at}": shape for at, shape in enumerate(shapes)}
    names = list(named)
    order.shuffle(names)
    before = {"k": FlatLayout.build(named, dtype=dtype, alignment=alignments[0])}
    after = {"k": FlatLayout.build({name: named[name] for name in names}, dtype=dtype, alignment=alignments[1])}
    with tempfile.TemporaryDirectory() as directory, small_blocks(extent_nbytes):
        store(f"{directory}/c", before, *saving)
        check(f"{directory}/c", after, *loading)
        assert verify(f"{directory}/c") == []
