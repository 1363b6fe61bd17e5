"""`StoreContract`: what every store holds: the bytes that were written, in order, by name, and clean errors.

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            with NvmeStore(tmp_path) as store:
                yield store

A store whose callers' arrays lie elsewhere overrides `StoreContract.put` and `StoreContract.get`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerort.device import Ticket
from zerort.errors import CallError, ClosedError
from zerort.storage.stores.store import Store
from zerort.typing import Array

__all__ = ["StoreContract"]

_SIZES = [0, 1, 511, 4096, 4097, 262_144, 1_000_003, 9 * 1024**2 + 5]


class StoreContract:
    """What every store holds. Subclasses provide the fixture ``store``."""

    ranges = 25
    """Writes and reads of ranges that are tried."""

    def put(self, values: Array) -> Any:
        """Return an array where callers' arrays lie, with these values."""
        return values

    def get(self, array: Any) -> Array:
        """Return the values of an array where callers' arrays lie."""
        return np.asarray(array)

    def empty(self, numel: int) -> Any:
        """Return bytes that the store can read into, none of them zero."""
        return self.put(np.full(numel, 77, np.uint8))

    def some(self, nbytes: int, seed: int = 0) -> Any:
        """Return random bytes."""
        return self.put(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))

    def read(self, store: Store, name: str, nbytes: int, *, offset: int = 0) -> Array:
        """Return what a store reads."""
        return self.get(store.read(name, self.empty(nbytes), offset=offset).wait())

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_what_is_written_is_read(self, store: Store, nbytes: int) -> None:
        """Any size, aligned or not, comes back as it was; the tickets give the arrays."""
        store.create("value", nbytes)
        data, out = self.some(nbytes), self.empty(nbytes)
        assert store.write("value", data).wait() is data
        assert store.read("value", out).wait() is out
        assert np.array_equal(self.get(out), self.get(data))

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_a_new_value_is_zero(self, store: Store, nbytes: int) -> None:
        """What was never written reads as zeros, also around what was."""
        store.create("value", nbytes)
        assert not self.read(store, "value", nbytes).any()
        if nbytes > 10:
            store.write("value", self.put(np.full(3, 9, np.uint8)), offset=5).wait()
            out = self.read(store, "value", nbytes)
            assert out[5:8].tolist() == [9, 9, 9]
            assert not out[:5].any()
            assert not out[8:].any()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
    def test_any_dtype(self, store: Store, dtype: str) -> None:
        """A value is bytes; arrays of any dtype can be put there and taken from there."""
        from zerort.native.dtypes import numpy_dtype

        data = np.arange(5000).astype(numpy_dtype(dtype))
        store.create("value", data.nbytes)
        store.write("value", self.put(data))
        out = self.put(np.zeros_like(data))
        assert self.get(store.read("value", out).wait()).tobytes() == data.tobytes()

    @pytest.mark.parametrize("grain", [None, 4096])
    def test_several_ranges_at_once(self, store: Store, grain: int | None) -> None:
        """Parts of a value, at pages or not, change exactly their bytes, whatever is read and checked with them."""
        nbytes, page = 300_000, 4096
        store.create("value", nbytes, grain=grain)
        model = self.get(self.some(nbytes)).copy()
        store.write("value", self.put(model)).wait()
        rounds = (
            [(0, page), (3 * page, 2 * page), (70 * page, nbytes - 70 * page)],
            [(5, 10), (20, 30), (4090, 20), (200_000, 77_000)],
            [(40, 9)],
        )
        for seed, parts in enumerate(rounds):
            data = self.some(sum(count for _, count in parts), seed=1 + seed)
            assert store.write_parts("value", data, parts).wait() is data
            at, source = 0, self.get(data)
            for offset, count in parts:
                model[offset : offset + count] = source[at : at + count]
                at += count
            out = self.empty(data.size)
            assert store.read_parts("value", out, parts).wait() is out
            assert np.array_equal(self.get(out), source)
            assert np.array_equal(self.read(store, "value", nbytes), model)
        with pytest.raises(CallError, match="Expected a range within"):
            store.read_parts("value", self.empty(20), [(0, 10), (nbytes - 5, 10)]).wait()

    @pytest.mark.parametrize("aligned", [True, False])
    def test_any_range(self, store: Store, aligned: bool) -> None:  # noqa: FBT001
        """Ranges that begin and end anywhere, out of memory that begins anywhere, change exactly their bytes."""
        from zerort.device import HostDevice

        nbytes = 6 * 1024**2 + 77
        store.create("value", nbytes)
        model = np.zeros(nbytes, np.uint8)
        generator = np.random.default_rng(3)
        for at in range(self.ranges):
            begin, end = sorted(generator.integers(0, nbytes + 1, 2).tolist())
            if at % 3 == 0:
                begin, end = begin // 4096 * 4096, end // 4096 * 4096
            data = HostDevice().empty(end - begin, "uint8", alignment=4096 if aligned else 64)
            data[:] = generator.integers(0, 256, end - begin, np.uint8)
            store.write("value", self.put(data), offset=begin)
            model[begin:end] = data
            first, last = sorted(generator.integers(0, nbytes + 1, 2).tolist())
            assert np.array_equal(self.read(store, "value", last - first, offset=first), model[first:last])
        store.flush()
        assert np.array_equal(self.read(store, "value", nbytes), model)

    def test_order_without_waiting(self, store: Store) -> None:
        """A read sees the writes that were asked for before it and none that came after, whoever waits for what."""
        nbytes = 3 * 1024**2 + 1000
        store.create("value", nbytes)
        reads: list[tuple[int, Any, Ticket[Any]]] = []
        tickets = []
        for number in range(1, 13):
            tickets.append(store.write("value", self.put(np.full(nbytes, number, np.uint8))))
            out = self.empty(nbytes)
            reads.append((number, out, store.read("value", out)))
        for number, out, ticket in reversed(reads):
            ticket.wait()
            assert (self.get(out) == number).all()
        for one in tickets:
            one.wait()

    def test_many_values_keep_apart(self, store: Store) -> None:
        """Names may hold anything; each has bytes of its own."""
        names = ["a", "A", "a/b", "a%2Fb", "..", "../up", "ü", "x" * 300, "x" * 299 + "y", "with space", ".chunk"]
        for at, name in enumerate(names):
            store.create(name, 5000)
            store.write(name, self.put(np.full(5000, at, np.uint8)))
        for at, name in enumerate(names):
            assert (self.read(store, name, 5000) == at).all()
        assert store.nbytes == 5000 * len(names)

    def test_a_deleted_value_is_gone(self, store: Store) -> None:
        """Its bytes are given back, and its name is free for a value that is zero again."""
        store.create("value", 10_000)
        store.write("value", self.put(np.ones(10_000, np.uint8)))
        store.delete("value")
        assert store.nbytes == 0
        with pytest.raises(CallError, match="Create it first"):
            store.read("value", self.empty(4))
        store.create("value", 100)
        assert not self.read(store, "value", 100).any()

    def test_a_checkpoint_copies_what_is_in_no_file_that_it_can_link(self, store: Store, tmp_path: Path) -> None:
        """Files that can be linked hold the value's bytes; if there are none, all of it is copied."""
        nbytes = 3 * 4096 + 5
        data = self.some(nbytes)
        store.create("value", nbytes)
        store.write("value", data).wait()
        extents = store.file_extents("value", str(tmp_path))
        stretches = [(extent, stretch) for extent in extents for stretch in extent.stretches]
        assert sum(stretch.stop - stretch.first for _, stretch in stretches) == (nbytes if extents else 0)
        assert sum(store.copied_parts(str(tmp_path))) == (0 if extents else 1)
        for extent, stretch in stretches:
            out = np.empty(stretch.stop - stretch.first, np.uint8)
            extent.read(out, stretch.offset).wait()
            np.testing.assert_array_equal(out, self.get(data)[stretch.first : stretch.stop])

    def test_wrong_values_are_refused(self, store: Store) -> None:
        """Names twice, unknown names and sizes below zero raise, and change nothing."""
        store.create("value", 10)
        wrong: list[tuple[Any, Any]] = [("value", 10), ("", 10), (7, 10), ("new", -1), ("new", 1.5), ("new", True)]
        for name, nbytes in wrong:
            with pytest.raises(CallError, match="Expected"):
                store.create(name, nbytes)
        for verb in (
            lambda: store.read("other", self.empty(1)),
            lambda: store.write("other", self.some(1)),
            lambda: store.delete("other"),
        ):
            with pytest.raises(CallError, match="'other'"):
                verb()
        assert store.nbytes == 10

    @pytest.mark.parametrize(("offset", "numel"), [(-1, 2), (9, 2), (0, 11), (11, 0)])
    def test_ranges_beyond_the_value_are_refused(self, store: Store, offset: int, numel: int) -> None:
        """A range that is not within the value raises at once."""
        store.create("value", 10)
        with pytest.raises(CallError, match="Expected a range within the 10 bytes"):
            store.read("value", self.empty(numel), offset=offset)
        with pytest.raises(CallError, match="Expected a range within the 10 bytes"):
            store.write("value", self.some(numel), offset=offset)

    def test_arrays_that_are_not_plain_are_refused(self, store: Store) -> None:
        """Strided, two-dimensional and read-only arrays raise at once, and so do lists."""
        store.create("value", 100)
        frozen = np.ones(4, np.uint8)  # arrays of the host alone can be
        frozen.flags.writeable = False
        arrays: list[Any] = [self.empty(8)[::2], self.empty(8).reshape(2, 4), [1, 2]]
        for array in arrays:
            with pytest.raises(CallError, match="1-D contiguous"):
                store.read("value", array)
            with pytest.raises(CallError, match="1-D contiguous"):
                store.write("value", array)
        with pytest.raises(CallError, match="read-only"):
            store.read("value", frozen)
        store.write("value", frozen).wait()

    def test_closing_finishes_and_then_refuses(self, store: Store) -> None:
        """Close waits for what was asked for; afterwards every verb raises; closing twice is fine."""
        store.create("value", 2_000_000)
        store.write("value", self.some(2_000_000))
        out = self.empty(2_000_000)
        ticket = store.read("value", out)
        store.close()
        store.close()
        assert np.array_equal(self.get(ticket.wait()), self.get(self.some(2_000_000)))
        assert "closed" in repr(store)
        for verb in (
            lambda: store.create("new", 1),
            lambda: store.read("value", out),
            lambda: store.write("value", out),
            lambda: store.delete("value"),
            store.flush,
        ):
            with pytest.raises(ClosedError):
                verb()
