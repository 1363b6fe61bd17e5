"""Long calls between hosts that are made again: they meet in one native step, and gathers follow a plan."""

import contextlib
import dataclasses
import gc
import mmap
import os
import socket
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

from zerort import native
from zerort.comm.transports import carrier, hosts_shortcut, small_calls
from zerort.comm.transports.hierarchical import HierarchicalTransport
from zerort.comm.transports.host_side import SharedHost
from zerort.comm.transports.messages import wire
from zerort.comm.transports.rounds import PlannedGather
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


@pytest.fixture
def long(options, monkeypatch):
    """Pieces of some KiB: a call of these arrays takes many rounds, and slots of a landing are filled many times."""
    monkeypatch.setattr(carrier, "_IN_PLACE_NBYTES", 8 * 1024)
    return dataclasses.replace(options, staging_nbytes=8 * 1024, exchange_nbytes=16 * 1024)


@pytest.fixture
def patient(monkeypatch):
    """The native step waits for whoever is late: nothing is left to Python because a machine is busy."""
    monkeypatch.setattr(hosts_shortcut, "_PATIENCE", 30.0)
    monkeypatch.setattr(hosts_shortcut, "_MEETING_PATIENCE", 30.0)


def aheads(group):
    """Return what sends the first rounds of the group's calls before all have agreed on them."""
    return [known.call.ahead for known in group._calls._known.values() if known.call.ahead is not None]


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


@pytest.fixture
def at_large(options, monkeypatch):
    """Pieces of 256 KiB and more: what is sent ahead is longer than what `keep_little_in_kernels` lets leave."""
    monkeypatch.setattr(carrier, "_ROUND_SECONDS", 60.0)
    return dataclasses.replace(options, staging_nbytes=2**23, exchange_nbytes=2**23, message_nbytes=2**23)


def keep_little_in_kernels(group):
    """Have kernels take no more than some hundred KiB of what nobody reads."""
    group._transport._exchange.wire.sockets.limit_buffers(64 * 1024)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.type == socket.SOCK_STREAM:  # whoever listens hands it on to those who come
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)


def noted_plans(monkeypatch):
    """Return what each plan that is followed notes: whether its first sends have left before."""
    notes, run = [], PlannedGather.run

    def noted(self, call, side):
        notes.append(call.ahead is not None and call.ahead.call == call.sequence)
        run(self, call, side)

    monkeypatch.setattr(PlannedGather, "run", noted)
    return notes


@NEEDS_NATIVE
@pytest.mark.parametrize("direct", [True, False], ids=["each greets all", "passed on"])
@pytest.mark.parametrize("way", ["always", "never"], ids=["sockets", "MPI"])
def test_what_a_gather_sends_first_leaves_before_all_have_agreed_where_nothing_needed_waits_behind_it(
    long, way, direct, connected, patient, monkeypatch
):
    monkeypatch.setattr(small_calls, "is_direct", lambda network, hosts: direct)
    with open_hosts(dataclasses.replace(long, sockets=way), ranks=RANKS) as group:
        mine, out = np.empty(COUNTS[group.rank]), np.empty(WHOLE)
        notes = noted_plans(monkeypatch)
        for step in range(5):
            mine[:] = group.rank + step
            assert (group.all_gather(mine, counts=COUNTS, out=out).wait() == expected_at(step)).all()
        assert notes == [False] + [way == "always" and direct] * 4  # the first call has no plan until all have agreed


