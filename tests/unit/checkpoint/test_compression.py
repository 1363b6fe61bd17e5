"""``compress="zstd"``: fewer bytes, the same bits; read by any number of ranks, verified, exported, refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from read_checkpoint import read_checkpoint

import zerort as zr
from zerort.checkpoint import Value, export, load, read_manifest, save, verify
from zerort.cli.main import main
from zerort.errors import CallError, CheckpointError, CorruptCheckpointError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads

pytest.importorskip("zstandard")

SHAPES = {"w": (400, 600), "b": (600,), "scale": (), "none": (0, 3)}
KINDS = {"parameter": "bfloat16", "exp_avg": "float32", "noise": "uint8"}


def layout_of(kind):
    return FlatLayout.build(SHAPES, dtype=KINDS[kind])


def numbers(kind):
    """Return a flat buffer: weights of like magnitude, whose exponents compress, or bytes that do not."""
    layout, lot = layout_of(kind), np.random.default_rng(len(kind))
    values = np.zeros(layout.numel, ml_dtypes.bfloat16 if KINDS[kind] == "bfloat16" else KINDS[kind])
    for extent in layout.extents:
        drawn = lot.integers(0, 256, extent.numel) if kind == "noise" else lot.standard_normal(extent.numel) * 0.02
        values[extent.slice] = drawn.astype(values.dtype)
    return values


def values_of(group, *, filled):
    values = []
    for kind in KINDS:
        layout = layout_of(kind)
        partition = Partition.build(layout.numel, group.size, alignment=64)
        mine = numbers(kind)[partition.of(group.rank).slice].copy()
        if not filled:
            mine[:] = 0
        values.append(Value(kind=kind, layout=layout, partition=partition, mine=mine))
    return values


def saved(path, ranks=2, compress="zstd"):
    return run_threads(
        ranks, lambda group: save(path, group, values_of(group, filled=True), meta={"step": 1}, compress=compress)
    )[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_reads_it_back(tmp_path, ranks):
    plain, small = saved(tmp_path / "plain", ranks, None), saved(tmp_path / "small", ranks)
    assert small.nbytes < 0.9 * plain.nbytes
    assert small.nbytes == sum(file.stat().st_size for file in (tmp_path / "small").glob("shard-*"))
    assert [read_manifest(tmp_path / one).format for one in ("plain", "small")] == [1, 2]

    def body(group):
        values = values_of(group, filled=False)
        load(tmp_path / "small", group, values)
        for value in values:
            wanted = numbers(value.kind)[value.partition.of(group.rank).slice]
            assert value.array.tobytes() == wanted.tobytes(), value.kind

    for readers in (1, 2, 5):
        run_threads(readers, body)
    assert verify(tmp_path / "small") == []


def test_a_reader_of_its_own_finds_the_same(tmp_path):
    saved(tmp_path / "c")
    _, tensors = read_checkpoint(tmp_path / "c")
    for kind in KINDS:
        for extent in layout_of(kind).extents:
            wanted = numbers(kind)[extent.slice].reshape(extent.shape)
            np.testing.assert_array_equal(tensors[kind, extent.name], wanted.astype(tensors[kind, extent.name].dtype))


def test_what_does_not_shrink_is_stored_as_it_is(tmp_path):
    saved(tmp_path / "c")
    tensors = read_manifest(tmp_path / "c").tensors
    assert all(extent.stored_nbytes == 0 for extent in tensors["noise"]["w"].extents)
    assert all(0 < extent.stored_nbytes < 4 * extent.numel for extent in tensors["exp_avg"]["w"].extents)


def test_every_flipped_byte_is_found_and_named(tmp_path):
    path = tmp_path / "c"
    saved(path)
    manifest = read_manifest(path)
    for kind in KINDS:
        for extent in manifest.tensors[kind]["w"].extents:
            nbytes = extent.stored_nbytes or extent.numel * manifest.tensors[kind]["w"].nbytes // (400 * 600)
            file = path / manifest.files[extent.file].name
            content = file.read_bytes()
            for at in (0, nbytes // 2, nbytes - 1):
                damaged = bytearray(content)
                damaged[extent.offset + at] ^= 1
                file.write_bytes(damaged)
                [found] = verify(path)
                assert (found.kind, found.tensor, found.offset, found.nbytes) == (kind, "w", extent.offset, nbytes)

            def body(group):
                with pytest.raises(CorruptCheckpointError, match="is damaged"):
                    load(path, group, values_of(group, filled=False))

            run_threads(2, body)
            file.write_bytes(content)
    assert verify(path) == []


def test_frames_of_other_elements_are_refused(tmp_path):
    """A manifest that is whole and says other things than the frames hold: too many, too few elements."""
    import zstandard

    from zerort.checkpoint.format.compression import compressed, decompressed

    frame = np.frombuffer(compressed(np.arange(1000, dtype=np.float32)), np.uint8)
    for numel in (999, 1001):
        with pytest.raises(ValueError, match=f"a zstd frame of {4 * numel} bytes"):
            decompressed(frame, dtype=np.dtype(np.float32), numel=numel)
    nonsense = np.frombuffer(zstandard.ZstdCompressor().compress(b"x" * 4000)[:-3], np.uint8)
    with pytest.raises(ValueError, match="a zstd frame of 4000 bytes, got: "):
        decompressed(nonsense, dtype=np.dtype(np.float32), numel=1000)


def test_inspect_verify_and_export_take_it(tmp_path, capsys):
    saved(tmp_path / "c")
    assert main(["ckpt", "verify", str(tmp_path / "c")]) == 0
    assert main(["ckpt", "inspect", str(tmp_path / "c"), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["format"] == 2
    export(tmp_path / "c", tmp_path / "out.safetensors")
    from safetensors.numpy import load_file

    wanted = numbers("parameter")[layout_of("parameter").of("w").slice]
    assert load_file(tmp_path / "out.safetensors")["w"].tobytes() == wanted.tobytes()


def test_without_the_package_all_ranks_say_so(tmp_path, monkeypatch):
    saved(tmp_path / "c")
    monkeypatch.setitem(sys.modules, "zstandard", None)

    def body(group):
        with pytest.raises(CallError, match="Expected the zstandard package, got none"):
            save(tmp_path / "d", group, values_of(group, filled=True), meta={}, compress="zstd")
        with pytest.raises(CallError, match="compress to be None or 'zstd', got 'gzip'"):
            save(tmp_path / "d", group, values_of(group, filled=True), meta={}, compress="gzip")
        with pytest.raises(CheckpointError, match="Expected, for a compressed checkpoint, the zstandard package"):
            load(tmp_path / "c", group, values_of(group, filled=False))

    run_threads(2, body)
    assert not (tmp_path / "d").exists()
    assert verify(tmp_path / "c") == []  # checksums are those of the files


@pytest.mark.parametrize("tier", [zr.Tier.DEVICE, zr.Tier.NVME], ids=["memory", "nvme"])
def test_a_runtime_saves_and_loads_it(tmp_path: Path, tier):
    """And trains on with the same bits as one that was saved plainly; what rests on a disk is not linked."""
    plan = zr.Plan.zero(3, parameter=tier, state=tier)
    start = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)

    def body(group, path, compress, digests):
        options = {"scratch": tmp_path / "scratch", "create_scratch": True} if tier is zr.Tier.NVME else {}
        with zr.open(group=group, plan=plan, optimizer=zr.AdamW(lr=0.1), **options) as rt:
            unit = rt.register("u", {"w": start})

            def step():
                unit.reduce({"w": start * np.float32(0.5)})
                rt.step()

            step()
            rt.save(path, compress=compress)
            step()
            with unit.gathered() as p:
                ahead = np.array(p["w"]).tobytes()
            assert rt.load(path).updates == 1
            step()
            with unit.gathered() as p:
                assert np.array(p["w"]).tobytes() == ahead
            digests.append(ahead)

    digests: list[bytes] = []
    for compress in (None, "zstd"):
        path = tmp_path / f"{compress}"
        run_threads(2, lambda group, path=path, compress=compress: body(group, path, compress, digests))
    assert len(set(digests)) == 1
    nbytes = {one: sum(file.nbytes for file in read_manifest(tmp_path / one).files) for one in ("None", "zstd")}
    assert nbytes["zstd"] < nbytes["None"]
