"""Extents whose pages fall on pages of the memory are read straight into it; all others pass through the buffer."""

import numpy as np
import pytest

from zerort.checkpoint.format.extents import LARGE_NBYTES, PAGE_NBYTES
from zerort.checkpoint.format.manifest import VERSION, DataFile, Manifest, StoredExtent
from zerort.checkpoint.reader import Fetch, ShardFiles, deliver, span_of
from zerort.native import address_of, crc32c
from zerort.storage.files.blocks import aligned_buffer

WIDTH = 4
PAGE = PAGE_NBYTES // WIDTH
"""Elements."""
UNTOUCHED = 0xA5


@pytest.mark.parametrize("into", [0, 16, PAGE - 16])
@pytest.mark.parametrize("skip", [0, 16, PAGE - 16, PAGE, 3 * PAGE + 16])
@pytest.mark.parametrize("offset", [0, 16, PAGE - 16, 2 * PAGE])
def test_whole_pages_go_straight_where_they_fall_on_pages(tmp_path, offset, skip, into):
    """All in elements: where the extent begins in its file, the wanted ones in it, and their memory in a page."""
    wanted = LARGE_NBYTES // WIDTH + 3 * PAGE
    stored = np.arange(1, skip + wanted + 100, dtype=np.int32)
    whole = np.full(-(-(offset + stored.size) // PAGE) * PAGE, -1, np.int32)
    whole[offset : offset + stored.size] = stored
    whole.tofile(tmp_path / "data.bin")
    out = aligned_buffer((wanted + PAGE) * WIDTH).view(np.int32)[into : into + wanted]
    extent = StoredExtent(0, offset * WIDTH, 0, stored.size, crc32c(stored.view(np.uint8)))
    fetch = Fetch("parameter", "w", "int32", extent, skip, out)
    begin, end = span_of([fetch])
    buffer = aligned_buffer(end - begin)
    buffer[:] = UNTOUCHED
    damages = []
    stored_in = (DataFile("data.bin", whole.nbytes),)
    manifest = Manifest(
        format=VERSION, created="", zerort="", ranks=1, meta={}, progress=(), files=stored_in, tensors={}
    )
    files = ShardFiles(str(tmp_path), manifest, [fetch], on_damage=damages.append)
    try:
        deliver(files, [fetch], buffer, on_damage=damages.append)
    finally:
        files.close()
    assert not damages
    assert (out == stored[skip : skip + wanted]).all()
    to_page_in_file = -(offset + skip) % PAGE
    to_page_in_memory = -(address_of(out) // WIDTH) % PAGE
    straight = to_page_in_file == to_page_in_memory
    assert fetch.in_phase == straight
    assert (np.count_nonzero(buffer == UNTOUCHED) > LARGE_NBYTES // 2) == straight
