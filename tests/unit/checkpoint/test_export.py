"""The full tensors of a checkpoint as safetensors: read back by the real library, made in a few blocks of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import zerort as zr
from zerort.checkpoint import Value, export, read_manifest, save
from zerort.checkpoint.format.safetensors import DTYPES
from zerort.codec import ROWS
from zerort.errors import CallError, CheckpointError, CorruptCheckpointError, StorageError
from zerort.layout import FlatLayout, Partition
from zerort.native.dtypes import numpy_dtype
from zerort.testing import run_threads

SHAPES = {"block0.w": (301, 7), "scale": (), "none": (0, 4), "b": (5,)}


def store(path: Path, dtypes: tuple[str, ...] = ("float32",), *, shapes=None, meta=None, ranks: int = 3):
    """Save tensors of each dtype, named after it unless there is only one, and return them by name."""
    tensors = {}
    layouts = []
    for dtype in dtypes:
        named = {f"{dtype}.{name}" if len(dtypes) > 1 else name: s for name, s in (shapes or SHAPES).items()}
        layouts.append(FlatLayout.build(named, dtype=dtype))
        for name, shape in named.items():
            numbers = np.random.default_rng(len(name)).standard_normal(shape) * 9
            tensors[name] = np.asarray(numbers > 0 if dtype == "bool" else numbers).astype(numpy_dtype(dtype))

    def body(group):
        values = []
        for layout in layouts:
            buffer = np.zeros(layout.numel, numpy_dtype(layout.dtype))
            for extent in layout.extents:
                buffer[extent.slice] = tensors[extent.name].reshape(-1)
            partition = Partition.build(layout.numel, group.size)
            mine = buffer[partition.of(group.rank).slice]
            values.append(Value(kind="parameter", layout=layout, partition=partition, mine=mine))
        save(path, group, values, meta={"updates": 12} if meta is None else meta)

    run_threads(ranks, body)
    return tensors


def test_the_real_library_reads_every_tensor(tmp_path: Path) -> None:
    tensors = store(tmp_path / "c")
    nbytes = export(tmp_path / "c", tmp_path / "m.safetensors")
    assert nbytes == os.path.getsize(tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes()
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"format": "np", "updates": "12"}
    assert sorted(os.listdir(tmp_path)) == ["c", "m.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_floats_are_converted(tmp_path: Path, dtype: str) -> None:
    tensors = store(tmp_path / "c", meta={})
    export(tmp_path / "c", tmp_path / "m.safetensors", dtype=dtype)
    for name, found in load_file(tmp_path / "m.safetensors").items():
        assert str(found.dtype) == dtype
        assert found.tobytes() == tensors[name].astype(numpy_dtype(dtype)).tobytes(), name
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {"format": "np"}


def test_all_dtypes_side_by_side_and_only_floats_converted(tmp_path: Path) -> None:
    known = tuple(name for name in DTYPES if not name.startswith(("float8", "complex")))
    tensors = store(tmp_path / "c", known)
    export(tmp_path / "c", tmp_path / "m.safetensors", dtype="bfloat16")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        is_float = name.split(".")[0] in ("float16", "bfloat16", "float32", "float64")
        expected = tensor.astype(np.float32).astype(numpy_dtype("bfloat16")) if is_float else tensor
        assert found[name].tobytes() == expected.tobytes(), name


def test_extents_of_large_tensors_are_put_together(tmp_path: Path) -> None:
    tensors = store(tmp_path / "c", shapes={"w": (3_000_001,), "v": (5,)})
    export(tmp_path / "c", tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("format", ROWS)
def test_codes_are_exported_as_what_they_are_decoded_to(format: str, tmp_path: Path) -> None:
    """Also where an extent of the checkpoint ends within a block."""
    base = {"w": np.random.default_rng(1).standard_normal((2300, 4001), np.float32), "b": np.arange(7, dtype="f4")}

    def body(group):
        with zr.open(zr.Plan.zero(3), group=group, frozen_format=format) as rt:
            unit = rt.register("unit", {**base, "a": np.ones(3, np.float32)}, frozen=["w", "b"])
            rt.save(tmp_path / "c")
            with unit.gathered() as p:
                return {f"unit.{name}": np.array(p[name]) for name in unit.names}

    expected = run_threads(1, body)[0]
    extents = read_manifest(tmp_path / "c").tensors[f"parameter.{format}"]["unit.w"].extents
    assert any(one.first % ROWS[format].nbytes for one in extents)
    for dtype in (None, "bfloat16"):
        export(tmp_path / "c", tmp_path / "m.safetensors", dtype=dtype, overwrite=True)
        with safe_open(tmp_path / "m.safetensors", framework="np") as file:
            assert set(file.keys()) == set(expected)
            for name, value in expected.items():
                wanted = value if dtype is None else value.astype(numpy_dtype(dtype))
                assert file.get_slice(name).get_shape() == list(value.shape)
                if dtype is None:
                    np.testing.assert_array_equal(file.get_tensor(name), wanted)
    assert os.path.getsize(tmp_path / "m.safetensors") > 2 * base["w"].size


def test_what_cannot_be_exported_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    store(tmp_path / "c")
    out = tmp_path / "m.safetensors"
    with pytest.raises(CallError, match="Expected a kind out of parameter, got 'exp_avg'"):
        export(tmp_path / "c", out, kind="exp_avg")
    with pytest.raises(CallError, match="Expected dtype to be one of float16, bfloat16, float32, float64, got 'int8'"):
        export(tmp_path / "c", out, dtype="int8")
    with pytest.raises(CheckpointError, match="got nothing"):
        export(tmp_path / "none", out)
    with pytest.raises(StorageError, match="No such file or directory"):
        export(tmp_path / "c", tmp_path / "none" / "m.safetensors")
    store(tmp_path / "d", ("complex128",))
    with pytest.raises(CheckpointError, match="got complex128 for"):
        export(tmp_path / "d", out)
    store(tmp_path / "d", shapes={"__metadata__": (3,)})
    with pytest.raises(CheckpointError, match="got the name '__metadata__'"):
        export(tmp_path / "d", out)
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


def test_a_file_that_is_there_stays_unless_told(tmp_path: Path) -> None:
    store(tmp_path / "c")
    out = tmp_path / "m.safetensors"
    out.write_text("mine")
    with pytest.raises(CallError, match=r"got a file\. Name another, or say --force"):
        export(tmp_path / "c", out)
    with pytest.raises(CallError, match="got a directory"):
        export(tmp_path / "c", tmp_path, overwrite=True)
    assert out.read_text() == "mine"
    export(tmp_path / "c", out, overwrite=True)
    assert "scale" in load_file(out)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    store(tmp_path / "c")
    name = next(name for name in os.listdir(tmp_path / "c") if name.startswith("shard-00001"))
    with (tmp_path / "c" / name).open("r+b") as file:
        file.write(b"spoiled")
    with pytest.raises(CorruptCheckpointError, match=r"'block0\.w' is damaged.*Nothing was changed"):
        export(tmp_path / "c", tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["c"]


CHILD = """
import resource, sys
from zerort.checkpoint import export, verify
export({small!r}, {out!r}, dtype="bfloat16")
verify({small!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export({large!r}, {out!r}, dtype="bfloat16", overwrite=True)
assert verify({large!r}) == []
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_export_and_verify_hold_a_few_blocks_never_the_model(tmp_path: Path) -> None:
    store(tmp_path / "small")
    store(tmp_path / "large", shapes={f"w{at}": (6_000_000,) for at in range(8)}, ranks=2)  # 192 MB
    code = CHILD.format(small=str(tmp_path / "small"), large=str(tmp_path / "large"), out=str(tmp_path / "m"))
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert os.path.getsize(tmp_path / "m") > 96_000_000
    assert int(answer.stdout) < 60 * 1024  # KiB: ten buffers of 4 MiB, and what comes with threads
