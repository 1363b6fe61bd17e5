"""The benchmark's check finds what a collective gets wrong: a moved block, another rank's data, one flipped element."""

from __future__ import annotations

import numpy as np
import pytest

from zerort.cli.bench.collectives.operations import OPERATIONS
from zerort.cli.bench.collectives.trials import Pattern, RoundedPattern, our_trials, shared_trial
from zerort.comm import Group
from zerort.native.dtypes import DTYPE_CODES, numpy_dtype
from zerort.testing.threads import run_threads

SHARE = 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint64"])
def test_a_pattern_knows_itself_and_nothing_else(dtype: str) -> None:
    pattern = Pattern(dtype, 3)
    array = np.zeros(1000, numpy_dtype(dtype))
    pattern.fill(array, 1)
    assert pattern.wrong(array, [(0, 1000, 1, 0)]) == 0
    assert pattern.wrong(array[100:], [(0, 900, 1, 100)]) == 0
    assert pattern.wrong(array, [(0, 1000, 0, 0)]) > 900  # another rank's
    assert pattern.wrong(array, [(0, 1000, 1, 64)]) > 900  # another place
    array[[7, 999]] = 99
    assert pattern.wrong(array, [(0, 1000, 1, 0)]) == 2


@pytest.mark.parametrize("size", [2, 7, 40, 300, 3000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_sixteen_bits_are_exact_however_often_they_are_rounded(dtype: str, size: int) -> None:
    """Hosts and GPUs round what they send each other: a check by bits must not depend on that."""
    pattern, kind = Pattern(dtype, size), numpy_dtype(dtype)
    total, part = np.zeros(200, kind), np.zeros(200, kind)
    for rank in range(size):
        pattern.fill(part, rank)
        assert part.any()
        total = (total.astype(np.float32) + part.astype(np.float32)).astype(kind)
    assert pattern.wrong(total, [(0, 200, None, 0)]) == 0
    assert pattern.wrong(total[1:], [(0, 199, None, 0)]) > 60  # another place


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_error_of_a_sum_shows_how_often_it_was_rounded(dtype: str) -> None:
    kind, size, expected = numpy_dtype(dtype), 3, [(0, 200, None, 100)]
    pattern = RoundedPattern(dtype, size)
    parts = np.zeros((size, 300), kind)
    for rank in range(size):
        pattern.fill(parts[rank], rank)
    mine = parts[:, 100:]
    once = mine.astype(np.float32).sum(0).astype(kind)
    assert 0 < pattern.error(once, expected) <= 0.5
    hop_by_hop = ((mine[0] + mine[1]).astype(kind) + mine[2]).astype(kind)
    assert 0.5 < pattern.error(hop_by_hop, expected) <= 1.5
    assert pattern.error(once[::-1].copy(), expected) > 1.5  # not a matter of rounding
    once[150] = np.nan
    assert pattern.error(once, expected) == np.inf


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", [name for name, operation in OPERATIONS.items() if operation.reduces])
def test_our_sums_are_rounded_once(op: str, dtype: str) -> None:
    def body(group: Group) -> list[float]:
        full, other = (np.zeros(SHARE * group.size, numpy_dtype(dtype)) for _ in range(2))
        trials = our_trials(group, OPERATIONS[op], full, other, Pattern(dtype, group.size)).values()
        return [trial.error() for trial in trials if trial.error is not None]

    errors = run_threads(3, body)
    assert [len(found) for found in errors] == [2, 2, 2]
    assert 0 < np.max(errors) <= 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_our_collectives_pass_their_checks(op: str, dtype: str) -> None:
    def body(group: Group) -> list[int]:
        full, other = (np.zeros(SHARE * group.size, numpy_dtype(dtype)) for _ in range(2))
        trials = our_trials(group, OPERATIONS[op], full, other, Pattern(dtype, group.size))
        assert set(trials) == ({"out"} if op == "all_to_all" else {"out", "in"})
        return [trial.check() for _ in range(2) for trial in trials.values()]

    assert all(not any(found) for found in run_threads(3, body))


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_collective_that_does_nothing_is_found_out(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, op, lambda self, source, *, out: self.barrier())

    def body(group: Group) -> list[int]:
        full, other = (np.zeros(SHARE * group.size, np.float32) for _ in range(2))
        trials = our_trials(group, OPERATIONS[op], full, other, Pattern("float32", group.size))
        return [trial.check() for trial in trials.values()]

    found = np.array(run_threads(3, body)).sum(0)
    assert (found > SHARE / 2).all(), found


def test_a_shared_gather_passes_and_one_without_a_meeting_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> int:
        shards = group.zeros_shared([SHARE] * group.size, "float32")
        return shared_trial(group, OPERATIONS["all_gather"], shards, Pattern("float32", group.size)).check()

    assert run_threads(3, body) == [0, 0, 0]

    def other_place(group: Group) -> int:
        shards = group.zeros_shared([SHARE] * group.size, "float32")
        swapped = shards._replace(mine=shards.full[(group.rank + 1) % group.size * SHARE :][:SHARE])
        monkeypatch.setattr(Group, "all_gather", lambda self, source, *, out: self.barrier())
        return shared_trial(group, OPERATIONS["all_gather"], swapped, Pattern("float32", group.size)).check()

    assert min(run_threads(3, other_place)) > SHARE


def test_every_dtype_has_a_pattern() -> None:
    for dtype in DTYPE_CODES:
        array = np.zeros(61, numpy_dtype(dtype))
        Pattern(dtype, 2).fill(array, 1)
        assert array.astype(np.float64).max() == 61
