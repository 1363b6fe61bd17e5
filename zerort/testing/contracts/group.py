"""`GroupContract`: what every group holds, whatever carries its bytes. A transport exists when it passes this.

    class TestMine(GroupContract):
        @pytest.fixture
        def on_ranks(self):
            return lambda body: run_threads(4, body)      # calls body(group) on every rank of a fresh group

Here stands how groups behave when ranks disagree, are wrong, or have closed; what their collectives deliver stands in
`CollectiveContract`, and what holds for calls made again and again in `RepeatContract`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from zerort.comm import Group
from zerort.device import Done
from zerort.errors import CallError, ClosedError, CollectiveMismatchError
from zerort.testing.contracts.collective import OnRanks, assert_same, pattern
from zerort.testing.contracts.repeat import RepeatContract

__all__ = ["GroupContract"]


class GroupContract(RepeatContract):
    """What every group holds. Subclasses provide the fixture ``on_ranks``."""

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (lambda g, put: g.all_reduce(put(np.ones(4))), lambda g, put: g.all_gather(put(np.ones(4)))),
            (lambda g, put: g.all_reduce(put(np.ones(4))), lambda g, put: g.all_reduce(put(np.ones(5)))),
            (lambda g, put: g.all_reduce(put(np.ones(4))), lambda g, put: g.all_reduce(put(np.ones(4, np.float32)))),
            (
                lambda g, put: g.all_reduce(put(np.ones(4))),
                lambda g, put: g.all_reduce(put(np.ones(4)), reduction="max"),
            ),
            (
                lambda g, put: g.all_reduce(put(np.ones(4)), name="loss"),
                lambda g, put: g.all_reduce(put(np.ones(4)), name="norm"),
            ),
            (lambda g, put: g.broadcast(put(np.ones(4))), lambda g, put: g.broadcast(put(np.ones(4)), root=1)),
            (lambda g, put: g.barrier(), lambda g, put: g.all_reduce(put(np.ones(4)))),
            (lambda g, put: g.all_reduce(put(np.ones(300_000))), lambda g, put: g.all_reduce(put(np.ones(300_001)))),
        ],
        ids=["op", "count", "dtype", "reduction", "name", "root", "barrier", "large"],
    )
    def test_different_calls_are_told_apart(
        self, on_ranks: OnRanks, left: Callable[[Group, Any], Any], right: Callable[[Group, Any], Any]
    ) -> None:
        """Ranks that disagree all raise the same error, with both calls and sites; the group stays usable."""

        def body(group: Group) -> None:
            if group.size == 1:
                left(group, self.put).wait()
                assert group.rank == 0
                return
            odd = group.rank == group.size - 1
            with pytest.raises(CollectiveMismatchError) as caught:
                (right if odd else left)(group, self.put).wait()
            text = str(caught.value)
            rows = re.findall(
                r"^  ranks? ([\d, ]+): (\w+)\((.*)\).* at \S*contracts/group\.py:\d+$", text, re.MULTILINE
            )
            assert [ranks for ranks, _, _ in rows] == [
                ", ".join(map(str, range(group.size - 1))),
                str(group.size - 1),
            ]
            everyone = gather_text(group, text)
            assert set(everyone) == {text}
            assert_same(group.all_reduce(self.put(np.ones(3))).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    @pytest.mark.parametrize("text", ["😀" * 2000, "\x01" * 2000, "\ud800"], ids=["emoji", "control", "surrogate"])
    def test_a_complaint_of_any_characters_reaches_all(self, on_ranks: OnRanks, text: str) -> None:
        """Texts that take many bytes to carry are shortened, not cut where they can no longer be read."""

        def body(group: Group) -> None:
            with pytest.raises(CallError) as caught:
                group.all_reduce(np.ones(4), reduction=text).wait()
            told = str(caught.value)
            assert told.endswith(")")
            assert "sum, max, min" in told
            assert set(gather_text(group, told)) == {told}

        on_ranks(body)

    def test_a_barrier_that_completes_a_call_is_not_made_if_that_fails(self, on_ranks: OnRanks) -> None:
        """A rank that had a complaint instead of the call has no barrier to make, and calls stay in step."""

        def body(group: Group) -> None:
            source = self.put(np.ones(3))
            several = group.size > 1
            for trouble, after in (
                (False, None),
                (False, Done(None)),
                (several, None),
                (several, Done(None)),
                (False, None),
            ):
                if trouble and group.rank == group.size - 1:
                    group.complain("no such luck")
                    continue
                call = group.all_gather(source, eager=False)
                met = group.barrier(after=after, follows=call)
                if trouble:
                    for ticket in (call, met):
                        with pytest.raises(CallError, match="no such luck"):
                            ticket.wait()
                else:
                    met.wait()
                    assert_same(call.wait(), np.ones(3 * group.size))

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
            (lambda g: g.all_gather(np.ones(4), counts=[4 if r == g.rank else 2**50 for r in range(g.size)]), "Memory"),
        ],
        ids=[
            "list", "strided", "complex", "reduction", "out-size", "out-dtype", "read-only", "counts-length",
            "counts-mine", "uneven", "negative", "root", "parts", "matrix", "overlap", "object", "byte-order",
            "unaligned", "long-story", "unhashable", "no-memory",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("who", ["all", "last"])
    def test_wrong_arguments_fail_on_every_rank(
        self, on_ranks: OnRanks, call: Callable[[Group], Any], match: str, who: str
    ) -> None:
        """A wrong argument, on one rank or on all, is the same CallError on every rank; the group stays usable."""

        def body(group: Group) -> None:
            wrong = who == "all" or group.rank == group.size - 1
            if group.size == 1 and match in ("evenly", "equal parts", "Memory"):
                assert call(group).wait().size  # one rank can share anything evenly, and needs no more than it has
                return
            with pytest.raises(CallError, match=match) as caught:
                (call(group) if wrong else group.all_reduce(np.ones(4))).wait()
            texts = gather_text(group, str(caught.value))
            assert set(texts) == {str(caught.value)}
            assert_same(group.all_reduce(self.put(np.ones(3))).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    @pytest.mark.parametrize(
        "call",
        [
            lambda g: g.zeros(4, "float12"),
            lambda g: g.zeros(-1, "float32"),
            lambda g: g.zeros("many", "float32"),
            lambda g: g.zeros_shared([1], "no such"),
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
            assert_same(group.all_reduce(self.put(np.ones(3))).wait(), np.full(3, float(group.size)))

        on_ranks(body)

    def test_the_same_arrays_may_change_their_meaning(self, on_ranks: OnRanks) -> None:
        """Calls are remembered by their arrays; ones that were resized, retyped or moved are checked anew."""

        def body(group: Group) -> None:
            array = np.ones(8, np.float32)
            for _ in range(3):
                array[:] = 1
                group.all_reduce(array, out=array).wait()
                assert_same(array, np.full(8, float(group.size), np.float32))
            array[:] = 0
            numbers = array.view(np.int32)
            numbers[:] = 2**20
            group.all_reduce(numbers, out=numbers).wait()
            assert_same(numbers, np.full(8, 2**20 * group.size, np.int32))
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
            first, second = group.zeros(100, "float32"), group.zeros(0 if group.rank else 7, "float32")
            if group.kind in ("node", "hierarchical"):
                with pytest.raises(CallError, match="from elsewhere"):
                    group.free(first.copy() if group.rank == group.size - 1 else first)
                if group.size > 1:
                    with pytest.raises(CollectiveMismatchError):
                        group.free(second if group.rank == 0 else first)
            first[:] = 1
            assert_same(group.all_reduce(first).wait(), np.full(100, float(group.size), np.float32))
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
            for verb in (part.barrier, lambda: part.all_reduce(np.ones(1)), lambda: part.zeros(1, "float32")):
                with pytest.raises(ClosedError):
                    verb()
            group.barrier().wait()

        on_ranks(body)

    def test_arrays_outlive_their_group(self, on_ranks: OnRanks) -> None:
        """Memory from `zeros` stays readable after the group is closed."""

        def body(group: Group) -> None:
            part = group.split(0)
            assert part is not None
            array = part.zeros(10_000, "float32")
            array[:] = self.put(pattern(group.rank, 10_000))
            part.barrier().wait()
            part.close()
            assert_same(array.copy(), pattern(group.rank, 10_000))

        on_ranks(body)


def gather_text(group: Group, text: str) -> list[str]:
    """Return every rank's text."""
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes: Sequence[int] = group.all_gather(np.array([raw.size])).wait().tolist()
    whole = group.all_gather(raw, counts=sizes).wait().tobytes()
    ends = np.cumsum(sizes)
    return [whole[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]
