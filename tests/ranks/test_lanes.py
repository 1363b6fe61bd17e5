"""A host's ranks share the work of talking to other hosts, also where hosts differ in size ([Note: lanes])."""

import numpy as np
import pytest
from mpi4py import MPI

from zerort.comm import Group
from zerort.comm.bootstrap.opening import best_transport

WORLD = MPI.COMM_WORLD
NUMEL = 10
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size == 1, reason="two hosts")]

HOSTS = {
    "interleaved": [rank % 2 for rank in range(WORLD.size)],  # 1+1, 2+1, 2+2, 4+4
    "one larger": [int(rank >= WORLD.size // 2 + (WORLD.size > 2)) for rank in range(WORLD.size)],  # 2+1, 3+1, 5+3
}


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_each_shard_leaves_its_host_once_and_the_ranks_of_a_host_take_turns(options, hosts, monkeypatch):
    machine = WORLD.Split(hosts[WORLD.rank], WORLD.rank)
    transport = best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine)
    sent = []
    swap = transport.swap

    def noted(sends, receives, call):
        sent.extend(array.size for _, array in sends)
        swap(sends, receives, call)

    monkeypatch.setattr(transport, "swap", noted)
    home = [rank for rank in range(WORLD.size) if hosts[rank] == hosts[WORLD.rank]]
    talkers = home[: min(hosts.count(host) for host in set(hosts))]
    served = [rank for at, rank in enumerate(home) if talkers[at % len(talkers)] == WORLD.rank]
    with Group(transport) as group:
        whole = group.all_gather(np.full(NUMEL, float(group.rank)), eager=False).wait()
        assert (whole == np.repeat(np.arange(group.size), NUMEL)).all()
        assert sent == [NUMEL] * len(served)  # to the other host
        assert f"{len(talkers)} lanes" in repr(group)
