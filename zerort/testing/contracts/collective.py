"""`CollectiveContract`: what every collective delivers, whatever carries its bytes. Part of `GroupContract`.

The data are small whole numbers that depend on rank and place, so every dtype sums them exactly and a byte from the
wrong rank or the wrong place shows. A transport of a device's arrays overrides `put`; the host's travel as well then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerort.comm import Group
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["CollectiveContract", "OnRanks", "assert_same", "pattern"]

OnRanks = Callable[[Callable[[Group], None]], Any]

REDUCIBLE = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint32"]
SIZES = [0, 1, 7, 1000, 50_021]
"""Elements per rank: none, one, a few, under and over a staging slab of a few pages."""


def pattern(rank: int, numel: int, dtype: Any = "float32") -> Array:
    """Return ``numel`` small whole numbers that tell their rank and place."""
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    values: Array = ((np.arange(numel) * 7 + rank * 3) % 11 + 1).astype(kind)
    return values


def reduced(size: int, numel: int, dtype: Any = "float32", reduction: str = "sum") -> Array:
    """Return the reduction of every rank's pattern."""
    rows = np.stack([pattern(rank, numel, "int64") for rank in range(size)])
    values: Array = {"sum": rows.sum(0), "max": rows.max(0), "min": rows.min(0)}[reduction]
    return values.astype(pattern(0, 0, dtype).dtype)


def uneven(numel: int, size: int) -> tuple[int, ...]:
    """Cut ``numel`` into counts of which one is empty and the others differ."""
    weights = [rank % 3 for rank in range(size)]
    return Partition.build(numel, size, weights=weights if any(weights) else None).counts


def assert_same(found: Any, expected: Array) -> None:
    """Assert equality in dtype, shape and every bit; ``found`` may lie on a device."""
    found = found if isinstance(found, np.ndarray) else found.get()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


