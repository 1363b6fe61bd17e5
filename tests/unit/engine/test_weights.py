"""`rt.step(weight=)`: a step over uneven ranks is that of one process over the same tokens; bad weights are refused."""

import functools

import numpy as np
import pytest

import zerort as zr
from zerort.errors import CallError
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

TOKENS = 40
X = np.random.default_rng(0).normal(size=(6 * TOKENS, 5))
Y = X @ np.arange(1.0, 6.0) + 0.5


def opened(group, plan=3, **options):
    options = {"clip_norm": 2.0, **options}
    rt = zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=0.05), group=group, **options)
    rt.register("line", {"w": np.zeros(5), "b": np.zeros(1)})
    return rt


def reduce_sum(rt, indices):
    """Hand in the gradient of the summed loss over some tokens; none of them gives zeros."""
    with rt.units["line"].gathered() as p:
        error = X[indices] @ p["w"] + p["b"] - Y[indices]
        rt.units["line"].reduce({"w": error @ X[indices], "b": error.sum(keepdims=True)})


def weights_of(rt):
    with rt.units["line"].gathered() as p:
        return np.concatenate([p["w"], p["b"]])


def batches():
    return [np.arange(step * TOKENS, (step + 1) * TOKENS) for step in range(6)]


def alone(**options):
    """One process, all tokens: the mean, without weights."""

    def body(group):
        with opened(group, plan=0, **options) as rt:
            for batch in batches():
                with rt.units["line"].gathered() as p:
                    error = X[batch] @ p["w"] + p["b"] - Y[batch]
                    rt.units["line"].reduce({"w": error @ X[batch] / TOKENS, "b": error.mean(keepdims=True)})
                rt.step()
            return weights_of(rt)

    return run_threads(1, body)[0]


def uneven(batch, parts, step):
    """Cut a batch into parts of very different lengths, one of which is empty where there are several."""
    cuts = np.sort(np.random.default_rng(step).integers(0, TOKENS, parts - 1))
    if parts > 1:
        cuts[-1] = TOKENS
    return np.split(batch, cuts)


