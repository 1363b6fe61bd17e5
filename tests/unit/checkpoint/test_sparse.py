"""Sparse tensors in checkpoints: bitmap and values, the same bits; read by any number of ranks, verified, exported."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from manifest_files import body_of, text_of
from read_checkpoint import read_checkpoint

import zerort as zr
from zerort.checkpoint import Value, export, load, read_manifest, save, verify
from zerort.cli.main import main
from zerort.errors import CorruptCheckpointError
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads

SHAPES = {"w": (120, 201), "b": (599,), "scale": (), "none": (0, 3)}
SPARSE = (frozenset(SHAPES), frozenset())
DTYPES = {"parameter": ml_dtypes.bfloat16, "exp_avg": np.float32, "dense": np.float64}


def numbers(kind):
    """Return a flat buffer of which half is zero, but for `dense`; -0.0 and NaN are no zeros."""
    layout, lot = FlatLayout.build(SHAPES, dtype=np.dtype(DTYPES[kind]).name), np.random.default_rng(len(kind))
    values = np.zeros(layout.numel, DTYPES[kind])
    for extent in layout.extents:
        drawn = lot.standard_normal(extent.numel)
        values[extent.slice] = np.where((lot.random(extent.numel) < 0.5) & (kind != "dense"), 0, drawn)
    values[:3] = -0.0, np.nan, np.inf
    values[layout.of("scale").slice] = 1
    return layout, values


def values_of(group, *, filled):
    for kind in DTYPES:
        layout, values = numbers(kind)
        partition = Partition.build(layout.numel, group.size, alignment=64)
        mine = values[partition.of(group.rank).slice].copy()
        if not filled:
            mine[:] = 1
        yield Value(kind=kind, layout=layout, partition=partition, mine=mine, sparse=SPARSE[kind == "dense"])


def saved(path, ranks, **options):
    body = lambda group: save(path, group, list(values_of(group, filled=True)), meta={"step": 1}, **options)  # noqa: E731
    return run_threads(ranks, body)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_reads_bitmaps_back(tmp_path, ranks):
    said = saved(tmp_path / "c", ranks)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.format == 3
    assert said.nbytes == sum(file.stat().st_size for file in (tmp_path / "c").glob("shard-*"))
    sizes = {kind: tensors["w"].stored_nbytes / tensors["w"].nbytes for kind, tensors in manifest.tensors.items()}
    assert sizes["parameter"] == pytest.approx(0.5 + 1 / 16, abs=0.02)
    assert sizes["exp_avg"] == pytest.approx(0.5 + 1 / 32, abs=0.02)
    assert sizes["dense"] == 1
    assert not manifest.tensors["parameter"]["scale"].is_sparse  # longer as a bitmap and one value

    def body(group):
        values = list(values_of(group, filled=False))
        load(tmp_path / "c", group, values)
        for value in values:
            layout, whole = numbers(value.kind)
            own = value.partition.of(group.rank)
            used = np.zeros(layout.numel, bool)
            for extent in layout.extents:
                used[extent.slice] = True
            expected = np.where(used[own.slice], whole[own.slice], np.ones(1, whole.dtype))
            assert value.array.tobytes() == expected.tobytes(), value.kind

    for readers in (1, 2, 5):
        run_threads(readers, body)
    assert verify(tmp_path / "c") == []


def test_a_reader_of_its_own_finds_the_bitmaps(tmp_path):
    saved(tmp_path / "c", 2)
    _, tensors = read_checkpoint(tmp_path / "c")
    for kind in DTYPES:
        layout, whole = numbers(kind)
        for extent in layout.extents:
            expected = whole[extent.slice].reshape(extent.shape)
            found = tensors[kind, extent.name]
            np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=f"{kind} {extent.name}")


def test_the_shorter_of_bitmap_and_zstd_is_taken(tmp_path):
    pytest.importorskip("zstandard")
    both = saved(tmp_path / "both", 2, compress="zstd")
    assert both.nbytes <= saved(tmp_path / "bitmap", 2).nbytes
    _, tensors = read_checkpoint(tmp_path / "both")
    layout, whole = numbers("exp_avg")
    np.testing.assert_array_equal(tensors["exp_avg", "w"].reshape(-1), whole[layout.of("w").slice])


def test_damage_is_found_and_older_formats_have_no_bitmaps(tmp_path):
    saved(tmp_path / "c", 1)
    (file,) = (tmp_path / "c").glob("shard-*")
    octets = bytearray(file.read_bytes())
    octets[1000] ^= 4
    file.write_bytes(octets)
    (damage,) = verify(tmp_path / "c")
    assert "Expected checksum" in damage.reason
    (tmp_path / "c" / "manifest.json").write_bytes(text_of(body_of(tmp_path / "c"), version=2))
    with pytest.raises(
        CorruptCheckpointError, match=r"format 2 says, got: .* no valid sparse extents of parameter 'w'"
    ):
        read_manifest(tmp_path / "c")


def test_the_command_line_knows_bitmaps(tmp_path, capsys):
    saved(tmp_path / "c", 2)
    assert main(["ckpt", "inspect", str(tmp_path / "c")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(format 3)" in said
    assert "sparse 4 tensors as bitmap and values: " in said
    assert main(["ckpt", "inspect", str(tmp_path / "c"), "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert kinds["exp_avg"]["stored_nbytes"] < 0.6 * kinds["exp_avg"]["nbytes"]
    assert main(["ckpt", "verify", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    export(tmp_path / "c", tmp_path / "w.safetensors", kind="exp_avg")
    octets = (tmp_path / "w.safetensors").read_bytes()
    layout, whole = numbers("exp_avg")
    assert whole[layout.of("w").slice].tobytes() in octets


def test_a_run_with_masks_saves_them_and_a_dense_one_goes_on(tmp_path):
    """Parameters and moments of pruned tensors are bitmaps; a run without sparsity loads them, and saves format 1."""

    def body(group, groups, load_from, save_to):
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), group=group, param_groups=groups) as rt:
            lot = np.random.default_rng(3)
            values = {name: lot.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
            unit = rt.register("u", values)
            if load_from is not None:
                rt.load(load_from)
            else:
                unit.reduce({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
                rt.step()
            rt.save(save_to)
            with unit.gathered() as p:
                return np.array(p["w"])

    groups = [zr.ParameterGroup("*.w", sparsity=zr.Sparsity(0.75))]
    found = run_threads(2, lambda group: body(group, groups, None, tmp_path / "sparse"))[0]
    assert np.mean(found == 0) == pytest.approx(0.75, abs=0.01)
    manifest = read_manifest(tmp_path / "sparse")
    assert manifest.format == 3
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        tensor = manifest.tensors[kind]["u.w"]
        assert tensor.stored_nbytes / tensor.nbytes == pytest.approx(0.25 + 1 / 32, abs=0.02), kind
    np.testing.assert_array_equal(read_checkpoint(tmp_path / "sparse")[1]["parameter", "u.w"], found)
    again = run_threads(3, lambda group: body(group, [], tmp_path / "sparse", tmp_path / "dense"))[0]
    np.testing.assert_array_equal(again, found)
    assert read_manifest(tmp_path / "dense").format == 1
