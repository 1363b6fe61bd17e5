"""`decide`: shares and shards by measured times, near the ideal, without flapping, within memory."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zerort.data import Share
from zerort.engine.rebalance.deciding import LEAST_STEPS, Measured, Place, Situation, decide
from zerort.layout import Partition

MIB = 1 << 20
SPEEDS = st.lists(st.floats(0.2, 5.0), min_size=2, max_size=8)


def measure(batch, update, *, shares, shards, samples=10_000, steps=32, error=0.0):
    """Return what ranks measure that take ``batch`` and ``update`` seconds for all of either."""
    return tuple(
        Measured(
            steps=steps,
            compute=seconds * share,
            update=work * shards[rank % len(shards)],
            error=error,
            samples=samples * share,
        )
        for rank, (seconds, work, share) in enumerate(zip(batch, update, shares, strict=True))
    )


def situation(batch, update=None, *, shares=None, shards=None, copies=1, **other):
    size = len(batch)
    shares = shares or (1 / size,) * size
    shards = shards or (copies / size,) * (size // copies)
    update = update or [0.0] * size
    ranks = measure(
        batch, update, shares=shares, shards=shards, **{k: other.pop(k) for k in ("error", "steps") if k in other}
    )
    return Situation(ranks=ranks, shares=shares, shards=shards, **other)


def seconds(batch, update, shares, shards):
    each = [
        c * s + u * shards[at % len(shards)] for at, (c, u, s) in enumerate(zip(batch, update, shares, strict=True))
    ]
    return max(each)


def taken(now, decision):
    return decision.shares or now.shares, decision.shards or now.shards


@given(SPEEDS)
def test_a_step_takes_at_most_a_tenth_more_than_the_ideal(batch):
    now = situation(batch)
    shares, shards = taken(now, decide(now))
    assert shards == now.shards
    assert math.isclose(sum(shares), 1.0, abs_tol=1e-3)
    assert seconds(batch, [0.0] * len(batch), shares, shards) <= 1.10 / sum(1 / one for one in batch)


@given(SPEEDS, st.floats(0.05, 3.0))
def test_updates_follow_the_speed_of_ranks_where_moves_are_cheap(batch, work):
    update = [work * one for one in batch]
    now = situation(batch, update, nbytes=MIB)
    shares, shards = taken(now, decide(now))
    assert seconds(batch, update, shares, shards) <= 1.10 * (1 + work) / sum(1 / one for one in batch)


@given(SPEEDS, st.floats(0.05, 3.0), st.integers(1, 1000), st.floats(1e3, 1e12))
def test_no_move_costs_more_than_it_saves_in_so_many_steps(batch, work, payback_steps, nbytes):
    update = [work * one for one in batch]
    now = situation(batch, update, nbytes=int(nbytes), payback_steps=payback_steps)
    decision = decide(now)
    assume(decision.shards is not None)
    stays = decide(replace(now, fixed_shards="for comparison"))
    saved = seconds(batch, update, *taken(now, stays)) - seconds(batch, update, *taken(now, decision))
    cuts = [Partition.build(1 << 16, len(batch), weights=one) for one in (now.shards, decision.shards)]
    moved = sum(one.stop - one.first for one in cuts[0].reshard(cuts[1]) if one.source != one.target) / (1 << 16)
    assert saved * payback_steps > 0.99 * moved * nbytes / now.bytes_per_second


@given(SPEEDS, st.floats(0.05, 3.0))
def test_what_was_decided_is_not_decided_again(batch, work):
    update = [work * one for one in batch]
    now = situation(batch, update, nbytes=MIB)
    shares, shards = taken(now, decide(now))
    assume(min(shares) > 0.001)  # a rank with nothing to do has nothing to measure
    again = decide(situation(batch, update, shares=shares, shards=shards, nbytes=MIB))
    assert (again.shares, again.shards) == (None, None)
    assert again.why.startswith("kept: a step would take")


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_noise_does_not_flap(ranks):
    """Jitter of a tenth, windows of 8 to 64 steps: ranks of one speed stay as they are, a slow one is soon settled."""
    rng = np.random.default_rng(ranks)
    for batch in ([1.0] * ranks, [2.0, *[1.0] * (ranks - 1)]):
        shares, changes = (1 / ranks,) * ranks, 0
        for round in range(100):
            steps = int(rng.integers(LEAST_STEPS, 65))
            times = np.median(rng.lognormal(0, 0.1, (steps, ranks)), axis=0) * batch
            now = situation(times.tolist(), shares=shares, error=1.25 * 0.1 / math.sqrt(steps), steps=steps)
            decision = decide(now)
            shares, _ = taken(now, decision)
            changes += decision.shares is not None
            if round == 0 and batch[0] == 2.0:
                assert decision.shares is not None
                assert shares[0] < 0.75 * shares[1]
        assert changes <= 3 * (batch[0] == 2.0), (ranks, batch[0])


def counts(shares, batch):
    """Return how many samples of a batch each rank takes."""
    size = len(shares)
    parts = [Share(parts=size, mine=(rank,), weights=shares).of(batch)[0] for rank in range(size)]
    return [end - begin for begin, end in parts]


@given(st.lists(st.sampled_from([1.0, 3.0, 400.0, 1e5]), min_size=2, max_size=8), st.integers(8, 50_000))
def test_no_rank_is_left_without_a_sample_and_one_that_recovers_gets_its_share_again(slow, batch):
    shares = (1 / len(slow),) * len(slow)
    for speeds in (slow, [1.0] * len(slow)):
        taken = counts(shares, batch)
        assert min(taken) >= 1
        ranks = tuple(
            Measured(steps=20, compute=0.01 * n * one, update=0.0, samples=float(n))
            for n, one in zip(taken, speeds, strict=True)
        )
        total = math.fsum(shares)
        now = Situation(ranks=ranks, shares=tuple(one / total for one in shares), shards=(1 / len(slow),) * len(slow))
        shares = decide(now).shares or shares
    assert max(counts(shares, batch)) <= 1.1 * batch / len(slow) + 2


def test_too_few_steps_decide_nothing():
    assert decide(situation([1.0, 9.0], steps=LEAST_STEPS - 1)).why == (
        f"kept: {LEAST_STEPS - 1} steps were measured since the last change, {LEAST_STEPS} are needed"
    )


def test_shares_that_may_not_change_leave_shards_to_relieve_a_slow_rank():
    now = situation([2.0, 1.0], [1.0, 1.0], fixed_shares="no order is taken", nbytes=MIB)
    decision = decide(now)
    assert decision.shares is None
    assert decision.shards == (0.25, 0.75)  # 1 + 0.25 on one, 0.5 + 0.75 on the other
    assert decision.seconds_then == pytest.approx(1.25)
    assert decision.why.startswith("shards relieve who computes longest, which moves 256KiB; rank 0 takes 1.5 s")
    kept = decide(replace(now, nbytes=1 << 40))
    assert kept.shards is None
    assert "a move of 275 s would save 0.25 s in each of 100 steps" in kept.why


@pytest.mark.parametrize("work", [0.0, 1e-9])
def test_updates_that_take_no_time_move_nothing(work):
    now = situation([1e5, 3e4], [work, work], nbytes=MIB, payback_steps=10**9)
    decision = decide(now)
    assert decision.shards is None
    assert decision.shares == pytest.approx((3 / 13, 10 / 13), abs=1e-3)


def test_copies_of_the_model_have_the_shards_of_their_slowest_rank():
    decision = decide(situation([1.0, 1.0, 1.0, 3.0], [0.0, 1.0, 1.0, 3.0], copies=2, fixed_shares="none", nbytes=1))
    assert decision.shards is not None
    assert len(decision.shards) == 2
    assert decision.shards[1] < decision.shards[0]


@given(
    SPEEDS,
    st.lists(st.integers(0, 2000), min_size=8, max_size=8),
    st.integers(1, 3),
)
def test_shards_grow_only_where_there_is_room(batch, left, hosts):
    update = [5 * one for one in batch]
    size = len(batch)
    places = tuple(
        Place(
            name=f"host {host}",
            ranks=tuple(range(host, size, hosts)),
            free=left[host] * MIB,
            whole=1000 * MIB,
            largest=100 * MIB,
        )
        for host in range(min(hosts, size))
    )
    now = situation(batch, update, nbytes=1000 * MIB, places=places, payback_steps=10**6)
    _, shards = taken(now, decide(now))
    assert math.isclose(sum(shards), 1.0, abs_tol=1e-3)
    for place in places:
        growth = place.held(shards) - place.held(now.shards)
        assert growth <= max(place.free - 0.15 * place.held(now.shards), 1e-6)


def test_a_memory_that_is_nearly_full_gives_shards_away_once():
    def places(free):
        return tuple(
            Place(name=f"memory of n{rank}", ranks=(rank,), free=free[rank], whole=900 * MIB) for rank in range(3)
        )

    now = situation([1.0] * 3, [1.0] * 3, nbytes=900 * MIB, places=places([10 * MIB, 400 * MIB, 400 * MIB]))
    decision = decide(now)
    assert decision.shards == pytest.approx((0.85 / 3, 1.075 / 3, 1.075 / 3))
    assert decision.why == "memory of n0 has 10MiB left"
    freed = [10 * MIB + 45 * MIB, 377 * MIB, 377 * MIB]
    after = situation([1.0] * 3, [1.0] * 3, shards=decision.shards, nbytes=900 * MIB, places=places(freed))
    assert decide(after).shards is None
    nobody = replace(now, places=places([10 * MIB] * 3))
    assert decide(nobody).shards is None
    assert decide(nobody).why.endswith("; memory of n0 has 10MiB left: no other shards find room")


def test_relief_deals_no_shares_from_few_steps_and_waits_before_it_goes_on():
    places = (
        Place(name="rank 0", ranks=(0,), free=0, whole=1000 * MIB),
        Place(name="rank 1", ranks=(1,), free=10_000 * MIB, whole=1000 * MIB),
    )
    early = situation([1.0, 2.0], steps=1, places=places, nbytes=1000 * MIB)
    decision = decide(early)
    assert (decision.shares, decision.relieves) == (None, True)
    assert decision.shards == pytest.approx((0.425, 0.575))
    assert decide(replace(early, ranks=situation([1.0, 2.0]).ranks)).shares == pytest.approx((2 / 3, 1 / 3), abs=1e-3)
    waiting = decide(replace(early, since_relief=LEAST_STEPS - 1))
    assert waiting.why.startswith("kept: 1 steps were measured")
    assert waiting.why.endswith("; rank 0 has 0B left: gave shards away 7 updates ago")
    assert decide(replace(early, since_relief=LEAST_STEPS)).relieves


def test_a_memory_needs_room_for_what_is_made_anew_even_if_it_holds_less_then():
    one = Place(name="a host", ranks=(0, 1), free=60 * MIB, whole=600 * MIB, largest=100 * MIB)
    assert not one.allows((0.5, 0.5), (0.6, 0.4))  # 100 beside what is there, for a while
    assert replace(one, free=100 * MIB).allows((0.5, 0.5), (0.6, 0.4))
    alone = replace(one, ranks=(0,))
    assert alone.allows((0.5, 0.5), (0.4, 0.6))
    assert not replace(alone, keeps_old=True).allows((0.5, 0.5), (0.4, 0.6))
    assert replace(alone, keeps_old=True, free=240 * MIB).allows((0.5, 0.5), (0.4, 0.6))