class CollectiveContract:
    """What every collective delivers. Subclasses provide the fixture ``on_ranks``."""

    def put(self, array: Array) -> Any:
        """Return ``array`` where the group's arrays lie."""
        return array

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
    def test_all_gather_puts_shards_side_by_side(self, on_ranks: OnRanks, numel: int, dtype: str) -> None:
        """Every rank's shard stands at its place on every rank."""

        def body(group: Group) -> None:
            expected = np.concatenate([pattern(rank, numel, dtype) for rank in range(group.size)])
            mine = self.put(pattern(group.rank, numel, dtype))
            assert_same(group.all_gather(mine).wait(), expected)
            out = self.put(np.zeros_like(expected))
            assert group.all_gather(mine, out=out).wait() is out
            assert_same(out, expected)
            out[:] = 0
            place = out[group.rank * numel :][:numel]
            place.view(np.uint8)[:] = mine.view(np.uint8)  # CuPy 13 has no kernels for bfloat16
            group.all_gather(place, out=out).wait()  # in place
            assert_same(out, expected)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 5, 1000, 100_003])
    def test_all_gather_takes_uneven_counts(self, on_ranks: OnRanks, numel: int) -> None:
        """Uneven and empty shards are ordinary."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            expected = np.concatenate([pattern(rank, count) for rank, count in enumerate(counts)])
            mine = self.put(pattern(group.rank, counts[group.rank]))
            assert_same(group.all_gather(mine, counts=counts).wait(), expected)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [1, 1000, 100_003])
    def test_all_gather_in_shared_memory(self, on_ranks: OnRanks, numel: int) -> None:
        """A shared gathered array shows every shard after a gather, round after round."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            shards = group.zeros_shared(counts, "float32")
            assert shards.full.size == numel
            assert shards.mine.size == counts[group.rank]
            for step in range(3):
                shards.mine[:] = self.put(pattern(group.rank + step, counts[group.rank]))
                group.all_gather(shards.mine, out=shards.full, counts=counts).wait()
                expected = np.concatenate([pattern(rank + step, count) for rank, count in enumerate(counts)])
                assert_same(shards.full.copy(), expected)
                group.barrier().wait()  # everybody has looked before anyone writes again
            own = self.put(pattern(group.rank + 9, counts[group.rank]))
            group.all_gather(own, out=shards.full, counts=counts).wait()  # from elsewhere into the shared array
            assert_same(shards.full.copy(), np.concatenate([pattern(r + 9, count) for r, count in enumerate(counts)]))
            group.barrier().wait()
            group.free(shards.full)

        on_ranks(body)

    @pytest.mark.parametrize("dtype", REDUCIBLE)
    @pytest.mark.parametrize("reduction", ["sum", "max", "min"])
    def test_reductions_in_every_dtype(self, on_ranks: OnRanks, dtype: str, reduction: str) -> None:
        """reduce_scatter, all_reduce and reduce give the exact result."""

        def body(group: Group) -> None:
            numel = 1003 * group.size
            source, whole = self.put(pattern(group.rank, numel, dtype)), reduced(group.size, numel, dtype, reduction)
            first = 1003 * group.rank
            found = group.reduce_scatter(source, reduction=reduction).wait()
            assert_same(found, whole[first : first + 1003])
            assert_same(group.all_reduce(source, reduction=reduction).wait(), whole)
            at_root = group.reduce(source, root=group.size - 1, reduction=reduction).wait()
            if group.rank == group.size - 1:
                assert at_root is not None
                assert_same(at_root, whole)
            else:
                assert at_root is None
            assert_same(source, pattern(group.rank, numel, dtype))  # the source is as it was

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 1, 7, 1000, 100_003, 700_001])
    @pytest.mark.parametrize("where", ["own", "window"])
    def test_reduce_scatter_of_any_size_and_place(self, on_ranks: OnRanks, numel: int, where: str) -> None:
        """Uneven ranges; arrays of one's own and from `zeros`; out of place and in place."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            source = group.zeros(numel, "float32") if where == "window" else self.put(np.empty(numel, np.float32))
            source[:] = self.put(pattern(group.rank, numel))
            first = sum(counts[: group.rank])
            expected = reduced(group.size, numel)[first : first + counts[group.rank]]
            assert_same(group.reduce_scatter(source, counts=counts).wait(), expected)
            place = source[first : first + counts[group.rank]]
            group.reduce_scatter(source, out=place, counts=counts).wait()
            assert_same(place.copy(), expected)
            if where == "window":
                group.free(source)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 1, 7, 1000, 100_003, 700_001])
    @pytest.mark.parametrize("where", ["own", "window", "mixed", "shared"])
    def test_all_reduce_of_any_size_and_place(self, on_ranks: OnRanks, numel: int, where: str) -> None:
        """Arrays of one's own, from `zeros`, some of each, and one shared result; out of place and in place."""

        def body(group: Group) -> None:
            window = group.zeros(numel, "float32")
            own = self.put(np.empty(numel, np.float32))
            in_window = where == "window" or (where == "mixed" and group.rank % 2 == 0)
            source = window if in_window else own
            source[:] = self.put(pattern(group.rank, numel))
            expected = reduced(group.size, numel)
            if where == "shared":
                out = group.zeros_shared([numel] + [0] * (group.size - 1), "float32").full
                group.all_reduce(source, out=out).wait()
                assert_same(out.copy(), expected)
                group.barrier().wait()
                group.free(out)
            else:
                assert_same(group.all_reduce(source).wait(), expected)
                assert group.all_reduce(source, out=source).wait() is source
                assert_same(source.copy(), expected)
            group.free(window)

        on_ranks(body)

    def test_arrays_keep_their_shape(self, on_ranks: OnRanks) -> None:
        """A result made for the caller has the source's shape; one that the caller gave is returned as it is."""

        def body(group: Group) -> None:
            source = self.put(pattern(group.rank, 24).reshape(2, 3, 4))
            assert group.all_reduce(source).wait().shape == (2, 3, 4)
            assert group.broadcast(source.copy(), root=0).wait().shape == (2, 3, 4)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 3, 1000, 100_003])
    def test_broadcast_and_reduce_from_every_root(self, on_ranks: OnRanks, numel: int) -> None:
        """Root's array arrives everywhere; the reduction arrives at root and nowhere else."""

        def body(group: Group) -> None:
            for root in range(group.size):
                array = self.put(pattern(group.rank, numel))
                group.broadcast(array, root=root).wait()
                assert_same(array, pattern(root, numel))
                out = self.put(np.zeros(numel, np.float32))
                source = self.put(pattern(group.rank, numel))
                group.reduce(source, root=root, out=out).wait()
                assert_same(out, reduced(group.size, numel) if group.rank == root else np.zeros(numel, np.float32))

        on_ranks(body)

    @pytest.mark.parametrize("share", [0, 1, 100, 30_011])
    def test_all_to_all_evenly(self, on_ranks: OnRanks, share: int) -> None:
        """Every rank gets its part of everybody's array, in rank order."""

        def body(group: Group) -> None:
            source = np.concatenate([pattern(group.rank * 10 + to, share) for to in range(group.size)])
            expected = np.concatenate([pattern(by * 10 + group.rank, share) for by in range(group.size)])
            assert_same(group.all_to_all(self.put(source)).wait(), expected)

        on_ranks(body)

    def test_all_to_all_by_a_matrix(self, on_ranks: OnRanks) -> None:
        """Uneven and empty parts, on every rank the same matrix."""

        def body(group: Group) -> None:
            ranks = range(group.size)
            matrix = [[(3 * s + d) % 4 * 1000 for d in ranks] for s in ranks]
            source = np.concatenate([pattern(group.rank + d, matrix[group.rank][d]) for d in ranks])
            expected = np.concatenate([pattern(s + group.rank, matrix[s][group.rank]) for s in ranks])
            assert_same(group.all_to_all(self.put(source), counts=matrix).wait(), expected)

        on_ranks(body)

    def test_barrier_holds_everyone_back(self, on_ranks: OnRanks) -> None:
        """What a rank wrote before a barrier, all see after it."""

        def body(group: Group) -> None:
            board = group.zeros_shared([1] * group.size, "int64")
            for step in range(1, 20):
                board.mine[0] = step
                if group.one_memory:
                    group.barrier().wait()
                else:
                    group.all_gather(board.mine, out=board.full).wait()
                assert board.full.tolist() == [step] * group.size
                group.barrier().wait()

        on_ranks(body)

    def test_tickets_in_flight_keep_their_order(self, on_ranks: OnRanks) -> None:
        """Many calls under way at once, waited for in another order, each give their own result."""

        def body(group: Group) -> None:
            sizes = [5, 200_003, 64, 90_001, 1]
            sources = [self.put(pattern(group.rank + k, numel)) for k, numel in enumerate(sizes)]
            tickets = [group.all_reduce(source, name=f"bucket {k}") for k, source in enumerate(sources)]
            gathered = group.all_gather(np.array([group.rank]))
            assert_same(gathered.wait(), np.arange(group.size))
            for k in reversed(range(len(sizes))):
                expected = np.stack([pattern(rank + k, sizes[k]) for rank in range(group.size)]).sum(0)
                assert_same(tickets[k].wait(), expected.astype(np.float32))
                assert tickets[k].done()

        on_ranks(body)

    def test_a_random_programme_equals_numpy(self, on_ranks: OnRanks) -> None:
        """Sixty collectives drawn by lot, over arrays of all kinds, against plain NumPy."""

        def body(group: Group) -> None:
            lot = np.random.default_rng(7)  # the same on every rank
            window = group.zeros(40_000, "float32")
            for _ in range(60):
                numel = int(lot.choice([1, 17, 4096, 20_000, 40_000]))
                seed = int(lot.integers(1000))
                rows = [pattern(rank + seed, numel) for rank in range(group.size)]
                source = window[:numel] if lot.integers(2) else self.put(np.empty(numel, np.float32))
                source[:] = self.put(rows[group.rank])
                verb = str(lot.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]))
                counts = Partition.build(numel, group.size, weights=lot.integers(1, 5, group.size).tolist()).counts
                first = sum(counts[: group.rank])
                if verb == "all_reduce":
                    assert_same(group.all_reduce(source).wait(), np.stack(rows).sum(0))
                elif verb == "reduce_scatter":
                    expected = np.stack(rows).sum(0)[first : first + counts[group.rank]]
                    assert_same(group.reduce_scatter(source, counts=counts).wait(), expected)
                elif verb == "all_gather":
                    expected = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
                    mine = source[: counts[group.rank]]
                    assert_same(group.all_gather(mine, counts=counts).wait(), expected)
                else:
                    root = int(lot.integers(group.size))
                    group.broadcast(source, root=root).wait()
                    assert_same(source.copy(), rows[root])

        on_ranks(body)

    def test_sums_are_deterministic(self, on_ranks: OnRanks) -> None:
        """The same floats summed twice give the same bits on every rank: those of rank order, if one host sums them."""

        def body(group: Group) -> None:
            rows = [
                np.random.default_rng(rank).standard_normal(30_000).astype(np.float32) for rank in range(group.size)
            ]
            source = self.put(rows[group.rank])
            first = group.all_reduce(source).wait()
            if group.kind not in ("hierarchical", "nccl"):
                expected = rows[0].copy()
                for row in rows[1:]:
                    expected += row
                assert_same(first, expected)
                share = 30_000 // group.size
                scattered = group.reduce_scatter(source[: share * group.size]).wait()
                assert_same(scattered, expected[share * group.rank :][:share])
            again = group.all_reduce(source).wait()
            assert again.tobytes() == first.tobytes()
            root = first.copy()
            group.broadcast(root, root=0).wait()
            assert first.tobytes() == root.tobytes()

        on_ranks(body)

    def test_split_by_color_and_key(self, on_ranks: OnRanks) -> None:
        """A part has the ranks of one color in the order of their keys, and talks by itself."""

        def body(group: Group) -> None:
            part = group.split(group.rank % 2, key=-group.rank, name="part")
            assert part is not None
            members = [rank for rank in reversed(range(group.size)) if rank % 2 == group.rank % 2]
            assert (part.rank, part.size) == (members.index(group.rank), len(members))
            assert_same(part.all_gather(np.array([group.rank])).wait(), np.array(members))
            for numel in (10, 100_000):
                total = part.all_reduce(self.put(pattern(group.rank, numel, "int64"))).wait()
                assert_same(total, np.stack([pattern(rank, numel, "int64") for rank in members]).sum(0))
            part.close()
            none = group.split(None if group.rank else 0)
            assert (none is None) == (group.rank > 0)
            group.barrier().wait()

        on_ranks(body)
