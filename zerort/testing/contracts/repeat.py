"""`RepeatContract`: calls that are made again and again, as a training loop makes them. Part of `GroupContract`.

A transport may take a shortcut for a call that it knows; nothing but its speed may tell. Each test makes the same call
from the same line more than twice.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zerort import trace
from zerort.comm import Group
from zerort.errors import CallError, ClosedError, CollectiveMismatchError
from zerort.testing.contracts.collective import CollectiveContract, OnRanks, assert_same, pattern

__all__ = ["RepeatContract"]

TIMES = 5
SIZES = [3, 2_000, 40_000]
"""Elements per rank: a few, and more than what is staged, and than what runs at once."""


class RepeatContract(CollectiveContract):
    """What holds for calls made again. Subclasses provide the fixture ``on_ranks``."""

    def arrays(self, group: Group, numel: int, where: str) -> tuple[Any, Any]:
        """Return two float32 arrays of ``numel`` elements."""
        if where == "own":
            return self.put(np.zeros(numel, np.float32)), self.put(np.zeros(numel, np.float32))
        return group.zeros(numel, "float32"), group.zeros(numel, "float32")

    @pytest.mark.parametrize("where", ["window", "own"])
    @pytest.mark.parametrize("numel", SIZES)
    def test_repeated_calls_see_new_data(self, on_ranks: OnRanks, numel: int, where: str) -> None:
        """Every collective, out of place and in place, whose arrays are written anew as soon as the call is over."""

        def body(group: Group) -> None:
            n, rank = group.size, group.rank
            full, other = self.arrays(group, n * numel, where)
            mine = full[rank * numel :][:numel]
            shares = [slice(r * numel, (r + 1) * numel) for r in range(n)]
            for step in range(TIMES):
                rows = np.stack([pattern(r + step, n * numel) for r in range(n)])
                total = rows.sum(0)
                root = n - 1

                full[:] = self.put(rows[rank])
                group.reduce_scatter(full, out=other[:numel]).wait()
                assert_same(other[:numel], total[shares[rank]])
                group.reduce_scatter(full, out=mine).wait()
                assert_same(mine, total[shares[rank]])

                full[:] = self.put(rows[rank])
                group.all_reduce(full, out=other).wait()
                assert_same(other, total)
                group.all_reduce(full, out=full).wait()
                assert_same(full, total)

                full[:] = self.put(rows[rank])
                group.all_to_all(full, out=other).wait()
                assert_same(other, np.concatenate([rows[r][shares[rank]] for r in range(n)]))
                group.broadcast(full, out=other, root=root).wait()
                assert_same(other, rows[root])
                group.broadcast(full, root=root).wait()
                assert_same(full, rows[root])

                full[:] = 0
                mine[:] = self.put(rows[rank][:numel])
                group.all_gather(mine, out=other).wait()
                assert_same(other, rows[:, :numel].reshape(-1))
                group.all_gather(mine, out=full).wait()
                mine[:] = -1  # at once: nobody may still be reading it
                group.barrier().wait()

        on_ranks(body)

    @pytest.mark.parametrize("shape", [(3,), (2, 5), (100, 70)])
    def test_repeated_calls_without_an_out_return_arrays_of_the_callers(
        self, on_ranks: OnRanks, shape: tuple[int, ...]
    ) -> None:
        """A result stays as it is for as long as it is held, also by a view of it; sources lie anywhere."""

        def body(group: Group) -> None:
            n, rank = group.size, group.rank
            numel = math.prod(shape)
            held: list[tuple[Any, Any]] = []
            for step in range(3 * TIMES):
                rows = np.stack([pattern(r + step, numel * n) for r in range(n)])
                mine = rows[rank]
                if step % 3 == rank % 3:  # late: what is begun in one step is finished in others
                    time.sleep(0.003)
                source = self.put(mine[:numel].copy())
                results = [
                    (group.all_reduce(source.reshape(shape)).wait(), rows[:, :numel].sum(0).reshape(shape)),
                    (group.all_gather(source).wait(), rows[:, :numel].reshape(-1)),
                    (group.reduce_scatter(self.put(mine)).wait(), rows.sum(0)[rank * numel :][:numel]),
                    (group.all_to_all(self.put(mine)).wait(), rows[:, rank * numel :][:, :numel].reshape(-1)),
                ]
                summed = group.reduce(source.reshape(shape), root=n - 1).wait()
                assert (summed is None) == (rank != n - 1)
                if summed is not None:
                    results.append((summed, results[0][1]))
                for result, expected in results:
                    assert result.shape == expected.shape
                    assert_same(result, expected)
                if step % 2:
                    held += results
                    held += [(result[1:], expected[1:]) for result, expected in results]
                source[:] = -1  # at once: nobody may still be reading it
            for result, expected in held:
                assert_same(result, expected)
            group.barrier().wait()

        on_ranks(body)

    def test_repeated_calls_without_an_out_leave_what_was_changed(self, on_ranks: OnRanks) -> None:
        """A result that its owner reshaped or locked before letting go of it, or looks at weakly, does not return."""

        def body(group: Group) -> None:
            def total(source: Any) -> Any:
                return group.all_reduce(source).wait()

            seen = None
            for step in range(3 * TIMES):
                result = total(self.put(np.full(6, step, np.float32)))
                assert result.shape == (6,)
                assert_same(result, np.full(6, step * group.size, np.float32))
                if seen is not None:
                    before, at = seen[0](), seen[1]
                    assert before is None or before[0] == at * group.size
                if isinstance(result, np.ndarray):
                    if step % 3 == 0:
                        result.shape = (2, 3)
                    elif step % 3 == 1:
                        result.flags.writeable = False
                    else:
                        seen = weakref.ref(result), step
                assert_same(total(self.put(np.full(6, 1, np.int64))), np.full(6, group.size))  # from the same line
            with pytest.raises(CallError, match="contiguous"):
                total(self.put(np.ones(12, np.float32))[::2])
            assert_same(total(self.put(np.ones(6, np.float32))), np.full(6, group.size, np.float32))

        on_ranks(body)

    def test_repeated_calls_that_differ_are_told_apart(self, on_ranks: OnRanks) -> None:
        """A rank that leaves the loop's pattern is found out at that very call; then the loop goes on."""

        def body(group: Group) -> None:
            full, _ = self.arrays(group, 8 * group.size, "window")

            def reduce(name: str) -> None:
                group.all_reduce(full, out=full, name=name).wait()

            for step in range(3 * TIMES):
                odd = step % TIMES == TIMES - 1 and group.size > 1
                if odd:
                    with pytest.raises(CollectiveMismatchError, match="norm"):
                        reduce("norm" if group.rank == group.size - 1 else "loss")
                    with pytest.raises(CollectiveMismatchError, match="barrier"):
                        group.barrier().wait() if group.rank == 0 else reduce("loss")
                full[:] = 1
                reduce("loss")
                reduce("norm")
                assert full[0] == group.size**2

        on_ranks(body)

    def test_repeated_calls_wait_for_the_late(self, on_ranks: OnRanks) -> None:
        """A rank that comes later than a shortcut has patience."""

        def body(group: Group) -> None:
            shards = group.zeros_shared([2] * group.size, "float32")
            for step in range(2 * TIMES):
                if step > TIMES and step % group.size == group.rank:
                    time.sleep(0.03)
                shards.mine[:] = step
                group.all_gather(shards.mine, out=shards.full).wait()
                assert shards.full.tolist() == [step] * (2 * group.size)
                group.barrier().wait()

        on_ranks(body)

    def test_repeated_calls_over_views_made_for_each(self, on_ranks: OnRanks) -> None:
        """A view that takes the place of one before, in memory and by its id, is as good, also if a rank comes late."""

        def body(group: Group) -> None:
            full, _ = self.arrays(group, 2 * group.size, "window")
            first = 2 * group.rank

            def gather(view: Any, step: int) -> None:
                view[:] = step + group.rank
                group.all_gather(view, out=full).wait()
                assert full[::2].tolist() == [step + rank for rank in range(group.size)]

            view = full[first : first + 2]
            for step in range(TIMES):
                gather(view, step)
            del view
            for step in range(2 * TIMES):
                if step % group.size == group.rank:
                    time.sleep(0.01)
                gather(full[first : first + 2], step)

        on_ranks(body)

    def test_repeated_calls_notice_what_changed(self, on_ranks: OnRanks) -> None:
        """Arrays whose window was freed, or that became read-only, and a group that was closed."""

        def body(group: Group) -> None:
            full, other = self.arrays(group, 8 * group.size, "window")

            def reduce(out: Any) -> Any:
                full[:] = 1
                return group.all_reduce(full, out=out).wait()

            for _ in range(TIMES):
                assert_same(reduce(other), np.full(full.size, group.size, np.float32))
            group.free(other)
            for _ in range(TIMES):
                assert_same(reduce(other), np.full(full.size, group.size, np.float32))
            if isinstance(other, np.ndarray):
                other.flags.writeable = False
                with pytest.raises(CallError, match="read-only"):
                    reduce(other)
            part = group.split(0)
            assert part is not None
            for step in range(TIMES):
                if step < TIMES - 1:
                    part.barrier().wait()
                    continue
                part.close()
                with pytest.raises(ClosedError):
                    part.barrier()

        on_ranks(body)

    def test_repeated_calls_are_on_record(self, on_ranks: OnRanks) -> None:
        """The flight record has all of the last calls in order, with their sites; counters count them."""

        def body(group: Group) -> None:
            full, _ = self.arrays(group, 8, "window")
            before = trace.counters().get("barrier", 0)
            calls: list[Callable[[], Any]] = [
                lambda: group.barrier(name="mark"),
                lambda: group.all_reduce(full, out=full),
                lambda: group.all_gather(np.ones(1)),
            ]
            for _ in range(TIMES):
                for call in calls:
                    call().wait()
            # Not pytest's tmp_path: ranks that start at once trip over each other in cleaning up.
            with tempfile.TemporaryDirectory() as directory:
                path = group.flight_record(directory)
                assert path is not None
                rows = json.loads(path.read_text())["calls"][-len(calls) * TIMES :]
            assert [row["op"] for row in rows] == ["barrier", "all_reduce", "all_gather"] * TIMES
            assert [row["name"] for row in rows[:2]] == ["mark", ""]
            assert {row["status"] for row in rows} == {"done"}
            assert len({row["site"] for row in rows}) == len(calls)
            assert all("contracts/repeat.py:" in row["site"] for row in rows)
            assert all(row["submitted_ns"] <= row["finished_ns"] for row in rows)
            first = rows[0]["sequence"]
            assert [row["sequence"] for row in rows] == list(range(first, first + len(rows)))
            assert trace.counters()["barrier"] - before >= TIMES

        on_ranks(body)
