"""What crosses the wire between hosts, over a wire that reads a message when it is taken, as MPI and sockets may."""

import collections
import threading
import time
import types

import numpy as np
import pytest

from zerort.comm.transports.carrier import Carrier
from zerort.comm.transports.host_side import SharedHost
from zerort.comm.transports.shift import LANDING_SLOTS, Topology

PIECE, SOON = 64, 60.0


class LateWire:
    """Messages between threads, whose memory is read when the receiver takes them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._under_way = collections.defaultdict(collections.deque)

    def start_of(self, rank):
        def start(sends, receives, call):
            sent = [{"from": array, "has_left": False} for _, array in sends]
            with self._changed:
                for (to, _), message in zip(sends, sent, strict=True):
                    self._under_way[rank, to].append(message)
                self._changed.notify_all()
            return sent, receives

        return start

    def finish_of(self, rank, *, late):
        def finish(messages, call):
            sent, receives = messages
            for source, room in receives:
                time.sleep(late)  # the others run ahead meanwhile
                with self._changed:
                    assert self._changed.wait_for(lambda came=self._under_way[source, rank]: came, SOON)
                    message = self._under_way[source, rank].popleft()
                    np.copyto(room, message["from"])
                    message["has_left"] = True
                    self._changed.notify_all()
            with self._changed:
                assert self._changed.wait_for(lambda: all(one["has_left"] for one in sent), SOON)

        return finish


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 9])
def test_a_long_broadcast_waits_for_a_slow_host_where_ranks_cannot_read_each_other(ranks):
    hosts, pieces = 3, 40
    topology, wire = Topology([host for host in range(hosts) for _ in range(ranks)]), LateWire()
    doors = [threading.Barrier(ranks) for _ in range(hosts)]
    landings = [np.zeros(LANDING_SLOTS * ranks * PIECE, np.uint8) for _ in range(hosts)]
    source = np.repeat(np.arange(pieces, dtype=np.uint8), PIECE)
    outs = np.full((ranks * hosts, source.size), 255, np.uint8)
    node = types.SimpleNamespace(
        sources_are_readable=lambda: True, one_out=lambda: False, outs_are_readable=lambda: False
    )

    def work(rank):
        host, call = topology.host_of[rank], types.SimpleNamespace(root=0)
        places = {"node": node, "topology": topology, "rank": rank, "landing": landings[host]}
        side = SharedHost(call, source, outs[rank], **places, part=lambda: doors[host].wait(SOON))
        finish = wire.finish_of(rank, late=0.002 if host == hosts - 1 else 0.0)
        carrier = Carrier(rank, topology, nbytes=PIECE, start=wire.start_of(rank), finish=finish)
        carrier.chain(source, outs[rank], call, side)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks * hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outs == source).all()
