"""Values over several members: by weight, whole, and without those that do not help."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerort.errors import CallError, StorageError
from zerort.storage import NvmeOptions, NvmeStore, StripedStore
from zerort.storage.files.faults import injected
from zerort.storage.stores.striped import plan_stripes
from zerort.testing.memory_store import MemoryStore


@given(
    st.integers(0, 500),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 9),
    st.data(),
)
def test_pieces_tile_the_range_and_the_members(nbytes, weights, first, unit, data):
    stripes = plan_stripes(nbytes, weights, first=first, unit=unit)
    shares = [stripes.share(member) for member in range(len(weights))]
    assert sum(shares) == nbytes
    taken = [bytearray(share) for share in shares]
    for member, there, begin, end in stripes.pieces(0, nbytes):
        assert not any(taken[member][there : there + end - begin])
        taken[member][there : there + end - begin] = b"x" * (end - begin)
    assert all(all(member) for member in taken)
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    whole = {}
    for member, there, low, high in stripes.pieces(0, nbytes):
        whole.update({low + k: (member, there + k) for k in range(high - low)})
    found = [(m, there + k) for m, there, low, high in stripes.pieces(begin, end) for k in range(high - low)]
    assert found == [whole[byte] for byte in range(begin, end)]


def test_shares_follow_the_weights():
    stripes = plan_stripes(32 * 100, [3, 1], unit=1)
    assert (stripes.share(0), stripes.share(1)) == (2400, 800)
    chunk = stripes.pieces(0, 320)  # also those of any chunk of it
    assert sum(end - begin for member, _, begin, end in chunk if member == 1) == 80
    assert plan_stripes(100, [1, 0, 2], unit=1).share(1) == 0


def test_small_values_do_not_all_lie_on_one_member():
    members = [MemoryStore(name=str(at)) for at in range(4)]
    with StripedStore(members) as store:
        for at in range(8):
            store.create(str(at), 1000)
        assert [member.nbytes for member in members] == [2000] * 4


def test_a_member_that_is_too_slow_is_left_out_and_it_is_said():
    fast, slow = MemoryStore(name="fast"), MemoryStore(name="slow")
    with pytest.warns(RuntimeWarning, match="leaves out 'slow'"):
        store = StripedStore([fast, slow], weights=[2.0, 0.05])
    with store:
        store.create("a", 100_000_000)
        assert (fast.nbytes, slow.nbytes) == (100_000_000, 0)
        assert "0% MemoryStore('slow'" in repr(store)


def test_it_opens_over_directories_and_weighs_them(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for one in directories:
        one.mkdir()
    with StripedStore.open(directories, rank=1, sample_nbytes=4 * 2**20) as store:
        assert len(store.members) == 2
        assert all(weight > 0 for weight in store.weights)
        data = np.arange(3_000_000, dtype=np.float32)
        store.create("a", data.nbytes)
        store.write("a", data)
        store.flush()
        assert np.array_equal(store.read("a", np.empty_like(data)).wait(), data)
    assert [list(one.iterdir()) for one in directories] == [[], []]


def test_a_member_that_fails_is_named_when_all_others_have_ended(tmp_path):
    members = [NvmeStore(tmp_path / one, name=one, options=NvmeOptions(retries=0)) for one in "ab"]
    with StripedStore(members, unit_nbytes=256 * 1024) as store:
        store.create("value", 2**22)
        with injected(f"eio@1:times=all:file={tmp_path / 'b'}"):
            ticket = store.write("value", np.ones(2**22, np.uint8))
            with pytest.raises(StorageError, match=str(tmp_path / "b")):
                ticket.wait()
            assert ticket.done()


def test_no_member_has_room():
    with StripedStore([MemoryStore()]) as store, pytest.raises(CallError, match="0 or more"):
        store.create("a", -1)
    with pytest.raises(CallError, match="Expected a weight"):
        StripedStore([])
    with pytest.raises(CallError, match="Expected a weight"):
        StripedStore([MemoryStore()], weights=[0])


def test_when_all_members_refuse_the_error_is_raised(tmp_path):
    members = [NvmeStore(tmp_path / one) for one in "ab"]
    with StripedStore(members, unit_nbytes=256 * 1024) as store, injected("enospc@1:op=reserve:times=all"):
        with pytest.raises(StorageError, match="No space left"), pytest.warns(RuntimeWarning):
            store.create("value", 2**22)
        assert store.nbytes == members[0].nbytes == members[1].nbytes == 0
