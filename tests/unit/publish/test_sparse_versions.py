"""Whole versions of sparse tensors: values and where they are, in fewer bytes; readers have the same bits."""

import json

import ml_dtypes
import numpy as np
import pytest

import zerort as zr
from zerort.checkpoint import Value
from zerort.errors import CorruptCheckpointError
from zerort.layout import FlatLayout, Partition
from zerort.publish import Feed, Reader
from zerort.testing import run_threads

LAYOUT = FlatLayout.build({"w": (300, 40), "dense": (100, 40), "v": (3, 7), "none": (0, 3)})


def model(seed):
    lot = np.random.default_rng(seed)
    floats = lot.standard_normal(LAYOUT.numel).astype(np.float32)
    for name in ("w", "v"):
        part = floats[LAYOUT.of(name).slice]
        part[lot.random(part.size) < 0.75] = 0
    floats[LAYOUT.of("w").slice][:2] = -0.0, np.nan
    return floats


def published(path, ranks, versions, *, full_every=50, sparse=("w", "v", "none")):
    """Push versions from some ranks; return what the pushes said, and after which every reader has its arrays."""
    readers = [Reader(path), Reader(path, map_files=False), Reader(path, mapping={"joined": ("w", "dense")})]
    said = []

    def body(group):
        partition = Partition.build(LAYOUT.numel, group.size)
        holder = {}

        def values():
            mine = holder["floats"][partition.of(group.rank).slice].copy()
            return [Value(kind="parameter", layout=LAYOUT, partition=partition, mine=mine, sparse=frozenset(sparse))]

        feed = Feed(path, group, values, updates=lambda: 7, full_every=full_every)
        for seed in versions:
            holder["floats"] = model(seed)
            done = feed.push().wait()
            if group.rank == 0:
                said.append(done)
                expect(readers, holder["floats"])
            group.barrier().wait()
        feed.close()

    run_threads(ranks, body)
    return said


def expect(readers, floats):
    wanted = {one.name: floats[one.slice].astype(ml_dtypes.bfloat16).reshape(one.shape) for one in LAYOUT.extents}
    for reader in readers:
        found = reader.update()
        if "joined" in found:
            joined = found.pop("joined")
            found |= {"w": joined[:300], "dense": joined[300:]}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_readers_have_the_bits_of_sparse_tensors(tmp_path, ranks):
    """Whole, as deltas, and whole again; each version in fewer bytes than its dense tensors."""
    said = published(tmp_path / "feed", ranks, [1, 2, 2, 3], full_every=3)
    assert [one.is_full for one in said] == [True, False, False, True]
    dense = published(tmp_path / "dense", ranks, [1], sparse=())
    sparse_nbytes = 2 * (300 * 40 + 21)
    assert said[0].nbytes < dense[0].nbytes - sparse_nbytes * (1 - 0.25 - 1 / 16) + 1024
    assert said[0].changed < dense[0].changed


def test_only_versions_with_sparse_tensors_need_a_newer_reader(tmp_path):
    for sparse, format in (((), 1), (("w",), 2)):
        published(tmp_path / str(format), 2, [1], sparse=sparse)
        (record,) = (tmp_path / str(format)).glob("version-*.json")
        assert json.loads(record.read_bytes().split(b"\n", 1)[1])["format"] == format
        head = json.loads((tmp_path / str(format) / "feed.json").read_bytes().split(b"\n", 1)[1])
        assert head["format"] == 1


def test_damage_beside_a_whole_version_is_found(tmp_path):
    published(tmp_path / "feed", 2, [1])
    file = sorted((tmp_path / "feed").glob("delta-*.bin"))[0]
    octets = bytearray(file.read_bytes())
    octets[100] ^= 1
    file.write_bytes(octets)
    with pytest.raises(CorruptCheckpointError, match=r"Expected checksum .* in .*delta-.*\.bin, got"):
        Reader(tmp_path / "feed").update()


def test_a_run_publishes_what_it_has_pruned(tmp_path):
    def body(group):
        groups = [zr.ParameterGroup("*.w", sparsity=zr.Sparsity(0.75))]
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1), group=group, param_groups=groups) as rt:
            lot = np.random.default_rng(3)
            values = {name: lot.standard_normal((64, 100)).astype(np.float32) for name in ("w", "dense")}
            unit = rt.register("u", values)
            feed = rt.publish(tmp_path / "feed", full_every=1)
            sizes = [feed.push().wait().nbytes]
            unit.reduce({name: np.ones((64, 100), np.float32) for name in values})
            rt.step()
            sizes.append(feed.push().wait().nbytes)
            feed.close()
            with unit.gathered() as p:
                return sizes, {name: np.array(p[name]) for name in values}

    (sizes, found), *_ = run_threads(2, body)
    assert sizes[0] - sizes[1] == pytest.approx(2 * 6400 * (1 - 0.25 - 1 / 16), abs=400)  # a name less, headers more
    arrays = Reader(tmp_path / "feed").update()
    for name, value in found.items():
        np.testing.assert_array_equal(arrays[f"u.{name}"], value.astype(ml_dtypes.bfloat16))
