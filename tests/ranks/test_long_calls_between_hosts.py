"""Long calls between hosts that are made again: they meet in one native step, and gathers follow a plan."""

import dataclasses
import gc
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

from zerort import native
from zerort.comm.transports import hosts_shortcut
from zerort.comm.transports.hierarchical import HierarchicalTransport
from zerort.comm.transports.host_side import SharedHost
from zerort.comm.transports.messages import wire
from zerort.comm.transports.shift import LANDING_SLOTS
from zerort.errors import CollectiveError, CollectiveMismatchError
from zerort.native.rendezvous import MEETING, PARTING
from zerort.native.wire import GREETING

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size == 1, reason="one host")]

RANKS = min(2, max(1, WORLD.size - 1))  # of a host; of two ranks each is one
NEEDS_NATIVE = pytest.mark.skipif(not native.AVAILABLE, reason="only the compiled form has it")
COUNTS = [16_000 + 700 * (r % 3) for r in range(WORLD.size)]  # no two neighbours alike
WHOLE = sum(COUNTS)


def plans(group):
    """Return the plans that the group's calls have."""
    return [known.call.plan for known in group._calls._known.values() if known.call.plan is not None]


def expected_at(step):
    return np.repeat(np.arange(WORLD.size) + np.float64(step), COUNTS)


@pytest.mark.parametrize("reads", [True, False], ids=["in place", "through the host's window"])
@pytest.mark.parametrize("kind", [pytest.param("sockets", marks=NEEDS_NATIVE), "hierarchical", "mpi", "polled"])
def test_gathers_made_again_bring_what_is_there_now(long, kind, reads, connected, monkeypatch):
    part = HierarchicalTransport._part

    def part_slowly(self, call):  # what others receive next must not lie where this rank has yet to copy from
        part(self, call)
        time.sleep(0.0005)

    if WORLD.rank == WORLD.size - 1:
        monkeypatch.setattr(HierarchicalTransport, "_part", part_slowly)
    if kind == "polled":  # as where MPI's functions are not found: mpi4py carries messages
        monkeypatch.setattr(wire, "_find_post", lambda comm: None)
    options = dataclasses.replace(long, cross_memory=reads, sockets="always" if kind == "sockets" else "never")
    with open_hosts(options, ranks=RANKS, kind="mpi" if kind == "mpi" else "hierarchical") as group:
        shared = group.zeros_shared(COUNTS, "float64")
        own, out, window = np.empty(COUNTS[group.rank]), np.empty(WHOLE), group.zeros(WHOLE, "float64")
        place = sum(COUNTS[: group.rank])
        inside = window[place:][: own.size]
        for step in range(4):
            own[:] = shared.mine[:] = inside[:] = group.rank + step
            group.barrier().wait()
            for source, to in ((own, out), (shared.mine, shared.full), (inside, window)):
                to_be = expected_at(step)
                assert (group.all_gather(source, counts=COUNTS, out=to).wait() == to_be).all()
                assert (group.all_gather(source, counts=COUNTS).wait() == to_be).all()
        planned = kind != "polled" and native.AVAILABLE
        assert len(plans(group)) == (len(group._calls._known) - 1 if planned else 0)
        assert all(len(plan) > 2 * LANDING_SLOTS for plan in plans(group))


@NEEDS_NATIVE
def test_a_gather_is_planned_once_and_anew_where_its_arrays_lie_elsewhere(long):
    with open_hosts(long, ranks=RANKS) as group:
        mine, outs = np.empty(COUNTS[group.rank]), [np.empty(WHOLE), np.empty(WHOLE)]

        def gather(step, out=None):
            mine[:] = group.rank + step
            found = group.all_gather(mine, counts=COUNTS, out=out).wait()
            assert (found == expected_at(step)).all()
            return found

        followed = set()
        for step in range(4):
            gather(step, outs[0])
            followed.add(id(plans(group)[0]))
        assert len(followed) == 1
        kept = [gather(step) for step in range(4)]  # each at a place of its own, as long as all are kept
        assert len({found.ctypes.data for found in kept}) == 4
        assert all((found == expected_at(step)).all() for step, found in enumerate(kept))
        for step in range(4):
            gather(step, outs[step % 2])


@NEEDS_NATIVE
def test_a_gather_into_one_place_out_of_many_is_planned_anew_for_each_of_them(long):
    with open_hosts(long, ranks=RANKS) as group:
        shards = [np.full(COUNTS[group.rank], float(group.rank + step)) for step in range(3)]
        for step in [0, 1, 2, 0, 1, 2]:
            found = group.all_gather(shards[step], counts=COUNTS).wait()  # the one array that serves again
            assert (found == expected_at(step)).all()
            del found