@pytest.mark.parametrize("plan", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_uneven_tokens_are_those_of_one_process(ranks, plan):
    def body(group):
        with opened(group, plan=plan) as rt:
            for step, batch in enumerate(batches()):
                mine = uneven(batch, ranks, step)[group.rank]
                reduce_sum(rt, mine)
                assert rt.step(weight=len(mine)).weight == TOKENS
            return weights_of(rt)

    found = run_threads(ranks, body)
    for one in found:
        np.testing.assert_allclose(one, alone(), rtol=OVER_STEPS, atol=OVER_STEPS)


@pytest.mark.parametrize("ranks", [1, 3])
def test_micro_steps_share_one_weight(ranks):
    def body(group):
        with opened(group, micro_steps=2) as rt:
            for step, batch in enumerate(batches()):
                parts = uneven(batch, 2 * ranks, step)[2 * group.rank : 2 * group.rank + 2]
                for part in parts:
                    reduce_sum(rt, part)
                rt.step(weight=np.int64(sum(map(len, parts))))
            return weights_of(rt)

    np.testing.assert_allclose(run_threads(ranks, body)[0], alone(), rtol=OVER_STEPS, atol=OVER_STEPS)


def test_copies_of_the_model_weigh_together():
    def body(group):
        with opened(None, mesh=zr.mesh(shard=2, replicate=2, group=group)) as rt:
            for step, batch in enumerate(batches()):
                mine = uneven(batch, 4, step)[group.rank]
                reduce_sum(rt, mine)
                rt.step(weight=len(mine))
            return weights_of(rt)

    np.testing.assert_allclose(run_threads(4, body)[3], alone(), rtol=OVER_STEPS, atol=OVER_STEPS)


def test_leaves_of_different_lengths_give_the_same_bits_on_any_number_of_ranks():
    order = zr.data.Order(length=len(X), batch=37, seed=7)  # 8 leaves of 5 and 4; the last batch has 18

    def body(group):
        with opened(group, virtual_shards=8) as rt:
            digests = []
            for indices in rt.take(order):
                for leaf in np.array_split(indices, rt.micro_steps):
                    reduce_sum(rt, leaf[: len(leaf) // 2])  # and some have fewer tokens than samples
                digests.append(
                    rt.step(weight=sum(len(one) // 2 for one in np.array_split(indices, rt.micro_steps))).digest
                )
            return digests

    first, *others = (run_threads(ranks, body)[0] for ranks in (1, 2, 4, 8))
    assert len(set(first)) == 7
    assert all(one == first for one in others)


def test_without_weights_ranks_count_alike():
    def body(group):
        with opened(group, clip_norm=None) as rt:
            rt.units["line"].reduce({"w": np.full(5, float(group.rank)), "b": np.zeros(1)})
            report = rt.step()
            return report.weight, report.grad_norm

    assert run_threads(3, body) == [(None, pytest.approx(np.sqrt(5.0)))] * 3


@pytest.mark.parametrize("replicate", [1, 2])
def test_weights_travel_with_the_agreement(replicate):
    """As many collectives as without, seen in the trace."""

    def body(group, *, is_weighted):
        mesh = zr.mesh(shard=group.size // replicate, replicate=replicate, group=group)
        with opened(None, mesh=mesh) as rt:
            for _ in range(3):
                reduce_sum(rt, np.arange(group.rank, 10, group.size))
                rt.step(weight=1.0 + group.rank if is_weighted else None)

    calls = []
    for is_weighted in (False, True):
        zr.trace.reset()
        zr.trace.enable()
        try:
            run_threads(4, functools.partial(body, is_weighted=is_weighted))
            calls.append(sum(span.name == "meet" for span in zr.trace.spans()))
        finally:
            zr.trace.disable()
    assert calls[0] == calls[1] > 0


@pytest.mark.parametrize("plan", [0, 3])
def test_leaves_that_ranks_cannot_share_evenly_weigh_once(plan):
    """Some ranks compute their last leaf again: neither its gradient nor its tokens count."""

    def body(group):
        with opened(group, plan=plan, virtual_shards=5) as rt:
            found = []
            for batch in batches():
                leaves = [uneven(batch, 5, 3)[at] for at in rt.micro_batches]
                for leaf in leaves:
                    reduce_sum(rt, leaf)
                report = rt.step(weight=[len(leaf) for leaf in leaves])
                found.append((report.digest, report.weight))
            return found, weights_of(rt).tolist()

    first, *others = (run_threads(ranks, body)[0] for ranks in (1, 2, 3, 4, 5))
    assert {weight for _, weight in first[0]} == {float(TOKENS)}
    assert all(one == first for one in others)
    np.testing.assert_allclose(first[1], alone(), rtol=OVER_STEPS, atol=OVER_STEPS)


@pytest.mark.parametrize(
    ("weight", "text"),
    [(20, r"rt\.step\(weight=weights\)"), ([1, 2, 3], "each of 2 micro-batches, got 3"), ([], "got 0 on rank 0")],
)
def test_one_weight_for_leaves_that_are_computed_again_is_refused_on_all(weight, text):
    def body(group):
        with opened(group, virtual_shards=3) as rt:
            for _ in rt.micro_batches:
                reduce_sum(rt, np.arange(10))
            with pytest.raises(CallError, match=text) as refused:
                rt.step(weight=weight)
            assert rt.updates == 0
            return str(refused.value)

    assert len(set(run_threads(2, body))) == 1


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_weights_of_micro_batches_add_up(kind):
    def body(group):
        with opened(group, micro_steps=2) as rt:
            for _ in range(2):
                reduce_sum(rt, np.arange(4))
            return rt.step(weight=kind([3, 4 + group.rank])).weight

    assert run_threads(2, body) == [15.0] * 2


@pytest.mark.parametrize("wrong", [-1, np.nan, np.inf, "5", True, [-1.0], [None]])
def test_a_bad_weight_of_one_rank_is_refused_on_all(wrong):
    def body(group):
        with opened(group) as rt:
            reduce_sum(rt, np.arange(4))
            before = weights_of(rt)
            with pytest.raises(CallError, match=r"Expected weight= to be a finite number .* on rank 1") as refused:
                rt.step(weight=wrong if group.rank == 1 else 4)
            np.testing.assert_array_equal(weights_of(rt), before)
            reduce_sum(rt, np.arange(4))
            assert rt.step(weight=4).updated  # nothing hangs, and the run goes on
            return str(refused.value)

    assert len(set(run_threads(3, body))) == 1


@pytest.mark.parametrize(
    ("weights", "text"),
    [([0, 0, 0], "above 0 over all ranks, got 0.0"), ([3, None, 1], "on every rank or on none, got it on 2 of 3")],
)
def test_weights_that_cannot_be_together_are_refused_on_all(weights, text):
    def body(group):
        with opened(group) as rt:
            reduce_sum(rt, np.arange(4))
            with pytest.raises(CallError, match=text):
                rt.step(weight=weights[group.rank])
            assert rt.updates == 0

    run_threads(3, body)


def test_sums_have_no_weight():
    def body(group):
        with opened(group, reduction="sum") as rt:
            reduce_sum(rt, np.arange(4))
            with pytest.raises(CallError, match="reduction='sum'"):
                rt.step(weight=4)

    run_threads(2, body)
