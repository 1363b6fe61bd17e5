"""What a gather between hosts sends before all have agreed on it, and what becomes of that if they do not."""

import contextlib
import dataclasses
import gc
import mmap
import os
import random
import socket
import time

import numpy as np
import pytest
from mpi4py import MPI
from runs import open_hosts

from zerort import native
from zerort.comm.guard.differing import Join
from zerort.comm.guard.stance import Stance
from zerort.comm.transports import carrier, hosts_shortcut, small_calls
from zerort.comm.transports.rounds import PlannedGather
from zerort.errors import CollectiveMismatchError

WORLD = MPI.COMM_WORLD
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(WORLD.size == 1, reason="one host"),
    pytest.mark.skipif(not native.AVAILABLE, reason="only the compiled form has it"),
]

RANKS = min(2, max(1, WORLD.size - 1))  # of a host; of two ranks each is one
COUNTS = [16_000 + 700 * (r % 3) for r in range(WORLD.size)]  # no two neighbours alike
WHOLE = sum(COUNTS)


def expected_at(step):
    return np.repeat(np.arange(WORLD.size) + np.float64(step), COUNTS)


@pytest.fixture
def at_large(options, monkeypatch):
    """Pieces of 256 KiB and more: what is sent ahead is longer than what `keep_little_in_kernels` lets leave."""
    monkeypatch.setattr(carrier, "_ROUND_SECONDS", 60.0)
    return dataclasses.replace(options, staging_nbytes=2**23, exchange_nbytes=2**23, message_nbytes=2**23)


def aheads(group):
    """Return what sends the first rounds of the group's calls before all have agreed on them."""
    return [known.call.ahead for known in group._calls._known.values() if known.call.ahead is not None]


def keep_little_in_kernels(group):
    """Have kernels take no more than some hundred KiB of what nobody reads."""
    group._transport._exchange.wire.sockets.limit_buffers(64 * 1024)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as one:  # whoever listens hands it on to those who come
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)


def noted_plans(monkeypatch):
    """Return what each plan that is followed notes: whether its first sends have left before."""
    notes, run = [], PlannedGather.run

    def noted(self, call, side):
        notes.append(call.ahead is not None and call.ahead.call == call.sequence)
        run(self, call, side)

    monkeypatch.setattr(PlannedGather, "run", noted)
    return notes


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


def test_a_gather_whose_first_call_differs_leaves_early_when_it_is_made_again(long, connected, patient, monkeypatch):
    with open_hosts(dataclasses.replace(long, sockets="always"), ranks=RANKS) as group:
        mine, out = np.empty(COUNTS[group.rank]), np.zeros(WHOLE)
        notes = noted_plans(monkeypatch)
        for step in range(-1, 5):
            mine[:] = group.rank + step
            if step < 0 and group.rank == 0:
                with pytest.raises(CollectiveMismatchError):
                    group.barrier().wait()
                continue
            with pytest.raises(CollectiveMismatchError) if step < 0 else contextlib.nullcontext():
                group.all_gather(mine, counts=COUNTS, out=out).wait()
            assert (out == (0 if step < 0 else expected_at(step))).all()
        assert notes == [False] + [True] * 4


