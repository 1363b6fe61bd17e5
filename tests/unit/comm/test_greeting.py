"""`Greeter`: calls compared by digest, with data of small ones; ranks are threads, messages go through queues."""

import math

import numpy as np
import pytest

from zerort.comm.geometry import of_all_gather, of_reduce_scatter
from zerort.comm.guard.call import Call
from zerort.comm.transports.greeting import DIFFERS, NEW_PLACE, Greeter, direct_nbytes, small_nbytes
from zerort.comm.transports.messages.network import Network, is_direct, largest_sum, measure
from zerort.comm.transports.small_calls import SmallCalls
from zerort.testing.counted_post import CountedPost

SIZES = [2, 3, 8, 13, 32]
WAYS = pytest.mark.parametrize("direct", [pytest.param(True, id="direct"), pytest.param(False, id="passed-on")])


def greet_all(size, body, *, direct, room=64):
    """Return what ``body(greeter, rank)`` returned on every rank, and the messages."""
    ranks = [10 + 3 * place for place in range(size)]
    post = CountedPost(ranks)

    def run(rank):
        greeter = Greeter(ranks, rank, room=room, direct=direct, trade=post.trade_of(rank))
        return body(greeter, ranks.index(rank))

    return post.run(run), post


def call_of(**facts):
    return Call("all_reduce", "train.py:7", 5, dtype="float32", **facts)


@WAYS
@pytest.mark.parametrize("size", SIZES)
def test_equal_calls_are_agreed_on_in_few_small_messages(size, direct):
    found, post = greet_all(size, lambda greeter, place: greeter.greet(call_of(numel=8), 0)[0], direct=direct)
    assert found == [0] * size
    messages = size - 1 if direct else math.ceil(math.log2(size))
    assert {len(sizes) for sizes in post.sent.values()} == {messages}
    assert max(max(sizes) for sizes in post.sent.values()) <= 32


@WAYS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("odd", [0, 1, -1])
def test_every_rank_hears_of_a_call_that_differs_and_of_a_new_place(size, odd, direct):
    def body(greeter, place):
        is_odd = place == odd % size
        differs = greeter.greet(call_of(numel=9 if is_odd else 8), 0)[0]
        is_new = greeter.greet(call_of(numel=8), NEW_PLACE if is_odd else 0)[0]
        return differs, is_new, greeter.greet(call_of(numel=8), 0)[0]

    assert greet_all(size, body, direct=direct)[0] == [(DIFFERS, NEW_PLACE, 0)] * size


@WAYS
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_data_travels_with_the_greeting_and_may_be_of_any_length(size, direct):
    def body(greeter, place):
        heard = []
        for step in range(3):
            mine = greeter.data(place + step)
            mine[:] = 10 * step + place
            flags, told = greeter.greet(call_of(numel=step), 0, mine.size, most=size - 1 + step)
            heard.append([row[: rank + step].tolist() for rank, row in enumerate(told)])
            assert flags == 0
        return heard

    expected = [[[10 * step + rank] * (rank + step) for rank in range(size)] for step in range(3)]
    found, post = greet_all(size, body, direct=direct)
    assert found == [expected] * size
    if not direct:  # each rank's data passes each rank once, in log2 messages
        rounds = math.ceil(math.log2(size))
        assert {len(sizes) for sizes in post.sent.values()} == {3 * rounds}
        data = {sum(sizes[:rounds]) - 24 * rounds for sizes in post.sent.values()}
        assert data == {(size - 1) * (size - 1)}


@WAYS
def test_a_greeting_with_data_meets_one_without(direct):
    """A rank that makes a small call, and one that makes a large one: both hear of it, and go on."""

    def body(greeter, place):
        if place:
            np.copyto(greeter.data(64), 1)
        first = greeter.greet(call_of(numel=16 if place else 10**9), 0, 64 if place else 0)[0]
        return first, greeter.greet(call_of(numel=1), 0)[0]

    assert greet_all(3, body, direct=direct)[0] == [(DIFFERS, 0)] * 3


