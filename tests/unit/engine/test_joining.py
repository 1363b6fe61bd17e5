"""`rt.join`: ranks with 0 to 7 batches end together, every sample counts once, and nothing hangs."""

import numpy as np
import pytest

import zerort as zr
from zerort.engine.batches.joining import Joining
from zerort.errors import CallError, UnitStateError
from zerort.testing import run_threads
from zerort.testing.tolerance import OVER_STEPS

X = np.random.default_rng(0).normal(size=(400, 4))
Y = X @ np.arange(1.0, 5.0)
HAND_IN = ["reduce", "gradients", "contribute"]


def opened(group, plan=3, **options):
    rt = zr.open(plan=zr.Plan.zero(plan), optimizer=zr.AdamW(lr=0.05), group=group, **options)
    rt.register("line", {"w": np.zeros(4), "b": np.zeros(1)})
    return rt


def batches_of(rank, count):
    """Rows of some batches: of different lengths, and no two ranks have one in common."""
    starts = 50 * rank + 7 * np.arange(count)
    return [np.arange(start, start + 1 + (start + rank) % 6) for start in starts]


def hand_in(rt, rows, how, *, poison=False):
    line = rt.units["line"]
    with line.gathered() as p:
        error = X[rows] @ p["w"] + p["b"] - Y[rows]
        found = {"w": error @ X[rows], "b": error.sum(keepdims=True)}
    if poison:  # a batch that is computed again must not be looked at: 0 x NaN is NaN
        found = {name: value * np.nan for name, value in found.items()}
    if how == "gradients":
        for name, place in line.gradients().items():
            place[:] = found[name]
        line.reduce()
    elif how == "contribute":
        for name, value in found.items():
            line.contribute(name, value)
    else:
        line.reduce(found)


def weights_of(rt):
    with rt.units["line"].gathered() as p:
        return np.concatenate([p["w"], p["b"]])


def alone(counts, *, micro_steps=1):
    """One process: each step has the batches that the ranks have of their own then, together."""
    every = [batches_of(rank, count) for rank, count in enumerate(counts)]

    def body(group):
        with opened(group, plan=0) as rt:
            for at in range(0, max(counts), micro_steps):
                rows = np.concatenate([rows for one in every for rows in one[at : at + micro_steps]])
                hand_in(rt, rows, "reduce")
                rt.step(weight=len(rows))
            return weights_of(rt)

    return run_threads(1, body)[0]