@pytest.mark.parametrize("reads", [True, False], ids=["in place", "through the host's window"])
def test_ranks_that_go_on_from_python_take_back_what_they_have_sent(long, reads, connected, patient, monkeypatch):
    """Odd ones wait for nobody in the native step, and leave it before or after their first sends, as it happens."""
    if WORLD.rank % 2:
        monkeypatch.setattr(hosts_shortcut, "_PATIENCE", 0.0)
        monkeypatch.setattr(hosts_shortcut, "_MEETING_PATIENCE", 0.0)
    with open_hosts(dataclasses.replace(long, cross_memory=reads, sockets="always"), ranks=RANKS) as group:
        mine, out, in_vain = np.empty(COUNTS[group.rank]), np.zeros(WHOLE), 0

        def gathered(step):
            mine[:] = group.rank + step
            return group.all_gather(mine, counts=COUNTS, out=out).wait()

        for step in range(40):
            if step % 4 == 3:
                before, differs, (ahead,) = out.copy(), group.rank == step // 4 % group.size, aheads(group)
                made = ahead.call
                time.sleep(0.001 * (step % 3) if differs else 0)
                with pytest.raises(CollectiveMismatchError):
                    group.barrier().wait() if differs else gathered(step)
                assert (out == before).all()
                in_vain += ahead.call != made
            else:
                assert (gathered(step) == expected_at(step)).all()
        assert sum(WORLD.allgather(in_vain)) > 0


def test_a_group_closes_while_what_nobody_wanted_is_under_way(at_large, connected, patient):
    numel, options = 250_000, dataclasses.replace(at_large, sockets="always")
    for _ in range(2):
        with open_hosts(options, ranks=RANKS) as group:
            keep_little_in_kernels(group)
            mine, out = np.full(numel, float(group.rank)), np.zeros(group.size * numel)
            made = []
            for step in range(4):
                differs = step == 3
                with pytest.raises(CollectiveMismatchError) if differs else contextlib.nullcontext():
                    group.barrier().wait() if differs and group.rank == 0 else group.all_gather(mine, out=out).wait()
                made += [ahead.call for ahead in aheads(group)]
            assert (out.reshape(-1, numel) == np.arange(group.size)[:, None]).all()
            assert (made[-1] != made[-2]) == (group.rank >= RANKS)  # in the odd one's host calls differ before


def test_numbers_of_calls_go_past_those_that_data_carries(long, connected, patient):
    with open_hosts(dataclasses.replace(long, sockets="always"), ranks=RANKS) as group:
        mine, out = np.empty(COUNTS[group.rank]), np.empty(WHOLE)

        def gathered(step):
            mine[:] = group.rank + step
            return group.all_gather(mine, counts=COUNTS, out=out).wait()

        for number in (2**31 - 1, 2**32 - 5, 2**33 + 2**31):  # most ranks send nothing in billions of small calls
            group._calls._sequence = number
            for step in range(12):
                if step % 3 == 2:
                    with pytest.raises(CollectiveMismatchError):
                        group.barrier().wait() if group.rank == 0 else gathered(step)
                    assert (out == expected_at(step - 1)).all()
                else:
                    assert (gathered(step) == expected_at(step)).all()


def test_ranks_join_gathers_of_others_while_their_own_have_left(long, connected, patient):
    """Each gathers what it likes; ranks that came with another call take part, and then make their own."""
    units, own = range(3), random.Random(WORLD.rank)
    with open_hosts(dataclasses.replace(long, sockets="always"), ranks=RANKS) as group:
        arrays = [np.repeat(np.float64(group.rank) + 10 * unit, COUNTS[group.rank]) for unit in units]
        outs, joined = [np.empty(WHOLE) for _ in units], []

        def join(unit):
            joined.append(unit)
            return contextlib.nullcontext(Join(arrays[unit], np.empty(WHOLE), COUNTS))

        for unit in units:
            group.differences.joins[f"unit {unit}"] = lambda unit=unit: join(unit)
        for _ in range(12):
            for unit in own.choices(units, k=own.randrange(3)):
                outs[unit][:] = -1
                with group.differences.having(Stance(turn=unit)):
                    found = group.all_gather(arrays[unit], counts=COUNTS, out=outs[unit], name=f"unit {unit}").wait()
                assert (found == expected_at(10 * unit)).all()
            assert group.all_reduce(np.ones(3)).wait()[0] == group.size
            group.differences.forget()
        group.barrier().wait()
        assert sum(WORLD.allgather(len(joined))) > 0
        assert any(WORLD.allgather([ahead.call for ahead in aheads(group)]))
