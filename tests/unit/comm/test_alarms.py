"""Alarms: every rank learns of every alarm and names the same missing ranks, for O(log n) messages per rank."""

import collections
import math

import pytest

from zerort.comm.transports.messages.alarms import Alarm, Alarms, partners_of


class Network:
    """Ranks whose messages arrive within a millisecond; those in ``silent`` neither hear nor speak."""

    def __init__(self, size, silent=()):
        self.now = 0.0
        self.sent = collections.Counter()
        self.mail = [collections.deque() for _ in range(size)]
        self.ranks = {rank: self._open(rank, size) for rank in range(size) if rank not in silent}

    def _open(self, rank, size):
        def send(to, raw):
            self.sent[rank] += 1
            self.mail[to].append(raw)

        def receive():
            return self.mail[rank].popleft() if self.mail[rank] else None

        return Alarms(rank, size, send=send, receive=receive, clock=lambda: self.now)

    def run(self, seconds, *, stop=lambda: False):
        until = self.now + seconds
        while self.now < until and not stop():
            for alarms in self.ranks.values():
                alarms.exchange()
            self.now += 1e-3


def gave_up(rank, sequence=7):
    return Alarm(rank, sequence, "gave up", "all_reduce(float32[8], sum) at train.py:12")


@pytest.mark.parametrize("size", [2, 3, 5, 8, 100])
def test_one_alarm_reaches_every_rank(size):
    network = Network(size)
    network.ranks[size - 1].sound(Alarm(size - 1, 3, "failed", "KeyError"))
    network.run(0.1)
    for rank, alarms in network.ranks.items():
        assert rank == size - 1 or alarms.known == {size - 1: Alarm(size - 1, 3, "failed", "KeyError")}
    assert max(network.sent.values()) <= len(partners_of(0, size))  # each passes it on once


@pytest.mark.parametrize(("size", "silent"), [(8, [3]), (64, [0, 1, 2, 3, 17]), (100, range(1, 100, 5))])
def test_ranks_that_give_up_name_the_same_missing_ranks_for_log_n_messages(size, silent):
    network = Network(size, silent)
    for at, (rank, alarms) in enumerate(network.ranks.items()):  # not all at the same time
        alarms.sound(gave_up(rank))
        if at % 7 == 0:
            network.run(1e-3)
    network.run(1.0)
    expected = set(network.ranks)
    for rank, alarms in network.ranks.items():
        assert {rank, *alarms.known} == expected
    judge = min(network.ranks)
    network.ranks[judge].judge(rank for rank in range(size) if rank not in expected)
    network.run(0.6)
    assert {alarms.verdict for alarms in network.ranks.values()} == {(judge, frozenset(silent))}
    # A message to each partner for each pause of 1, 2, 4, … ms, at most, and one for the verdict.
    assert max(network.sent.values()) <= 14 * 2 * math.ceil(math.log2(size))


def test_the_lowest_judge_counts_wherever_verdicts_meet():
    network = Network(16)
    network.ranks[9].judge([4])
    network.ranks[2].judge([4, 5])
    network.run(0.5)
    assert {alarms.verdict for alarms in network.ranks.values()} == {(2, frozenset({4, 5}))}


@pytest.mark.parametrize("told", [False, True])
def test_why_a_rank_failed_is_not_overwritten_by_that_it_left(told):
    network = Network(4)
    why = Alarm(2, 3, "failed", "KeyError")
    network.ranks[2].sound(why)
    if told:
        network.run(0.1)
    network.ranks[2].sound(Alarm(2, 4, "left", "{}"))
    network.ranks[2].exchange(last=True)
    network.run(0.1)
    assert all(alarms.known == {2: why} for rank, alarms in network.ranks.items() if rank != 2)
    assert network.sent[2] == len(partners_of(2, 4))  # once


def test_ranks_that_leave_in_order_send_one_round_of_messages():
    """At the end of a job nobody passes on that others have left, unless it has something to say itself."""
    size = 64
    network = Network(size)
    for rank, alarms in network.ranks.items():
        alarms.exchange()
        alarms.sound(Alarm(rank, 9, "left", "{}"))
        alarms.exchange(last=True)
    assert set(network.sent.values()) == {len(partners_of(0, size))}
    network.run(1.0)
    assert set(network.sent.values()) == {len(partners_of(0, size))}


def test_who_gives_up_over_a_rank_that_left_tells_those_who_could_not_hear_it():
    size = 32
    network = Network(size)
    network.ranks[0].sound(Alarm(0, 5, "left", "{}"))
    network.ranks[0].exchange(last=True)
    listener = partners_of(0, size)[0]
    stranger = next(rank for rank in range(1, size) if rank not in partners_of(0, size))
    network.run(0.05)
    assert 0 not in network.ranks[stranger].known
    network.ranks[listener].sound(gave_up(listener, sequence=5))
    network.run(0.1)
    assert network.ranks[stranger].known[0] == Alarm(0, 5, "left", "{}")


def test_the_first_word_of_a_rank_counts():
    network = Network(4)
    network.ranks[1].sound(Alarm(1, 5, "gave up", "barrier()"))
    network.run(0.01)
    network.ranks[1].sound(Alarm(1, 6, "left", "{}"))
    network.run(0.5)
    assert network.ranks[3].known[1].reason == "gave up"