@NEEDS_NATIVE
@pytest.mark.parametrize("way", ["always", "never"], ids=["sockets", "MPI"])
@pytest.mark.parametrize("first", [0, 1], ids=["window first", "own array first"])
def test_a_plan_is_for_one_way_in_which_the_ranks_of_a_host_share_their_outs(long, way, first, connected, patient):
    options = dataclasses.replace(long, cross_memory=False, sockets=way)
    with open_hosts(options, ranks=RANKS) as group:
        mine, own, window = np.empty(COUNTS[group.rank]), np.empty(WHOLE), group.zeros(WHOLE, "float64")
        place = sum(COUNTS[: group.rank])
        for step in range(8):
            mine[:] = np.arange(WHOLE)[place:][: mine.size] + step
            # Others of its host can read the second rank's array now and then; theirs they always can. What the others
            # of its host have sent by the plan of the call before must be what they plan now.
            out = own if group.rank == 1 and (step + first) % 2 else window
            assert (group.all_gather(mine, counts=COUNTS, out=out).wait() == np.arange(WHOLE) + step).all()


@NEEDS_NATIVE
@pytest.mark.parametrize("reads", [True, False], ids=["in place", "through the host's window"])
def test_memory_of_rounds_under_way_outlives_a_call_that_was_left(long, reads, monkeypatch):
    """MPI may still write there."""
    if WORLD.size == 2:
        pytest.skip("a host of several ranks")
    options = dataclasses.replace(long, cross_memory=reads, sockets="never")
    group = open_hosts(options, ranks=RANKS)
    landing = weakref.ref(group._transport._landing.base)  # what is mapped, as long as an array in it lives
    shared = len(group._transport._here) > 1

    def interrupted(self, number, landed):
        raise KeyboardInterrupt

    mine, out = np.ones(COUNTS[group.rank]), np.empty(WHOLE)
    assert (group.all_gather(mine, counts=COUNTS, out=out).wait() == 1).all()
    address = weakref.ref(out)
    group.barrier().wait()
    if group.rank == 0:
        monkeypatch.setattr(SharedHost, "deliver", interrupted)
    with pytest.raises(KeyboardInterrupt if group.rank == 0 else CollectiveError):
        group.all_gather(mine, counts=COUNTS, out=out).wait()
    group.close()
    del group, out
    gc.collect()
    assert address() is not None
    assert landing() is not None or not shared


@pytest.mark.parametrize("patience", [30.0, 1e-3], ids=["natively", "by Python, which goes on"])
def test_whoever_comes_late_is_waited_for(long, patience, monkeypatch):
    monkeypatch.setattr(hosts_shortcut, "_PATIENCE", patience)
    monkeypatch.setattr(hosts_shortcut, "_MEETING_PATIENCE", patience)
    monkeypatch.setattr(hosts_shortcut, "LISTEN_EVERY", 1e6)  # a look at alarms is Python's, too
    stages, resume = set(), HierarchicalTransport.resume

    def noted(self, call, progress):
        stages.add(progress - progress % 8)
        resume(self, call, progress)

    monkeypatch.setattr(HierarchicalTransport, "resume", noted)
    with open_hosts(long, ranks=RANKS) as group:
        group._transport.listened_at = time.monotonic()
        source, total, part = np.empty(WHOLE), np.empty(WHOLE), np.empty(COUNTS[group.rank])
        sum_of = group.size * (group.size + 1) / 2
        for late in [-1, -1, *range(group.size)]:
            for call in (
                lambda: group.all_reduce(source, out=total),
                lambda: group.reduce_scatter(source, counts=COUNTS, out=part),
                lambda: group.all_gather(part, counts=COUNTS, out=total),
            ):
                source[:] = group.rank + 1.0
                if group.rank == late:
                    time.sleep(0.01)
                assert (call().wait() == sum_of).all()
        if native.AVAILABLE:
            assert stages == {hosts_shortcut.SERVING} if patience > 1 else stages & {MEETING, GREETING, PARTING}


def test_long_calls_that_differ_leave_every_out_as_it_was_and_the_group_usable(long):
    with open_hosts(long, ranks=RANKS) as group:
        mine, out, other = np.ones(COUNTS[group.rank]), np.empty(WHOLE), np.ones(2 * COUNTS[group.rank])

        def agreed():
            return group.all_gather(mine, counts=COUNTS, out=out).wait()

        def differing():
            return group.all_gather(other, counts=[2 * count for count in COUNTS]).wait()

        for odd in (0, group.size - 1):
            for _ in range(3):
                assert (agreed() == 1).all()
            out[:] = 7
            call = differing if group.rank == odd else agreed
            with pytest.raises(CollectiveMismatchError) as told:
                call()
            assert str(told.value).count("test_long_calls_between_hosts.py:") >= 2
            assert (out == 7).all()