@NEEDS_NATIVE
@pytest.mark.parametrize("fits", [True, False], ids=["all has left", "the kernel takes no more"])
@pytest.mark.parametrize("odd", [0, -1], ids=["the first", "the last"])
def test_what_left_for_a_call_that_differs_is_nobodys(at_large, odd, fits, connected, patient):
    numel = 40_000 if fits else 250_000
    with open_hosts(dataclasses.replace(at_large, sockets="always"), ranks=RANKS) as group:
        n, mine = group.size, np.empty(numel)
        if not fits:
            keep_little_in_kernels(group)
        out, small = np.empty(n * numel), np.empty(n)
        transport = group._transport
        transport.small = dataclasses.replace(transport.small, gathers=1024)  # of longer ones each has a plan
        hosts = transport.topology.host_of
        sends = hosts[group.rank] != hosts[odd % n]  # in the odd one's host the calls differ before

        def agreed(value):
            mine[:] = group.rank + value
            return group.all_gather(mine, out=out).wait().reshape(n, numel)

        for value in range(4):
            assert (agreed(value) == np.arange(n)[:, None] + value).all()
            for _ in range(2 * value):  # several times in turn, and not at all
                before, (ahead,) = out.copy(), aheads(group)
                made = ahead.call or 0
                call = (lambda: group.all_gather(mine[:10]).wait()) if group.rank == odd % n else lambda: agreed(-100)
                with pytest.raises(CollectiveMismatchError):
                    call()
                assert (ahead.call or 0) > made if sends else (ahead.call or 0) == made
                assert (out == before).all()
            for again in range(2):  # a small call, where what nobody wanted is found by those who greet
                small[:] = group.rank + again
                assert group.all_reduce(small).wait()[0] == sum(range(n)) + n * again
            assert (agreed(value + 0.5) == np.arange(n)[:, None] + value + 0.5).all()


@NEEDS_NATIVE
@pytest.mark.parametrize("eager_nbytes", [0, 2**62], ids=["queued", "at once"])
def test_memory_that_has_not_left_is_the_callers_again_when_calls_differ(at_large, eager_nbytes, connected, patient):
    numel = 250_000
    with open_hosts(dataclasses.replace(at_large, sockets="always"), ranks=RANKS) as group:
        group._calls._eager_nbytes = eager_nbytes
        keep_little_in_kernels(group)  # most of it does not leave at once
        n, out = group.size, np.empty(WORLD.size * numel)

        def gather(mine, value):
            mine[:] = group.rank + value
            return group.all_gather(mine, out=out).wait().reshape(n, numel)

        memories = [mmap.mmap(-1, 8 * numel) for _ in range(3)]  # none where another was
        for step, memory in enumerate(memories):
            mine = np.frombuffer(memory)
            for value in range(step, step + 3):
                assert (gather(mine, value) == np.arange(n)[:, None] + value).all()
            ahead = max(aheads(group), key=lambda one: one.call or 0)
            made = ahead.call or 0
            with pytest.raises(CollectiveMismatchError):
                gather(mine, -1) if group.rank >= RANKS else group.barrier().wait()
            assert ((ahead.call or 0) > made) == (group.rank >= RANKS)
            del mine
            gc.collect()
            memory.close()  # who still sends from there breaks the connection
        mine = np.empty(numel)
        assert (gather(mine, 7) == np.arange(n)[:, None] + 7).all()


@NEEDS_NATIVE
def test_a_gather_ends_when_what_it_sent_first_has_left_too(options, connected, monkeypatch):
    counts = [60_000 if r < RANKS else 100 for r in range(WORLD.size)]
    with open_hosts(dataclasses.replace(options, sockets="always"), ranks=RANKS) as group:
        group._transport.small = dataclasses.replace(group._transport.small, gathers=1024)
        run = PlannedGather.run

        def late(self, call, side):
            time.sleep(0.2)
            run(self, call, side)

        if group.rank < RANKS:
            keep_little_in_kernels(group)
        else:  # others have all of this rank's, which fits the kernel, before it reads any of theirs
            monkeypatch.setattr(PlannedGather, "run", late)
        mine, out = np.empty(counts[group.rank]), np.empty(sum(counts))
        for step in range(4):
            mine[:] = group.rank + step
            group.all_gather(mine, counts=counts, out=out).wait()
            mine[:] = -1
            assert (out == np.repeat(np.arange(group.size) + float(step), counts)).all()
