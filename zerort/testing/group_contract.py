"""`GroupContract`: what every group holds, whatever carries its bytes. A transport exists when it passes this.

    class TestMine(GroupContract):
        @pytest.fixture
        def on_ranks(self):
            return lambda body: run_threads(4, body)      # calls body(group) on every rank of a fresh group

The data are small whole numbers that depend on rank and place, so every dtype sums them exactly and a byte from the
wrong rank or the wrong place shows. May import: comm, pytest.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zerort.comm import Group
from zerort.errors import CallError, ClosedError, CollectiveMismatchError
from zerort.layout import Partition
from zerort.typing import Array

__all__ = ["GroupContract", "OnRanks", "pattern"]

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


def same(found: Array, expected: Array) -> None:
    """Assert equality in dtype, shape and every bit."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


class GroupContract:
    """What every group holds. Subclasses provide the fixture ``on_ranks``."""

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
    def test_all_gather_puts_shards_side_by_side(self, on_ranks: OnRanks, numel: int, dtype: str) -> None:
        """Every rank's shard stands at its place on every rank."""

        def body(group: Group) -> None:
            expected = np.concatenate([pattern(rank, numel, dtype) for rank in range(group.size)])
            mine = pattern(group.rank, numel, dtype)
            same(group.all_gather(mine).wait(), expected)
            out = np.zeros_like(expected)
            assert group.all_gather(mine, out=out).wait() is out
            same(out, expected)
            out[:] = 0
            place = out[group.rank * numel :][:numel]
            place[:] = mine
            group.all_gather(place, out=out).wait()  # in place
            same(out, expected)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 5, 1000, 100_003])
    def test_all_gather_takes_uneven_counts(self, on_ranks: OnRanks, numel: int) -> None:
        """Uneven and empty shards are ordinary."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            expected = np.concatenate([pattern(rank, count) for rank, count in enumerate(counts)])
            same(group.all_gather(pattern(group.rank, counts[group.rank]), counts=counts).wait(), expected)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [1, 1000, 100_003])
    def test_all_gather_in_shared_memory(self, on_ranks: OnRanks, numel: int) -> None:
        """A shared gathered array shows every shard after a gather, round after round."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            shards = group.empty_shared(counts, "float32")
            assert shards.full.size == numel
            assert shards.mine.size == counts[group.rank]
            for step in range(3):
                shards.mine[:] = pattern(group.rank + step, counts[group.rank])
                group.all_gather(shards.mine, out=shards.full, counts=counts).wait()
                expected = np.concatenate([pattern(rank + step, count) for rank, count in enumerate(counts)])
                same(shards.full.copy(), expected)
                group.barrier().wait()  # everybody has looked before anyone writes again
            own = pattern(group.rank + 9, counts[group.rank])
            group.all_gather(own, out=shards.full, counts=counts).wait()  # from elsewhere into the shared array
            same(shards.full.copy(), np.concatenate([pattern(r + 9, count) for r, count in enumerate(counts)]))
            group.barrier().wait()
            group.free(shards.full)

        on_ranks(body)

    @pytest.mark.parametrize("dtype", REDUCIBLE)
    @pytest.mark.parametrize("reduction", ["sum", "max", "min"])
    def test_reductions_in_every_dtype(self, on_ranks: OnRanks, dtype: str, reduction: str) -> None:
        """reduce_scatter, all_reduce and reduce give the exact result."""

        def body(group: Group) -> None:
            numel = 1003 * group.size
            source, whole = pattern(group.rank, numel, dtype), reduced(group.size, numel, dtype, reduction)
            first = 1003 * group.rank
            found = group.reduce_scatter(source, reduction=reduction).wait()
            same(found, whole[first : first + 1003])
            same(group.all_reduce(source, reduction=reduction).wait(), whole)
            at_root = group.reduce(source, root=group.size - 1, reduction=reduction).wait()
            if group.rank == group.size - 1:
                assert at_root is not None
                same(at_root, whole)
            else:
                assert at_root is None
            same(source, pattern(group.rank, numel, dtype))  # the source is as it was

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 1, 7, 1000, 100_003, 700_001])
    @pytest.mark.parametrize("where", ["own", "window"])
    def test_reduce_scatter_of_any_size_and_place(self, on_ranks: OnRanks, numel: int, where: str) -> None:
        """Uneven ranges; arrays of one's own and from `empty`; out of place and in place."""

        def body(group: Group) -> None:
            counts = uneven(numel, group.size)
            source = group.empty(numel, "float32") if where == "window" else np.empty(numel, np.float32)
            source[:] = pattern(group.rank, numel)
            first = sum(counts[: group.rank])
            expected = reduced(group.size, numel)[first : first + counts[group.rank]]
            same(group.reduce_scatter(source, counts=counts).wait(), expected)
            place = source[first : first + counts[group.rank]]
            group.reduce_scatter(source, out=place, counts=counts).wait()
            same(place.copy(), expected)
            if where == "window":
                group.free(source)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 1, 7, 1000, 100_003, 700_001])
    @pytest.mark.parametrize("where", ["own", "window", "mixed", "shared"])
    def test_all_reduce_of_any_size_and_place(self, on_ranks: OnRanks, numel: int, where: str) -> None:
        """Arrays of one's own, from `empty`, some of each, and one shared result; out of place and in place."""

        def body(group: Group) -> None:
            window = group.empty(numel, "float32")
            own = np.empty(numel, np.float32)
            in_window = where == "window" or (where == "mixed" and group.rank % 2 == 0)
            source = window if in_window else own
            source[:] = pattern(group.rank, numel)
            expected = reduced(group.size, numel)
            if where == "shared":
                out = group.empty_shared([numel] + [0] * (group.size - 1), "float32").full
                group.all_reduce(source, out=out).wait()
                same(out.copy(), expected)
                group.barrier().wait()
                group.free(out)
            else:
                same(group.all_reduce(source).wait(), expected)
                assert group.all_reduce(source, out=source).wait() is source
                same(source.copy(), expected)
            group.free(window)

        on_ranks(body)

    def test_arrays_keep_their_shape(self, on_ranks: OnRanks) -> None:
        """A result made for the caller has the source's shape; one that the caller gave is returned as it is."""

        def body(group: Group) -> None:
            source = pattern(group.rank, 24).reshape(2, 3, 4)
            assert group.all_reduce(source).wait().shape == (2, 3, 4)
            assert group.broadcast(source.copy(), root=0).wait().shape == (2, 3, 4)

        on_ranks(body)

    @pytest.mark.parametrize("numel", [0, 3, 1000, 100_003])
    def test_broadcast_and_reduce_from_every_root(self, on_ranks: OnRanks, numel: int) -> None:
        """Root's array arrives everywhere; the reduction arrives at root and nowhere else."""

        def body(group: Group) -> None:
            for root in range(group.size):
                array = pattern(group.rank, numel)
                group.broadcast(array, root=root).wait()
                same(array, pattern(root, numel))
                out = np.zeros(numel, np.float32)
                source = pattern(group.rank, numel)
                group.reduce(source, root=root, out=out).wait()
                same(out, reduced(group.size, numel) if group.rank == root else np.zeros(numel, np.float32))

        on_ranks(body)

    @pytest.mark.parametrize("share", [0, 1, 100, 30_011])
    def test_all_to_all_evenly(self, on_ranks: OnRanks, share: int) -> None:
        """Every rank gets its part of everybody's array, in rank order."""

        def body(group: Group) -> None:
            source = np.concatenate([pattern(group.rank * 10 + to, share) for to in range(group.size)])
            expected = np.concatenate([pattern(by * 10 + group.rank, share) for by in range(group.size)])
            same(group.all_to_all(source).wait(), expected)

        on_ranks(body)

    def test_all_to_all_by_a_matrix(self, on_ranks: OnRanks) -> None:
        """Uneven and empty parts, on every rank the same matrix."""

        def body(group: Group) -> None:
            ranks = range(group.size)
            matrix = [[(3 * s + d) % 4 * 1000 for d in ranks] for s in ranks]
            source = np.concatenate([pattern(group.rank + d, matrix[group.rank][d]) for d in ranks])
            expected = np.concatenate([pattern(s + group.rank, matrix[s][group.rank]) for s in ranks])
            same(group.all_to_all(source, counts=matrix).wait(), expected)

        on_ranks(body)

    def test_barrier_holds_everyone_back(self, on_ranks: OnRanks) -> None:
        """What a rank wrote before a barrier, all see after it."""

        def body(group: Group) -> None:
            board = group.empty_shared([1] * group.size, "int64")
            for step in range(1, 20):
                board.mine[0] = step
                if group.kind in ("mpi", "hierarchical"):
                    group.all_gather(board.mine, out=board.full).wait()
                else:
                    group.barrier().wait()
                assert board.full.tolist() == [step] * group.size
                group.barrier().wait()

        on_ranks(body)

    def test_tickets_in_flight_keep_their_order(self, on_ranks: OnRanks) -> None:
        """Many calls under way at once, waited for in another order, each give their own result."""

        def body(group: Group) -> None:
            sizes = [5, 200_003, 64, 90_001, 1]
            sources = [pattern(group.rank + k, numel) for k, numel in enumerate(sizes)]
            tickets = [group.all_reduce(source, name=f"bucket {k}") for k, source in enumerate(sources)]
            gathered = group.all_gather(np.array([group.rank]))
            same(gathered.wait(), np.arange(group.size))
            for k in reversed(range(len(sizes))):
                expected = np.stack([pattern(rank + k, sizes[k]) for rank in range(group.size)]).sum(0)
                same(tickets[k].wait(), expected.astype(np.float32))
                assert tickets[k].done()

        on_ranks(body)

    def test_a_random_programme_equals_numpy(self, on_ranks: OnRanks) -> None:
        """Sixty collectives drawn by lot, over arrays of all kinds, against plain NumPy."""

        def body(group: Group) -> None:
            lot = np.random.default_rng(7)  # the same on every rank
            window = group.empty(40_000, "float32")
            for _ in range(60):
                numel = int(lot.choice([1, 17, 4096, 20_000, 40_000]))
                seed = int(lot.integers(1000))
                rows = [pattern(rank + seed, numel) for rank in range(group.size)]
                source = window[:numel] if lot.integers(2) else np.empty(numel, np.float32)
                source[:] = rows[group.rank]
                verb = str(lot.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]))
                counts = Partition.build(numel, group.size, weights=lot.integers(1, 5, group.size).tolist()).counts
                first = sum(counts[: group.rank])
                if verb == "all_reduce":
                    same(group.all_reduce(source).wait(), np.stack(rows).sum(0))
                elif verb == "reduce_scatter":
                    expected = np.stack(rows).sum(0)[first : first + counts[group.rank]]
                    same(group.reduce_scatter(source, counts=counts).wait(), expected)
                elif verb == "all_gather":
                    expected = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
                    mine = source[: counts[group.rank]]
                    same(group.all_gather(mine, counts=counts).wait(), expected)
                else:
                    root = int(lot.integers(group.size))
                    group.broadcast(source, root=root).wait()
                    same(source.copy(), rows[root])

        on_ranks(body)

    def test_sums_are_deterministic(self, on_ranks: OnRanks) -> None:
        """The same floats summed twice give the same bits on every rank: those of rank order, within one host."""

        def body(group: Group) -> None:
            rows = [
                np.random.default_rng(rank).standard_normal(30_000).astype(np.float32) for rank in range(group.size)
            ]
            source = rows[group.rank]
            first = group.all_reduce(source).wait()
            if group.kind != "hierarchical":
                expected = rows[0].copy()
                for row in rows[1:]:
                    expected += row
                same(first, expected)
                share = 30_000 // group.size
                scattered = group.reduce_scatter(source[: share * group.size]).wait()
                same(scattered, expected[share * group.rank :][:share])
            same(group.all_reduce(source).wait(), first)
            root = first.copy()
            group.broadcast(root, root=0).wait()
            same(first, root)

        on_ranks(body)

    def test_split_by_color_and_key(self, on_ranks: OnRanks) -> None:
        """A part has the ranks of one color in the order of their keys, and talks by itself."""

        def body(group: Group) -> None:
            part = group.split(group.rank % 2, key=-group.rank, name="part")
            assert part is not None
            members = [rank for rank in reversed(range(group.size)) if rank % 2 == group.rank % 2]
            assert (part.rank, part.size) == (members.index(group.rank), len(members))
            same(part.all_gather(np.array([group.rank])).wait(), np.array(members))
            for numel in (10, 100_000):
                total = part.all_reduce(pattern(group.rank, numel, "int64")).wait()
                same(total, np.stack([pattern(rank, numel, "int64") for rank in members]).sum(0))
            part.close()
            none = group.split(None if group.rank else 0)
            assert (none is None) == (group.rank > 0)
            group.barrier().wait()

        on_ranks(body)

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_gather(np.ones(4))),
            (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(5))),
            (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(4, np.float32))),
            (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(4), reduction="max")),
            (lambda g: g.all_reduce(np.ones(4), name="loss"), lambda g: g.all_reduce(np.ones(4), name="norm")),
            (lambda g: g.broadcast(np.ones(4)), lambda g: g.broadcast(np.ones(4), root=1)),
            (lambda g: g.barrier(), lambda g: g.all_reduce(np.ones(4))),
            (lambda g: g.all_reduce(np.ones(300_000)), lambda g: g.all_reduce(np.ones(300_001))),
        ],
        ids=["op", "count", "dtype", "reduction", "name", "root", "barrier", "large"],
    )
    def test_different_calls_are_told_apart(
        self, on_ranks: OnRanks, left: Callable[[Group], Any], right: Callable[[Group], Any]
    ) -> None:
        """Ranks that disagree all raise the same error, with both calls and sites; the group stays usable."""

        def body(group: Group) -> None:
            if group.size == 1:
                left(group).wait()
                assert group.rank == 0
                return
            odd = group.rank == group.size - 1
            with pytest.raises(CollectiveMismatchError) as caught:
                (right if odd else left)(group).wait()
            text = str(caught.value)
            rows = re.findall(r"^  ranks? ([\d, ]+): (\w+)\((.*)\).* at \S+group_contract\.py:\d+$", text, re.MULTILINE)
            assert [ranks for ranks, _, _ in rows] == [
                ", ".join(map(str, range(group.size - 1))),
                str(group.size - 1),
            ]
            everyone = gather_text(group, text)
            assert set(everyone) == {text}
            same(group.all_reduce(np.ones(3)).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    def test_uneven_counts_must_agree(self, on_ranks: OnRanks) -> None:
        """Counts of the same sum that differ between ranks are a mismatch, not a wrong result."""

        def body(group: Group) -> None:
            if group.size == 1:
                assert group.rank == 0
                return
            counts = [1] * group.size
            if group.rank == 0:
                counts = [0, 2] + [1] * (group.size - 2)
            with pytest.raises(CollectiveMismatchError, match="counts="):
                group.reduce_scatter(np.ones(group.size), counts=counts).wait()

        on_ranks(body)

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda g: g.all_reduce([1.0, 2.0]), "numpy.ndarray"),
            (lambda g: g.all_reduce(np.ones((4, 4)).T[:2]), "contiguous"),
            (lambda g: g.all_reduce(np.ones(4, np.complex64)), "can be reduced"),
            (lambda g: g.all_reduce(np.ones(4), reduction="mean"), "sum, max, min"),
            (lambda g: g.all_reduce(np.ones(4), out=np.ones(5)), "4 elements, got 5"),
            (lambda g: g.all_reduce(np.ones(4), out=np.ones(4, np.float32)), "dtype float64"),
            (lambda g: g.all_reduce(np.ones(4), out=np.frombuffer(bytes(32))), "read-only"),
            (lambda g: g.all_gather(np.ones(4), counts=[4] * (g.size + 1)), "one per rank"),
            (lambda g: g.all_gather(np.ones(4), counts=[3] * g.size), "4"),
            (lambda g: g.reduce_scatter(np.ones(g.size + 1)), "evenly"),
            (lambda g: g.reduce_scatter(np.ones(4), counts=[-1] * g.size), "counts ≥ 0"),
            (lambda g: g.broadcast(np.ones(4), root=g.size), "root"),
            (lambda g: g.all_to_all(np.ones(g.size * 3 + 1)), "equal parts"),
            (lambda g: g.all_to_all(np.ones(4), counts=[[1]] * (g.size + 1)), "row"),
            (lambda g: (lambda x: g.all_reduce(x[:4], out=x[2:6]))(np.ones(8)), "share no memory"),
            (lambda g: g.all_reduce(np.array([object()])), "numbers"),
            (lambda g: g.all_reduce(np.ones(4, ">f8")), "foreign byte order"),
            (lambda g: g.all_reduce(np.zeros(33, np.uint8)[1:].view(np.float64)), "unaligned"),
            (lambda g: g.all_gather(np.ones(4), counts=np.ones(10_000, int)), "one per rank"),
            (lambda g: g.all_reduce(np.ones(4), reduction=["sum"]), "sum, max, min"),
        ],
        ids=[
            "list", "strided", "complex", "reduction", "out-size", "out-dtype", "read-only", "counts-length",
            "counts-mine", "uneven", "negative", "root", "parts", "matrix", "overlap", "object", "byte-order",
            "unaligned", "long-story", "unhashable",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("who", ["all", "last"])
    def test_wrong_arguments_fail_on_every_rank(
        self, on_ranks: OnRanks, call: Callable[[Group], Any], match: str, who: str
    ) -> None:
        """A wrong argument, on one rank or on all, is the same CallError on every rank; the group stays usable."""

        def body(group: Group) -> None:
            wrong = who == "all" or group.rank == group.size - 1
            if group.size == 1 and match in ("evenly", "equal parts"):
                assert call(group).wait().size  # one rank can share anything evenly
                return
            with pytest.raises(CallError, match=match) as caught:
                (call(group) if wrong else group.all_reduce(np.ones(4))).wait()
            texts = gather_text(group, str(caught.value))
            assert set(texts) == {str(caught.value)}
            same(group.all_reduce(np.ones(3)).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    @pytest.mark.parametrize(
        "call",
        [
            lambda g: g.empty(4, "float12"),
            lambda g: g.empty(-1, "float32"),
            lambda g: g.empty("many", "float32"),
            lambda g: g.empty_shared([1], "no such"),
            lambda g: g.split("left"),
            lambda g: g.split(-3),
            lambda g: g.split(0, key="first"),
        ],
        ids=["dtype", "negative", "text", "shared", "color", "negative-color", "key"],
    )
    def test_wrong_requests_fail_on_every_rank(self, on_ranks: OnRanks, call: Callable[[Group], Any]) -> None:
        """What is wrong on one rank alone, in a verb that makes something, is a CallError on all."""

        def body(group: Group) -> None:
            wrong = group.rank == group.size - 1
            with pytest.raises(CallError, match="Expected"):
                call(group) if wrong else group.barrier().wait()
            same(group.all_reduce(np.ones(3)).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    def test_the_same_arrays_may_change_their_meaning(self, on_ranks: OnRanks) -> None:
        """Calls are remembered by their arrays; ones that were resized, retyped or moved are checked anew."""

        def body(group: Group) -> None:
            array = np.ones(8, np.float32)
            for _ in range(3):
                array[:] = 1
                group.all_reduce(array, out=array).wait()
                same(array, np.full(8, float(group.size), np.float32))
            array[:] = 0
            numbers = array.view(np.int32)
            numbers[:] = 2**20
            group.all_reduce(numbers, out=numbers).wait()
            same(numbers, np.full(8, 2**20 * group.size, np.int32))
            out = np.zeros(8, np.float32)
            group.all_reduce(array, out=out).wait()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy would rather not have this done
                setattr(array, "dtype", np.dtype(np.int32))  # noqa: B010 (the stubs forbid it, NumPy does not)
            with pytest.raises(CallError, match="dtype int32"):
                group.all_reduce(array, out=out).wait()
            array.flags.writeable = False
            with pytest.raises(CallError, match="read-only"):
                group.all_reduce(array, out=array).wait()
            for numel in range(1, 300):  # more different calls than are remembered
                source = np.full(numel, 1.0)
                group.all_reduce(source, out=source).wait()
                assert source[0] == group.size

        on_ranks(body)

    def test_only_its_own_arrays_can_be_freed(self, on_ranks: OnRanks) -> None:
        """Ranks free the same window, or nobody does."""

        def body(group: Group) -> None:
            first, second = group.empty(100, "float32"), group.empty(0 if group.rank else 7, "float32")
            if group.kind in ("node", "hierarchical"):
                with pytest.raises(CallError, match="from elsewhere"):
                    group.free(first.copy() if group.rank == group.size - 1 else first)
                if group.size > 1:
                    with pytest.raises(CollectiveMismatchError):
                        group.free(second if group.rank == 0 else first)
            first[:] = 1
            same(group.all_reduce(first).wait(), np.full(100, float(group.size), np.float32))
            group.barrier().wait()
            group.free(first)
            group.free(second)

        on_ranks(body)

    def test_a_closed_group_refuses(self, on_ranks: OnRanks) -> None:
        """After close every verb raises, closing twice is fine, and repr tells."""

        def body(group: Group) -> None:
            part = group.split(0)
            assert part is not None
            assert "open" in repr(part)
            part.close()
            part.close()
            assert "closed" in repr(part)
            for verb in (part.barrier, lambda: part.all_reduce(np.ones(1)), lambda: part.empty(1, "float32")):
                with pytest.raises(ClosedError):
                    verb()
            group.barrier().wait()

        on_ranks(body)

    def test_arrays_outlive_their_group(self, on_ranks: OnRanks) -> None:
        """Memory from `empty` stays readable after the group is closed."""

        def body(group: Group) -> None:
            part = group.split(0)
            assert part is not None
            array = part.empty(10_000, "float32")
            array[:] = pattern(group.rank, 10_000)
            part.barrier().wait()
            part.close()
            same(array.copy(), pattern(group.rank, 10_000))

        on_ranks(body)


def gather_text(group: Group, text: str) -> list[str]:
    """Return every rank's text."""
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes: Sequence[int] = group.all_gather(np.array([raw.size])).wait().tolist()
    whole = group.all_gather(raw, counts=sizes).wait().tobytes()
    ends = np.cumsum(sizes)
    return [whole[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]
