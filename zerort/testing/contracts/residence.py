"""`ChunkedArrayContract` and `ParametersContract`: what arrays and parameters hold, wherever their bytes rest.

    class TestOnMyTier(ParametersContract):
        @pytest.fixture(scope="class")
        def backings(self):
            with open_group() as group:
                yield Backings(group, HostMemory(group), StorageSession(group, …))

Every rank runs them at once. Both go through every tier, and parameters through both placements, as far as they are
legal: what is replicated stays in the memory that computing happens in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from zerort.config import Tier
from zerort.engine.residence.backings import Backings
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray
from zerort.engine.residence.parameters import Parameters
from zerort.errors import CallError, StorageError, UnitStateError
from zerort.layout import FlatLayout, Partition, Placement
from zerort.native.dtypes import numpy_dtype
from zerort.storage.files.faults import injected
from zerort.typing import Array

__all__ = ["ChunkedArrayContract", "ParametersContract"]

_LEGAL = [(Placement.REPLICATED, Tier.DEVICE), *((Placement.SHARDED, tier) for tier in Tier)]
_CASES = pytest.mark.parametrize(
    ("placement", "tier"), _LEGAL, ids=[f"{place.name.lower()}-{tier.name.lower()}" for place, tier in _LEGAL]
)
_TIERS = pytest.mark.parametrize("tier", list(Tier), ids=[tier.name.lower() for tier in Tier])
_NAMES = itertools.count()


def _residence(tier: Tier) -> SectionResidence:
    return SectionResidence(parameter=tier, gradient=Tier.DEVICE, state=Tier.NVME)  # so that there are chunks


def _create(backings: Backings, *arrays: ChunkedArray) -> None:
    """Make what is in a store, on all ranks."""
    backings.storage.prepare(sum(array.offloaded_nbytes for array in arrays), what="contract")
    for array in arrays:
        array.create()


class ChunkedArrayContract:
    """What every `ChunkedArray` holds. Subclasses provide the fixture ``backings``."""

    numel = 5000
    """Elements on the first rank; chunks have 2048."""

    @contextlib.contextmanager
    def array(self, backings: Backings, tier: Tier, dtype: str = "float32") -> Iterator[ChunkedArray]:
        """Make an array of zeros: another length on every rank, nothing at all on the last of several."""
        group = backings.group
        numel = 0 if 0 < group.rank == group.size - 1 else self.numel - 7 * group.rank
        cuts, name = backings.cuts_of(numel, _residence(tier)), f"array {next(_NAMES)}"
        if tier in backings.reach:
            made = ChunkedArray(name, cuts, group.device.zeros(numel, dtype), device=group.device)
        else:
            made = backings.offloaded(name, cuts, dtype, tier=tier)
        _create(backings, made)
        yield made
        made.delete()

    def read(self, array: ChunkedArray, first: int, numel: int) -> Array:
        """Return elements of an array, through the device's memory."""
        out = array.device.zeros(numel, array.dtype)
        return np.array(array.device.fetch(array.read(first, out).wait()))

    @_TIERS
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_ranges_are_read_as_they_were_written(self, backings: Backings, tier: Tier, dtype: str) -> None:
        """Any range, across cuts or not, from the device's memory or the host's, like a NumPy array."""
        with self.array(backings, tier, dtype) as array:
            model = np.zeros(array.size, numpy_dtype(dtype))
            assert not self.read(array, 0, array.size).astype(np.float32).any()
            for number, (first, last) in enumerate([(0, array.size), (2047, 2049), (5, 5), (4000, array.size)], 1):
                begin, end = min(first, array.size), min(last, array.size)
                values = (np.arange(end - begin) % 50 + number).astype(model.dtype)
                model[begin:end] = values
                if number % 2:
                    array.put(begin, values)
                else:
                    there = array.device.zeros(values.size, dtype)
                    array.device.put(values, out=there)
                    array.device.synchronize()
                    array.write(begin, there).wait()
                np.testing.assert_array_equal(self.read(array, 0, array.size), model)
                np.testing.assert_array_equal(self.read(array, begin // 2, end - begin // 2), model[begin // 2 : end])

    @_TIERS
    def test_chunks_are_the_array(self, backings: Backings, tier: Tier) -> None:
        """Chunks in a row are what ranges are; a checksum is of the bytes; what is in a store is not in memory."""
        from zerort.native import crc32c

        with self.array(backings, tier) as array:
            values = np.arange(array.size, dtype=np.float32)
            array.put(0, values)
            chunks = [array.device.fetch(array.read_chunk(at)) for at in range(len(array.cuts) - 1)]
            np.testing.assert_array_equal(np.concatenate(chunks), values)
            some = array.size // 2
            assert array.checksum(some) == (crc32c(values[:some].view(np.uint8)), 4 * some)
            assert array.in_reach == (tier in backings.reach)
            assert array.is_stored == (tier is Tier.NVME)
            assert array.memory.nbytes + array.offloaded_nbytes == values.nbytes
            assert (array.memory.size == 0) == (array.is_stored or not array.size)

    @_TIERS
    def test_a_copy_of_a_chunk_is_not_its_place(self, backings: Backings, tier: Tier) -> None:
        """A chunk that is in memory is known by its address; a copy is not taken for it."""
        with self.array(backings, tier) as array:
            if array.size and not array.is_stored:
                assert array.is_resident_chunk(1, array.resident_chunk(1))
                assert not array.is_resident_chunk(1, array.resident_chunk(1).copy())
            assert not array.is_resident_chunk(0, np.empty(2048, np.float32))


class ParametersContract:
    """What all `Parameters` hold. Subclasses provide the fixture ``backings``."""

    layout = FlatLayout.build({"w": (60, 70), "b": (70,), "scale": ()}, alignment=8)
    secondary = False
    """Whether the whole stays on each host between gathers: for shards in memory only, other cases are skipped."""

    @contextlib.contextmanager
    def parameters(
        self, backings: Backings, placement: Placement, tier: Tier, *, traffic: Counter[str] | None = None
    ) -> Iterator[Parameters]:
        """Make parameters of zeros, cut unevenly; with three ranks or more the last has nothing."""
        group = backings.group
        if self.secondary and (placement is not Placement.SHARDED or tier is Tier.NVME):
            pytest.skip("second copies are of shards in memory")
        weights = [3, *[2] * (group.size - 2), 0][: group.size] if group.size > 2 else [3, 2][: group.size]
        if group.prefers_equal_counts:
            partition = Partition.build(self.layout.numel, group.size)
        else:
            partition = Partition.build(self.layout.numel, group.size, weights=weights)
        made = backings.parameters(
            self.layout,
            partition,
            placement=placement,
            residence=_residence(tier),
            name=f"parameters {next(_NAMES)}",
            traffic=traffic,
            secondary=self.secondary,
        )
        _create(backings, made.array)
        yield made
        group.barrier().wait()  # nobody looks at it any more
        made.array.delete()
        made.close()

    def values(self, seed: int) -> dict[str, Array]:
        """Return a tensor for each name, the same on every rank."""
        rng = np.random.default_rng(seed)
        return {one.name: rng.standard_normal(one.shape).astype(np.float32) for one in self.layout.extents}

    def room(self, backings: Backings, made: Parameters) -> Any:
        """Return memory for the whole, of which all ranks of a node have the same if they share memory; or None."""
        if not made.needs_room:
            return None
        group = backings.group
        return group.zeros_shared([made.layout.numel] + [0] * (group.size - 1), made.dtype, name="room").full

    def assign(self, backings: Backings, made: Parameters, values: dict[str, Array]) -> None:
        """Write values on all ranks, and wait until all have."""
        made.assign(values)
        made.changed()
        backings.group.device.synchronize()
        backings.group.barrier().wait()

    def gather(self, backings: Backings, made: Parameters, out: Any) -> dict[str, Array]:
        """Return all tensors as they are gathered."""
        made.start(out)
        assert made.local_error() is None
        backings.group.barrier().wait()
        backings.group.device.order_after(made.finish())
        fetch = backings.group.device.fetch
        return {one.name: np.array(fetch(made.view(one.name))) for one in self.layout.extents}

    def expect(self, found: dict[str, Array], values: dict[str, Array]) -> None:
        """Compare tensors to the bit."""
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)

    @_CASES
    def test_the_whole_is_what_was_assigned(self, backings: Backings, placement: Placement, tier: Tier) -> None:
        """Also after some tensors are assigned anew. Padding stays zero, and at rest there are a rank's bytes."""
        with self.parameters(backings, placement, tier) as made:
            out, values = self.room(backings, made), self.values(1)
            self.assign(backings, made, values)
            for number in range(3):
                self.expect(self.gather(backings, made, out), values)
                whole = backings.group.device.fetch(made.whole)
                used = sum(one.numel for one in self.layout.extents)
                assert np.count_nonzero(whole) <= used
                backings.group.barrier().wait()
                made.release()
                values["b"] = np.full(70, float(number), np.float32)
                self.assign(backings, made, {"b": values["b"]})
            own = made.partition.of(backings.group.rank)
            held = self.layout.numel if placement is Placement.REPLICATED else own.numel
            assert made.nbytes == (0 if tier is Tier.NVME else 4 * held)
            assert made.array.offloaded_nbytes == (4 * own.numel if tier is Tier.NVME else 0)

    @_CASES
    def test_ranges_that_ranks_write_reach_the_others(
        self, backings: Backings, placement: Placement, tier: Tier
    ) -> None:
        """As an update does: each rank writes its own range, and says so."""
        traffic: Counter[str] = Counter()
        group = backings.group
        with self.parameters(backings, placement, tier, traffic=traffic) as made:
            out = self.room(backings, made)
            own = made.partition.of(group.rank)
            made.shard.put(0, np.arange(own.first, own.stop, dtype=np.float32))
            made.changed()
            group.device.synchronize()
            group.barrier().wait()
            self.gather(backings, made, out)
            np.testing.assert_array_equal(group.device.fetch(made.whole), np.arange(self.layout.numel))
            gathers = group.size > 1 and not (placement is Placement.SHARDED and group.one_memory)
            assert traffic["all_gather"] == (4 * self.layout.end if gathers else 0)
            group.barrier().wait()

    @_CASES
    def test_one_may_run_ahead_of_the_other(self, backings: Backings, placement: Placement, tier: Tier) -> None:
        """Two are started, in the same order on every rank, before the first is finished; starting twice is once."""
        with (
            self.parameters(backings, placement, tier) as first,
            self.parameters(backings, placement, tier) as second,
        ):
            rooms = [self.room(backings, one) for one in (first, second)]
            for seed, one in enumerate((first, second)):
                self.assign(backings, one, self.values(seed))
            begun = [one.start(out) for one, out in zip((first, second), rooms, strict=True)]
            assert second.start(rooms[1]) is begun[1]
            self.expect(self.gather(backings, first, rooms[0]), self.values(0))
            self.expect(self.gather(backings, second, rooms[1]), self.values(1))

    @_CASES
    def test_what_is_released_is_not_looked_at(self, backings: Backings, placement: Placement, tier: Tier) -> None:
        """Where the whole is apart from what rests, views of it end with the release; else it stays."""
        with self.parameters(backings, placement, tier) as made:
            out = self.room(backings, made)
            self.gather(backings, made, out)
            backings.group.barrier().wait()
            made.release()
            if made.needs_room:
                with pytest.raises(UnitStateError, match="to be gathered before it is looked at"):
                    made.view("w")
            else:
                assert made.view("w").shape == (60, 70)
            made.wait()

    @_CASES
    def test_other_shapes_are_refused(self, backings: Backings, placement: Placement, tier: Tier) -> None:
        """Tensors are as the layout says, wherever they go."""
        with self.parameters(backings, placement, tier) as made:
            with pytest.raises(CallError, match=r"Expected 'b' as float32\[70\], got float64\[70\]"):
                made.assign({"b": np.ones(70)})
            with pytest.raises(CallError, match=r"Expected 'b' as float32\[70\], got float32\[71\]"):
                made.assign({"b": np.ones(71, np.float32)})

    @_CASES
    def test_an_error_is_of_one_rank_alone(self, backings: Backings, placement: Placement, tier: Tier) -> None:
        """A disk that fails on rank 0 is no other rank's error; after a release they begin anew."""
        group = backings.group
        with self.parameters(backings, placement, tier) as made:
            out = self.room(backings, made)
            self.assign(backings, made, self.values(3))
            assert made.can_fail == (tier is Tier.NVME)
            with injected("eio@1:op=read:times=all") if group.rank == 0 else contextlib.nullcontext():
                made.start(out)
                error = made.local_error()
            group.barrier().wait()
            if made.can_fail and group.rank == 0:
                assert isinstance(error, StorageError)
                assert "rank 0" in str(error)
            else:
                assert error is None
            if made.can_fail:
                made.release()
            self.expect(self.gather(backings, made, out), self.values(3))