def test_the_way_and_the_largest_sum_follow_from_what_messages_cost():
    lan = Network(latency=100e-6, overhead=20e-6, bandwidth=125e6)
    assert [is_direct(lan, hosts) for hosts in (2, 4, 8, 16, 32, 64, 1024)] == [True] * 5 + [False] * 2
    dear = Network(latency=100e-6, overhead=150e-6, bandwidth=125e6)
    assert [is_direct(dear, hosts) for hosts in (2, 8, 9, 16)] == [True, True, False, False]  # of few nothing is asked
    # Two exchanges of four latencies are what rounds take; (hosts - 1) - 2 (hosts - 1) / hosts arrays what they spare.
    for hosts in (3, 4, 16):
        spared = (hosts - 1) - 2 * (hosts - 1) / hosts
        nbytes = largest_sum(lan, hosts, scattered=False)
        assert nbytes * spared / lan.bandwidth == pytest.approx(8 * lan.latency, rel=1e-3)
    assert largest_sum(lan, 2, scattered=False) > 2**40  # on two hosts both move as much
    assert small_nbytes(4, slab_nbytes=2**22, message_nbytes=2**30) == 64 * 1024
    assert small_nbytes(1024, slab_nbytes=2**22, message_nbytes=2**30) == 1024


def test_direct_greetings_carry_more_but_no_more_than_one_rank_should_read_or_one_message_holds():
    def sizes(hosts, *, ranks=2, slab=2**22, message=2**30, bandwidth=1e9, starts_early=True):
        network = Network(latency=100e-6, overhead=20e-6, bandwidth=bandwidth)
        return direct_nbytes(
            hosts, network, ranks=ranks, starts_early=starts_early, slab_nbytes=slab, message_nbytes=message
        )

    assert [sizes(hosts) for hosts in (2, 4, 8)] == [(2**21, 2**21, each) for each in (2**21, 2**20, 2**19)]
    assert sizes(4, ranks=16) == (2**18, 2**18, 2**17)  # 16 arrays of 256 KiB are 4 MiB
    assert sizes(4, ranks=1024) == (2**16, 2**16, 2**16)  # never less than where greetings are passed on
    assert sizes(4, slab=2**17) == (2**17, 2**17, 2**16)
    whole, _, each = sizes(8, message=16 * 1024)
    assert each + 24 <= 16 * 1024
    assert whole // 8 <= each
    # No more than the wire carries in 9 ms, but what takes one exchange anyway; of gathers that begin early half of it.
    slower = [sizes(2, bandwidth=64 * one)[:2] for one in (4e6, 2e6, 1e6)]
    assert slower == [(2**21, 64 * 18_000), (64 * 18_000, 64 * 9_000), (64 * 9_000, 2**19)]
    assert sizes(2, bandwidth=64 * 2e6, starts_early=False)[:2] == (64 * 18_000, 64 * 18_000)


def test_calls_in_which_one_host_has_more_than_a_message_holds_take_rounds():
    members = [[0, 1], [2], [3]]
    small = SmallCalls.of(
        Network(1e-4, 0.0, 1e9), members, slab_nbytes=2**22, message_nbytes=2**30, may_start_early=True
    )
    assert small.is_direct
    assert small.each < small.room

    def is_small(*counts):
        gather = Call("all_gather", "train.py:7", geometry=of_all_gather(counts, 2), numel=counts[2], dtype="float32")
        gather.source, gather.out = np.empty(counts[2], np.float32), np.empty(sum(counts), np.float32)
        scatter = Call(
            "reduce_scatter", "train.py:7", geometry=of_reduce_scatter(counts, 2), numel=sum(counts), dtype="float32"
        )
        scatter.source, scatter.out = gather.out, gather.source
        assert small.has(gather) == small.has(scatter)
        return small.has(gather)

    most = small.each // 4
    assert is_small(most // 2, most // 2, 0, 1)
    assert not is_small(most // 2, most // 2 + 1, 0, 1)  # of the two ranks of one host
    assert not is_small(0, 0, most + 1, 0)
    assert not is_small(*[small.room // 16 + 1] * 4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_measures_what_messages_cost(size):
    post = CountedPost(7 * place for place in range(size))
    found = post.run(lambda rank: measure(post.ranks, rank, post.trade_of(rank)))
    assert all(min(one.latency, one.bandwidth) > 0 <= one.overhead for one in found)
    assert post.is_empty
