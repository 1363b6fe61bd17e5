"""The ranks of a host share the work of talking to other hosts, also where hosts differ in size ([Note: partners])."""

import dataclasses

import numpy as np
import pytest
from mpi4py import MPI

from zerort.comm import Group
from zerort.comm.bootstrap.opening import best_transport
from zerort.comm.transports.messages.exchange import Exchange

WORLD = MPI.COMM_WORLD
NUMEL = 10
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size == 1, reason="two hosts")]

HOSTS = {
    "interleaved": [rank % 2 for rank in range(WORLD.size)],  # 1+1, 2+1, 2+2, 4+4
    "one larger": [int(rank >= WORLD.size // 2 + (WORLD.size > 2)) for rank in range(WORLD.size)],  # 2+1, 3+1, 5+3
    "of one": [min(rank, 2) for rank in range(WORLD.size)],  # 1+1, 1+1+1, 1+1+2, 1+1+6
}


@pytest.fixture(params=HOSTS.values(), ids=HOSTS)
def group(request, options, monkeypatch):
    """A group over hosts, and what this rank sends to other hosts: (to, elements)."""
    hosts = request.param
    machine = WORLD.Split(hosts[WORLD.rank], WORLD.rank)
    options = dataclasses.replace(options, message_nbytes=128)  # else the data of these calls travels with the greeting
    sent, start, plan = [], Exchange.start, Exchange.plan

    def note(sends):
        sent.extend((to, array.size) for to, array in sends if array.size)

    def started(exchange, sends, receives, **call):
        note(sends := list(sends))
        return start(exchange, sends, receives, **call)

    def planned(exchange, rounds, **how):  # of a call that is made once
        for sends, _, _ in rounds:
            note(sends)
        return plan(exchange, rounds, **how)

    monkeypatch.setattr(Exchange, "start", started)
    monkeypatch.setattr(Exchange, "plan", planned)
    transport = best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine)
    with Group(transport) as opened:
        yield opened, hosts, sent


def test_each_rank_sends_its_own_shard_once_to_each_other_host(group):
    group, hosts, sent = group
    whole = group.all_gather(np.full(NUMEL, float(group.rank)), eager=False).wait()
    assert (whole == np.repeat(np.arange(group.size), NUMEL)).all()
    others = set(hosts) - {hosts[group.rank]}
    assert sorted(hosts[to] for to, _ in sent) == sorted(others)
    assert all(numel == NUMEL for _, numel in sent)


def test_each_rank_receives_its_own_sums_once_from_each_other_host(group):
    group, hosts, sent = group
    source = np.repeat(np.arange(group.size, dtype=np.float64), NUMEL) + group.rank
    mine = group.reduce_scatter(source, eager=False).wait()
    assert (mine == group.rank * group.size + sum(range(group.size))).all()
    everyone = [(hosts[rank], to) for rank, one in enumerate(WORLD.allgather(sent)) for to, _ in one]
    assert sorted(everyone) == sorted((host, to) for to in range(group.size) for host in set(hosts) - {hosts[to]})
    # Nobody serves more of another host's ranks than an even share.
    for host in set(hosts) - {hosts[group.rank]}:
        served = [to for to, _ in sent if hosts[to] == host]
        assert len(served) <= -(-hosts.count(host) // hosts.count(hosts[group.rank]))


def test_a_long_broadcast_leaves_each_host_at_most_once(group):
    group, hosts, sent = group
    numel = 100_003
    array = np.arange(numel, dtype=np.float64) if group.rank == group.size - 1 else np.zeros(numel)
    got = group.broadcast(array, root=group.size - 1).wait()
    assert (got == np.arange(numel)).all()
    left = [0] * len(set(hosts))
    for rank, one in enumerate(WORLD.allgather(sent)):
        left[sorted(set(hosts)).index(hosts[rank])] += sum(count for _, count in one)
    assert sorted(left) == [0] + [numel] * (len(left) - 1)


def test_the_wire_does_not_pause_between_the_sums_of_an_all_reduce_and_their_gather(group, monkeypatch):
    group, _, _ = group
    exchange, numel = group._transport._exchange, 100_003
    start, finish = exchange.start, exchange.finish
    under_way, least = [], []  # messages; how many rounds that send were under way when another began

    def started(sends, receives, **call):
        least.append(len(under_way))
        messages = start(sends, receives, **call)
        under_way.extend([messages] * bool(messages.sends or messages.receives))
        return messages

    def finished(messages, **call):
        finish(messages, **call)
        under_way[:] = [one for one in under_way if one is not messages]

    monkeypatch.setattr(exchange, "start", started)
    monkeypatch.setattr(exchange, "finish", finished)
    source = np.arange(numel, dtype=np.float64) + group.rank
    expected = group.size * np.arange(numel, dtype=np.float64) + sum(range(group.size))
    assert (group.all_reduce(source, out=source).wait() == expected).all()
    assert least[0] == 0
    assert min(least[1:]) > 0
