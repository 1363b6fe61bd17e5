"""The schedule between hosts: every piece crosses once in each step, for any hosts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerort.comm.transports.carrier import piece_nbytes
from zerort.comm.transports.messages.network import Network
from zerort.comm.transports.node.memory import slab_nbytes
from zerort.comm.transports.shift import DEPTH, Topology, plan_rounds
from zerort.config import GroupOptions

HOSTS = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(
    lambda ranks: [host for host, many in enumerate(ranks) for _ in range(many)]
)


@given(HOSTS, st.randoms(use_true_random=False))
def test_every_rank_has_one_partner_on_each_host_and_they_share_evenly(hosts, random):
    random.shuffle(hosts)
    topology = Topology(hosts)
    for rank, host in itertools.product(range(len(hosts)), range(topology.count)):
        partner = topology.partner(host, rank)
        assert topology.host_of[partner] == host
        assert rank in topology.served(partner, topology.host_of[rank])
    for rank, host in itertools.product(range(len(hosts)), range(topology.count)):
        here, there = (len(topology.members[at]) for at in (topology.host_of[rank], host))
        assert len(topology.served(rank, host)) in (there // here, -(-there // here))


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 20))
def test_rounds_carry_every_element_once_in_each_step(longest, hosts, piece):
    rounds = list(plan_rounds(longest, steps=[*range(1, hosts), 0], piece=piece))
    units = [unit for one in rounds for unit in one]
    for step in range(hosts):
        covered = [at for unit in units if unit.step == step for at in range(unit.done, unit.done + unit.numel)]
        assert covered == list(range(longest))
    assert all(sum(unit.numel for unit in one) <= piece for one in rounds)
    full = [one for one in rounds if len(one) == 1 and one[0].numel == piece]
    assert len(full) >= longest // piece * hosts  # long pieces are not cut by packing


@given(st.integers(0, 50), st.permutations(range(6)), st.integers(1, 20))
def test_a_piece_is_through_when_its_last_step_is(longest, steps, piece):
    units = [unit for one in plan_rounds(longest, steps=steps, piece=piece) for unit in one]
    for done, found in itertools.groupby(units, lambda unit: unit.done):
        assert [unit.step for unit in found] == steps, done


@pytest.mark.parametrize("step", [1, 5, 63])
def test_in_a_step_every_host_hears_one_other(step):
    topology = Topology([rank // 2 for rank in range(128)])
    heard = Counter(topology.ahead(members[0], step) for members in topology.members)
    assert set(heard.values()) == {1}
    assert all(
        topology.behind(topology.members[topology.ahead(r, step)][0], step) == topology.host_of[r] for r in (0, 77)
    )


FAST = Network(latency=10e-6, overhead=2e-6, bandwidth=5e9)
GIGABIT = Network(latency=100e-6, overhead=20e-6, bandwidth=125e6)


def message_nbytes(hosts, ranks, network=FAST):
    """Return the bytes of a message between hosts of so many ranks."""
    topology, options = Topology([host for host in range(hosts) for _ in range(ranks)]), GroupOptions()
    slab = slab_nbytes(options.staging_nbytes, ranks)
    return piece_nbytes(topology, network, exchange_nbytes=options.exchange_nbytes, slab_nbytes=slab)


def test_messages_are_as_large_as_the_ranks_of_a_host_can_stage():
    nbytes = message_nbytes
    assert [nbytes(hosts, 2) for hosts in (2, 4, 8, 64, 512)] == [512 * 1024] * 3 + [65536] * 2
    assert [nbytes(2, ranks) for ranks in (1, 4, 8, 64)] == [
        1024**2,
        256 * 1024,
        256 * 1024,
        4096,
    ]  # of 64, slabs are less


def test_messages_take_a_slow_wire_no_longer_than_what_they_hide():
    assert [message_nbytes(8, ranks, GIGABIT) for ranks in (1, 2, 4)] == [65536] * 3
    quick = dataclasses.replace(GIGABIT, bandwidth=1.25e9)
    assert [message_nbytes(4, ranks, quick) for ranks in (1, 2, 8)] == [14 * 65536, 7 * 65536, 65536]
    assert message_nbytes(2, 1, Network(0.0, 0.0, math.inf)) == message_nbytes(2, 1)  # nobody measured it


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rounds_under_way_fill_a_far_wire_there_and_back(ranks):
    far = dataclasses.replace(GIGABIT, latency=10e-3)
    assert DEPTH * ranks * message_nbytes(2, ranks, far) >= 2 * far.latency * far.bandwidth - DEPTH * ranks * 65536
    assert message_nbytes(2, ranks, far) >= 2 * message_nbytes(2, ranks, GIGABIT)
    assert message_nbytes(2, ranks, dataclasses.replace(far, latency=10.0)) <= GroupOptions().exchange_nbytes // 4
    busy = dataclasses.replace(far, round_trip=2 * GIGABIT.latency)  # near, but its ranks seldom look
    assert message_nbytes(2, ranks, busy) == message_nbytes(2, ranks, GIGABIT)
    assert message_nbytes(2, ranks, dataclasses.replace(GIGABIT, round_trip=20e-3)) == message_nbytes(2, ranks, far)
