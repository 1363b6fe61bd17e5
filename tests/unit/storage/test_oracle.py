"""What a store was given lies in its files as documented: read with plain `open`, not by the store."""

import numpy as np
import pytest
from crc import crc32c
from read_store import read_striped, read_value

from zerort.storage import NvmeOptions, NvmeStore, StripedStore

SIZES = {"block0/exp_avg": 700_001, "ünit.w": 4096, "one": 1, "none": 0}
OPTIONS = {
    "checked": NvmeOptions(block_nbytes=256 * 1024),
    "unchecked": NvmeOptions(checksum=False),
    "buffered": NvmeOptions(direct=False),
}


def fill(store):
    """Create values of all sizes, write to all and again into the middle of some; return what each must hold."""
    generator = np.random.default_rng(0)
    expected = {}
    for name, nbytes in SIZES.items():
        store.create(name, nbytes)
        data = generator.integers(0, 256, nbytes, np.uint8)
        store.write(name, data).wait()
        if nbytes > 4096:
            middle = generator.integers(0, 256, nbytes // 3, np.uint8)
            store.write(name, middle, offset=nbytes // 5).wait()
            data[nbytes // 5 : nbytes // 5 + nbytes // 3] = middle
        expected[name] = data.tobytes()
    store.flush()
    return expected


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_file_holds_what_was_written(options, tmp_path):
    with NvmeStore(tmp_path, options=options) as store:
        for name, data in fill(store).items():
            assert read_value(store.path, name, len(data)) == data, name


@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 0.5], [1]], ids=str)
def test_members_hold_what_was_written_by_turns(weights, tmp_path):
    unit = 30_000
    members = [NvmeStore(tmp_path / str(at)) for at in range(len(weights))]
    with StripedStore(members, weights=weights, unit_nbytes=unit) as store:
        paths = [member.path for member in members]
        for created, (name, data) in enumerate(fill(store).items()):
            assert read_striped(paths, weights, name, len(data), unit=unit, created=created) == data, name


def test_linked_files_and_their_checksums_are_what_was_written(tmp_path):
    with NvmeStore(tmp_path / "store") as store:
        for number, (name, data) in enumerate(fill(store).items()):
            path = tmp_path / f"linked{number}"
            linked = store.link(name, str(path))
            padded = data.ljust(linked.nbytes, b"\0")
            assert path.read_bytes() == padded, name
            grains = [data[at : at + linked.grain] for at in range(0, len(data), linked.grain)]
            assert linked.sums[: len(grains)].tolist() == [crc32c(grain) for grain in grains], name