@pytest.mark.parametrize("how", HAND_IN)
@pytest.mark.parametrize("counts", [[3], [0, 2], [1, 0, 4], [7, 0, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_every_batch_counts_once(counts, how):
    def body(group):
        mine = batches_of(group.rank, counts[group.rank])
        with opened(group, plan=group.size % 4) as rt:
            computed = []
            for rows in rt.join(mine):
                again = len(computed) >= len(mine)
                hand_in(rt, rows, how, poison=again)
                rt.step(weight=len(rows))
                computed.append(rows)
            assert [one.tolist() for one in computed[: len(mine)]] == [one.tolist() for one in mine]
            assert len(computed) == max(counts)
            hand_in(rt, np.arange(3), how)  # behind the loop everything counts again
            assert rt.step(weight=1).weight == group.size
            return computed, rt.updates

    def whole(group):
        mine = batches_of(group.rank, counts[group.rank])
        with opened(group, plan=group.size % 4) as rt:
            for at, rows in enumerate(rt.join(iter(mine))):
                hand_in(rt, rows, how, poison=at >= len(mine))
                rt.step(weight=len(rows))
            return weights_of(rt)

    found = run_threads(len(counts), body)
    first = next(rank for rank, count in enumerate(counts) if count)
    for rank, (computed, updates) in enumerate(found):
        source = rank if counts[rank] else first
        assert computed[-1].tolist() == batches_of(source, max(counts[rank], 1))[-1].tolist()
        assert updates == max(counts) + 1
    np.testing.assert_allclose(run_threads(len(counts), whole)[0], alone(counts), rtol=OVER_STEPS, atol=OVER_STEPS)


@pytest.mark.parametrize("counts", [[5, 2], [4, 0, 7]])
@pytest.mark.parametrize("how", HAND_IN)
def test_batches_that_are_micro_steps_end_together_too(counts, how):
    def body(group):
        mine = batches_of(group.rank, counts[group.rank])
        with opened(group, micro_steps=2) as rt:
            joining, seen = rt.join(mine), []
            for at, rows in enumerate(joining):
                hand_in(rt, rows, how, poison=joining.repeating)
                seen.append(len(rows))
                if at % 2:
                    rt.step(weight=seen)
                    seen.clear()
            return weights_of(rt)

    expected = alone(counts, micro_steps=2)
    np.testing.assert_allclose(run_threads(len(counts), body)[0], expected, rtol=OVER_STEPS, atol=OVER_STEPS)


def test_without_weights_only_ranks_with_data_are_averaged():
    def body(group):
        with opened(group) as rt:
            norms = []
            for value in rt.join([1.0, 5.0][: 2 - group.rank]):
                rt.units["line"].reduce({"w": np.full(4, value), "b": np.zeros(1)})
                norms.append(rt.step().grad_norm)
            return norms

    assert run_threads(2, body) == [pytest.approx([2.0, 10.0])] * 2


def test_more_batches_are_asked_for_with_the_agreement():
    """A loop has as many collectives as its steps alone, but for its beginning."""

    def calls(count, *, joined):
        def body(group):
            with opened(group) as rt:
                for _ in rt.join(range(count)) if joined else range(count):
                    hand_in(rt, np.arange(3), "reduce")
                    rt.step()

        zr.trace.reset()
        zr.trace.enable()
        try:
            run_threads(2, body)
            return sum(span.name == "meet" for span in zr.trace.spans())
        finally:
            zr.trace.disable()

    assert calls(7, joined=True) - calls(3, joined=True) == calls(7, joined=False) - calls(3, joined=False) > 0


def test_nobody_has_a_batch():
    def body(group):
        with opened(group) as rt:
            return list(rt.join([]))

    assert run_threads(3, body) == [[], [], []]


def test_one_weight_for_several_batches_is_refused_from_the_first_step_on():
    def body(group):
        with opened(group, micro_steps=2) as rt:
            joining = rt.join(batches_of(group.rank, 4))
            for _ in range(2):
                hand_in(rt, next(joining), "reduce")
            with pytest.raises(CallError, match="each of 2 micro-batches where ranks may compute one again"):
                rt.step(weight=3)

    run_threads(2, body)


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("counts", [(4, 5), (7, 0), (1, 3), (2, 2, 6)])
def test_batches_that_are_leaves_which_ranks_do_not_share_evenly_count_once(counts, accumulate):
    shards = 2 * len(counts) - 1  # one rank has a leaf of a step, the others have two

    def body(group):
        with opened(group, virtual_shards=shards, accumulate=accumulate) as rt:
            batches = [100.0 * group.rank + at + 1 for at in range(counts[group.rank])]
            joining, computed, found = rt.join(batches), [], []
            for batch in joining:
                value = np.nan if joining.repeating else batch  # nobody looks at it
                rt.units["line"].reduce({"w": np.full(4, value), "b": np.zeros(1)})
                computed.append(batch)
                if len(computed) == rt.micro_steps:
                    found.append((rt.step(weight=[1.0] * rt.micro_steps).grad_norm, rt.mean(computed)))
                    computed.clear()
            return len(rt.context.own_micro_batches), batches, found

    told = run_threads(len(counts), body)
    assert sorted(own for own, _, _ in told) == [1] + [2] * (len(counts) - 1)
    expected = []
    for step in range(max(-(-len(batches) // own) for own, batches, _ in told)):
        mean = np.mean([batch for own, batches, _ in told for batch in batches[step * own :][:own]])
        expected.append(pytest.approx((2 * mean, mean), abs=0, rel=1e-12))  # the norm of four equal numbers
    assert [found for _, _, found in told] == [expected] * len(counts)


@pytest.mark.parametrize("wrap", [lambda taking: taking, lambda taking: (X[rows] for rows in taking)])
def test_batches_of_an_order_are_refused(wrap):
    """They would be pulled one ahead, and a checkpoint would lose one."""

    def body(group):
        with opened(group) as rt:
            order = zr.data.Order(length=20, batch=4)
            with pytest.raises(CallError, match=r"leave rt\.join\(\) out"):
                rt.join(wrap(rt.take(order)))
            for rows in rt.take(order):  # nothing is lost
                hand_in(rt, rows, "reduce")
                rt.step(weight=len(rows))
            return rt.updates

    assert run_threads(2, body) == [5, 5]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_loop_that_is_left_drops_nothing_afterwards(is_held):
    def body(group):
        with opened(group) as rt:
            joining = rt.join(batches_of(group.rank, 3 - 2 * group.rank))
            held = [joining] if is_held else []
            for at, rows in enumerate(joining):
                if at:  # rank 1 repeats its only batch
                    break
                hand_in(rt, rows, "reduce")
                rt.step(weight=len(rows))
            del joining
            rt.units["line"].reduce({"w": np.full(4, 1.0 + 2 * group.rank), "b": np.zeros(1)})
            report = rt.step(weight=2)
            for left in held:
                with pytest.raises(CallError, match="one that was left"):
                    next(left)
            return report.weight, report.grad_norm

    assert run_threads(2, body) == [(4.0, pytest.approx(2.0))] * 2


@pytest.mark.parametrize("how", HAND_IN)
def test_a_loop_that_is_left_between_gradients_and_their_step_is_refused(how):
    def body(group):
        with opened(group) as rt:
            for at, rows in enumerate(rt.join(batches_of(group.rank, 3 - 2 * group.rank))):
                hand_in(rt, rows, how)
                if at:
                    break
                rt.step()
            with pytest.raises(UnitStateError, match=r"before a loop of rt.join\(\) is left"):
                rt.join([1])
            with pytest.raises(UnitStateError, match=r"before a loop of rt.join\(\) is left"):
                rt.step()
            hand_in(rt, np.arange(2), how)
            assert rt.step(weight=1).weight == 2
            for rows in rt.join(batches_of(0, 2)):
                hand_in(rt, rows, how)
                break
            rt.discard_gradients()
            hand_in(rt, np.arange(2), how)
            return rt.step(weight=1).weight

    assert run_threads(2, body) == [2.0] * 2


def test_a_second_step_of_a_batch_is_refused():
    """A loop of next() that was given up looks so, and would drop gradients in silence."""

    def body(group):
        with opened(group) as rt:
            joining = rt.join(batches_of(group.rank, 2 - group.rank))
            for _ in range(2):
                hand_in(rt, next(joining), "reduce")
                rt.step()
            hand_in(rt, np.arange(2), "reduce")
            with pytest.raises(UnitStateError, match=r"one batch of rt\.join"):
                rt.step()
            joining.close()
            hand_in(rt, np.arange(2), "reduce")
            assert rt.step().updated

    run_threads(2, body)


@pytest.mark.parametrize("counts", [[3, 1], [0, 2], [4, 4]])
def test_discarded_batches_do_not_end_a_loop(counts):
    def body(group):
        with opened(group) as rt:
            seen = 0
            for at, rows in enumerate(rt.join(batches_of(group.rank, counts[group.rank]))):
                hand_in(rt, rows, "reduce")
                if at % 2:
                    rt.step(weight=len(rows))
                else:
                    rt.discard_gradients()
                seen += 1
            hand_in(rt, np.arange(2), "reduce")
            assert rt.step(weight=1).weight == 2  # behind the loop everything counts again
            return seen, rt.updates

    assert run_threads(2, body) == [(max(counts), max(counts) // 2 + 1)] * 2


@pytest.mark.parametrize("before", [True, False])
def test_the_mean_is_over_batches_that_are_not_repeated(before):
    def body(group):
        with opened(group) as rt:
            found = []
            for value in rt.join([1.0, 2.0, 3.0] if group.rank else [100.0]):
                rt.units["line"].reduce({})
                if before:
                    found.append(rt.mean(value))
                rt.discard_gradients()
                if not before:
                    found.append(rt.mean([value]))
            return [*found, rt.mean(float(group.rank))]

    assert run_threads(2, body) == [[50.5, 2.0, 3.0, 0.5]] * 2


def test_the_mean_over_micro_steps_is_over_those_that_are_not_repeated():
    def body(group):
        with opened(group, micro_steps=2) as rt:
            found, values = [], []
            for value in rt.join([1.0, 2.0, 3.0] if group.rank else [100.0]):
                rt.units["line"].reduce({"w": np.full(4, value), "b": np.zeros(1)})
                values.append(value)
                if len(values) == 2:
                    found.append((rt.mean(values), rt.step().grad_norm))
                    values = []
            return found

    mean = (100.0 + 1.0 + 2.0) / 3
    assert run_threads(2, body) == [[(mean, pytest.approx(2 * mean)), (3.0, pytest.approx(6.0))]] * 2


@pytest.mark.parametrize("count", [0, 2])
def test_a_loop_at_its_end_stays_there(count):
    def body(group):
        with opened(group) as rt:
            joining: Joining[int] = rt.join(range(count))
            assert not joining.repeating
            for _ in joining:
                hand_in(rt, np.arange(3), "reduce")
                rt.step()
            assert rt.updates == count
            return [next(joining, "end"), next(joining, "end"), *joining]

    assert run_threads(2, body) == [["end", "end"]] * 2


def test_what_fails_on_one_rank_is_told_to_all():
    def breaks():
        yield np.arange(2)
        raise OSError("the disk is gone")

    def train(rt, batches):
        for rows in rt.join(batches):
            hand_in(rt, rows, "reduce")
            rt.step()

    def body(group):
        with opened(group) as rt:
            with pytest.raises(Exception, match="not iterable"):
                rt.join(5 if group.rank else [])
            with pytest.raises(CallError, match="can be pickled"):
                rt.join([] if group.rank else [lambda: None])
            with pytest.raises(Exception, match="the disk is gone"):
                train(rt, breaks() if group.rank else batches_of(0, 4))

    run_threads(2, body)


def test_a_loop_without_steps_is_refused():
    def body(group):
        with opened(group) as rt, pytest.raises(UnitStateError, match=r"Expected rt.step\(\) before the next batch"):
            list(rt.join([1, 2]))

    run_threads(1, body)

    def other(group):
        with opened(group, micro_steps=4) as rt:
            joining = rt.join(batches_of(0, 4))
            for _ in range(2):
                next(joining)
                hand_in(rt, np.arange(2), "reduce")
                hand_in(rt, np.arange(2), "reduce")
            with pytest.raises(UnitStateError, match="got 2"):
                rt.step()
            rt.join([1])
            with pytest.raises(CallError, match=r"one loop of rt\.join"):
                next(joining)

    run_threads(1, other)
