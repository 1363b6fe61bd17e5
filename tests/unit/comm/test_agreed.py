"""Ranks agree, or all fail."""

import numpy as np
import pytest

from zerort.comm.agreed import Copies, agreed, expect_same, gather_json, raise_together
from zerort.errors import CallError, PlanError, RankFailedError
from zerort.testing import run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_gets_every_value(size):
    def body(group):
        return gather_json(group, {"rank": group.rank, "text": "ü" * group.rank})

    expected = [{"rank": rank, "text": "ü" * rank} for rank in range(size)]
    assert run_threads(size, body) == [expected] * size


def test_no_error_is_no_error():
    assert run_threads(3, lambda group: raise_together(group, None)) == [None] * 3


def test_a_named_error_arrives_as_itself_with_its_rank():
    def body(group):
        with pytest.raises(CallError) as caught:
            raise_together(group, CallError("Expected a, got b.") if group.rank == 1 else None)
        return str(caught.value)

    assert run_threads(3, body) == ["Expected a, got b. (rank 1)", "Expected a, got b.", "Expected a, got b. (rank 1)"]


def test_a_foreign_error_stays_itself_at_home_and_is_a_failed_rank_elsewhere():
    def body(group):
        mine = OSError(28, "No space left") if group.rank == 1 else None
        with pytest.raises(OSError if mine else RankFailedError, match="No space left"):
            raise_together(group, mine)

    run_threads(2, body)


def test_an_error_that_all_ranks_have_stays_everyones_own():
    def body(group):
        with pytest.raises(OSError, match="No space left") as caught:
            raise_together(group, OSError(28, "No space left"))
        return str(caught.value)

    assert run_threads(3, body) == ["[Errno 28] No space left"] * 3


def test_the_lowest_rank_counts_when_several_fail():
    def body(group):
        with pytest.raises(CallError, match="of rank 1"):
            raise_together(group, CallError(f"of rank {group.rank}") if group.rank else None)

    run_threads(3, body)


def test_what_differs_is_named_on_every_rank():
    def body(group):
        expect_same(group, [1, 2], what="the list")
        with pytest.raises(PlanError, match=r"Expected the plan to be the same .* 0 on rank 0 and 1 on rank 2\."):
            expect_same(group, int(group.rank == 2), what="the plan")

    run_threads(3, body)


def test_what_fails_inside_on_one_rank_fails_on_all():
    def block(group, done):
        with agreed(group, "block"):
            if group.rank == 1:
                raise CallError("Expected a, got b.")
            done.append(group.rank)

    def body(group):
        done = []
        with pytest.raises(CallError) as caught:
            block(group, done)
        with agreed(group, "block"):
            done.append("on")
        return str(caught.value), done

    told = run_threads(3, body)
    assert [text for text, _ in told] == [
        "Expected a, got b. (rank 1)",
        "Expected a, got b.",
        "Expected a, got b. (rank 1)",
    ]
    assert [done for _, done in told] == [[0, "on"], ["on"], [2, "on"]]


def test_an_error_that_all_ranks_have_passes_without_a_meeting():
    def body(group):
        with pytest.raises(KeyError, match="mine"), agreed(group, "block", catching=CallError):
            raise KeyError("mine")
        group.barrier().wait()  # and the next call is the same on every rank

    run_threads(2, body)


def test_ranks_outside_of_the_block_hear_of_its_failure():
    """So do calls that they have made over copies, none to two of them; then all go on."""

    def block(world, part, over):
        with agreed(part, "block", others=Copies(world, over)):
            if world.rank == 1:
                raise CallError("Expected a, got b.")

    def body(world):
        part, over = world.split(world.rank // 2), world.split(world.rank % 2)
        for count in range(3):
            pending = [over.all_reduce(np.ones(4), eager=False) for _ in range(count if world.rank >= 2 else 0)]
            with pytest.raises(CallError, match="Expected a, got b"):
                block(world, part, over) if world.rank < 2 else world.barrier().wait()
            for ticket in pending:
                with pytest.raises(CallError, match="Expected a, got b"):
                    ticket.wait()
            assert over.all_reduce(np.full(2, 1.0 + count)).wait().sum() == 4.0 * (1 + count)

    run_threads(4, body)
