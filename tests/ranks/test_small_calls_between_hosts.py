"""Small calls between hosts: in one native step when they are made again, and sums cut by host."""

import dataclasses
import functools
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import runs
from mpi4py import MPI

from zerort import native, trace
from zerort.comm.transports import mpi as transports_mpi
from zerort.comm.transports import small_calls
from zerort.comm.transports.hosts_shortcut import HostsShortcut
from zerort.comm.transports.messages import sockets, wire
from zerort.config import GroupOptions
from zerort.errors import CollectiveMismatchError

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi, pytest.mark.skipif(WORLD.size == 1, reason="one host")]

WHOLE = {"whole_sums": 2**40, "whole_scatters": 2**40}
CUT = {"whole_sums": 0, "whole_scatters": 0}
ROUNDS = {"gathers": 0, "sums": 0, "scatters": 0}
COUNTS = [3, 0, 5, 1, 2, 4, 1, 7]


@pytest.fixture(params=["direct", "passed-on"])
def way(request, monkeypatch):
    monkeypatch.setattr(small_calls, "is_direct", lambda network, hosts: request.param == "direct")
    return request.param


def open_hosts(options, *, kind="hierarchical", **sizes):
    """Open a group over hosts of two ranks, the last one smaller; of two ranks each is a host."""
    group = runs.open_hosts(options, ranks=min(2, WORLD.size - 1), kind=kind)
    group._transport.small = dataclasses.replace(group._transport.small, **sizes)
    return group


def shortcuts(group, *, completes=True):
    """Return the operations that a native step does, or only meets for."""
    made = [(known.call.op, known.shortcut) for known in group._calls._known.values()]
    return {op for op, shortcut in made if isinstance(shortcut, HostsShortcut) and shortcut.completes is completes}


@pytest.mark.parametrize("kind", ["sockets", "sockets on few cores", "hierarchical", "mpi", "polled"])
@pytest.mark.parametrize("sizes", [pytest.param(WHOLE, id="whole"), pytest.param(CUT, id="cut")])
def test_small_calls_made_again_and_again_give_what_numpy_gives(options, way, sizes, kind, connected, monkeypatch):
    if kind == "polled":  # as where MPI's functions are not found: mpi4py carries messages
        monkeypatch.setattr(wire, "_find_post", lambda comm: None)
    on_sockets, is_crowded = kind.startswith("sockets"), kind != "sockets"
    if on_sockets and not native.AVAILABLE:
        pytest.skip("only the compiled form has sockets")
    monkeypatch.setattr(transports_mpi, "share_cores", lambda tell, counts: is_crowded)
    options = dataclasses.replace(options, sockets="always" if on_sockets else "never")
    if way == "passed-on" and sizes is CUT:
        pytest.skip("only those that each host sends to all at once are cut")
    n, counts = WORLD.size, COUNTS[: WORLD.size]
    with open_hosts(options, kind="mpi" if kind == "mpi" else "hierarchical", **sizes) as group:
        assert (group._transport._exchange.busy_for == 0) == (on_sockets and is_crowded)
        r, numel = group.rank, sum(counts)
        window, gathered, copied = group.zeros(numel, "float64"), np.empty(numel), np.empty(numel)
        shared = group.zeros_shared(counts, "float64")
        for step in range(4):
            given = [np.arange(float(numel)) * (rank + 1) + step for rank in range(n)]
            shards = [given[rank][: counts[rank]] for rank in range(n)]
            total, places = sum(given), np.cumsum([0, *counts])
            mine, shard = given[r].copy(), shards[r].copy()
            window[:] = mine
            shared.mine[:] = shard
            group.barrier().wait()
            assert (group.all_reduce(mine).wait() == total).all()
            group.all_reduce(window, out=window).wait()
            assert (window == total).all()
            assert (group.reduce_scatter(mine, counts=counts).wait() == total[places[r] : places[r + 1]]).all()
            group.all_gather(shard, counts=counts, out=gathered).wait()
            assert (gathered == np.concatenate(shards)).all()
            group.all_gather(shared.mine, counts=counts, out=shared.full).wait()
            assert (shared.full == np.concatenate(shards)).all()
            copied[:] = mine
            assert (group.broadcast(copied, root=n - 1).wait() == given[n - 1]).all()
            root = group.reduce(mine, root=step % n).wait()
            assert root is None if r != step % n else (root == total).all()
            mine[:], shard[:] = np.nan, np.nan  # theirs again: nobody reads them any more
        if kind in ("sockets", "hierarchical") and native.AVAILABLE:
            assert shortcuts(group) >= {"barrier", "all_gather", "broadcast", "all_reduce", "reduce_scatter"}


@pytest.mark.parametrize("sizes", [pytest.param(WHOLE, id="whole"), pytest.param(CUT, id="cut")])
def test_calls_that_differ_are_told_with_both_places_and_the_group_goes_on(options, sizes, monkeypatch):
    monkeypatch.setattr(
        small_calls, "is_direct", lambda network, hosts: True
    )  # whatever was measured: else none is cut
    with open_hosts(options, **sizes) as group:
        long, short, outs = np.ones(8), np.ones(4), (np.empty(8), np.empty(4))

        def total():
            return group.all_reduce(long, out=outs[0]).wait()[0]

        def other():
            return group.all_reduce(short, out=outs[1]).wait()[0]

        for _ in range(3):
            assert total() == group.size
        for odd in (0, group.size - 1):
            call = other if group.rank == odd else total
            with pytest.raises(CollectiveMismatchError) as told:
                call()
            assert "float64[4]" in str(told.value)
            assert "float64[8]" in str(told.value)
            assert str(told.value).count("test_small_calls_between_hosts.py:") >= 2
            for _ in range(3):
                assert total() == group.size


def test_a_late_rank_and_a_new_place_do_not_matter(options, way):
    with open_hosts(options, **WHOLE) as group:
        array, out = np.full(5, group.rank + 1.0), np.empty(5)
        expected = group.size * (group.size + 1) / 2

        def total():
            return group.all_reduce(array, out=out, name="total").wait()[0]

        for _ in range(3):
            assert total() == expected
        for late in range(group.size):  # later than a shortcut waits for: Python goes on where it stopped
            if group.rank == late:
                time.sleep(0.02)
            assert total() == expected
            if group.rank == late:
                time.sleep(0.02)
            group.barrier().wait()
        before = trace.counters().get("headers exchanged", 0)
        for _ in range(4):
            if group.rank == group.size - 1:  # from elsewhere than the others, who take their shortcut
                assert group.all_reduce(array, out=out, name="total").wait()[0] == expected
            else:
                assert total() == expected
        assert trace.counters().get("headers exchanged", 0) == before + 1


@pytest.mark.parametrize("kind", ["hierarchical", "mpi"])
@pytest.mark.parametrize("numel", [5, 100_000])
def test_one_call_made_at_several_lines_in_turn_tells_each_of_them_once(roomy, kind, numel):
    with open_hosts(roomy, kind=kind) as group:
        array, out = np.full(numel, group.rank + 1.0), np.empty(numel)
        lines = [
            lambda: group.all_reduce(array, out=out).wait(),
            lambda: group.all_reduce(array, out=out).wait(),
        ]
        expected, before = group.size * (group.size + 1) / 2, trace.counters().get("headers exchanged", 0)
        for step in range(8):
            assert (lines[step % 2]() == expected).all()
        assert trace.counters().get("headers exchanged", 0) == before + 2
        # Not from one line on all ranks: that has to be told, however well each of both is known.
        assert (lines[group.rank == group.size - 1]() == expected).all()
        assert trace.counters().get("headers exchanged", 0) == before + 3
        for step in range(8):
            assert (lines[step % 2]() == expected).all()
        # Where the others stand now is told again, and where that rank does, unless it talks to its own host alone.
        again = 2 if group._transport.topology.members[-1][0] == group.size - 1 else 1
        assert trace.counters().get("headers exchanged", 0) == before + 3 + again
        story = group._transport._last
        assert len(set(story[1])) == 1
        if kind == "hierarchical" and native.AVAILABLE and numel == 5:
            assert shortcuts(group) == {"all_reduce"}


def test_a_sum_that_is_cut_moves_no_more_than_the_bound(options, monkeypatch):
    monkeypatch.setattr(small_calls, "is_direct", lambda network, hosts: True)
    with open_hosts(options, **CUT) as group:
        hosts = len(group._transport.topology.members)
        array = np.ones(64 * group.size, np.float32)

        def sent(call):
            before = trace.counters().get("wire.bytes", 0)
            call().wait()
            return WORLD.allreduce(trace.counters().get("wire.bytes", 0) - before)

        for _ in range(3):  # in Python, then natively
            assert sent(lambda: group.reduce_scatter(array)) == (hosts - 1) * array.nbytes
            assert sent(lambda: group.all_reduce(array)) == 2 * (hosts - 1) * array.nbytes


# -- up to a mebibyte: still in one exchange, where hosts greet each other directly ------------------------------------


@pytest.fixture
def roomy(options, monkeypatch):
    """Messages and slabs as they are outside of tests; hosts that greet each other directly, whatever was measured."""
    monkeypatch.setattr(small_calls, "is_direct", lambda network, hosts: True)
    return GroupOptions(timeout=options.timeout, flight_dir=options.flight_dir)


def results_of(group, dtype):
    """Make calls of some hundred kilobytes, four times each; return all that came of them."""
    n, rank, made = group.size, group.rank, []
    counts = [20_000 + 3 * r for r in range(n)]
    given, shard = group.zeros(sum(counts), dtype), group.zeros(counts[rank], dtype)
    given[:] = np.random.default_rng(rank).standard_normal(given.size)
    shard[:] = given[: shard.size]
    total, part, whole = (np.empty(size, dtype) for size in (given.size, shard.size, given.size))
    plain = given.copy()
    for _ in range(4):
        group.all_reduce(given, out=total).wait()
        group.reduce_scatter(given, counts=counts, out=part).wait()
        group.all_gather(shard, counts=counts, out=whole).wait()
        made += [one.tobytes() for one in (total, part, whole)]
        made.append(group.all_reduce(plain).wait().tobytes())
    return made


@pytest.mark.parametrize("kind", ["hierarchical", "mpi"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_exchange_gives_the_bits_of_rounds(roomy, dtype, kind):
    with open_hosts(roomy, kind=kind) as group, open_hosts(roomy, kind=kind, **ROUNDS) as slow:
        assert results_of(group, dtype) == results_of(slow, dtype)
        if kind == "hierarchical" and native.AVAILABLE:
            assert shortcuts(group) >= {"all_gather", "all_reduce", "reduce_scatter"}
        assert not shortcuts(slow)
        if kind == "hierarchical" and native.AVAILABLE:
            assert shortcuts(slow, completes=False) == {"all_gather", "all_reduce", "reduce_scatter"}


def test_a_call_of_some_hundred_kilobytes_is_one_message_to_each_other_host(roomy, monkeypatch):
    monkeypatch.setattr(wire, "_find_post", lambda comm: None)  # every message passes where it can be counted
    sent = []
    start = wire.Wire.start

    def counted(self, sends, receives, **how):
        sent.extend(array.nbytes for _, array in sends)
        return start(self, sends, receives, **how)

    with open_hosts(roomy) as group:
        monkeypatch.setattr(wire.Wire, "start", counted)
        members = group._transport.topology.members
        others, leads = len(members) - 1, group.rank in [ranks[0] for ranks in members]
        array = np.ones(16_384 * group.size, np.float32)
        expected = {
            "all_gather": (lambda: group.all_gather(array[:16_384]), others),
            "reduce_scatter": (lambda: group.reduce_scatter(array), others),
            # On two hosts whole sums are as long as parts and their sums; on more they are cut by host.
            "all_reduce": (lambda: group.all_reduce(array), others if others == 1 else 2 * others),
        }
        for op, (call, messages) in expected.items():
            sent.clear()
            call().wait()
            assert len(sent) == (messages if leads else 0), op
            per_host = sum(sent) - 24 * len(sent)
            moved = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[op] * others * array.nbytes
            assert WORLD.allreduce(per_host) == moved, op


def test_shards_that_are_too_unequal_for_one_exchange_take_rounds(roomy):
    with open_hosts(roomy) as group:
        small = group._transport.small
        counts = [small.each // 4 + 1, *[0] * (group.size - 1)]
        shard, whole, source, sums = (
            group.zeros(numel, np.float32)
            for numel in (counts[group.rank], sum(counts), sum(counts), counts[group.rank])
        )
        shard[:], source[:] = 3.0, 1.0
        for _ in range(3):
            group.all_gather(shard, counts=counts, out=whole).wait()
            assert (whole == 3.0).all()
            group.reduce_scatter(source, counts=counts, out=sums).wait()
            assert (sums == group.size).all()
        assert not shortcuts(group)


def test_calls_that_differ_are_told_whichever_of_them_takes_rounds(roomy):
    with open_hosts(roomy) as group:
        arrays = [np.ones(numel, np.float32) for numel in (1_000, 100_000, 1_000_000)]  # whole, in parts, in rounds

        def total(which):
            return group.all_reduce(arrays[which], out=arrays[which]).wait()

        def agree():
            for which in range(3):
                arrays[which][:] = 1
                assert (total(which) == group.size).all()

        agree()
        for mine, theirs in ((0, 1), (1, 2), (2, 1), (1, 0)):
            with pytest.raises(CollectiveMismatchError) as told:
                total(mine if group.rank == group.size - 1 else theirs)
            assert str(told.value).count("test_small_calls_between_hosts.py:") >= 2
            agree()


@pytest.mark.parametrize(
    "by_sockets",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not native.AVAILABLE, reason="only the compiled form has them")),
    ],
)
@pytest.mark.parametrize("numel", [10, 30_000])
def test_gathers_that_differ_leave_every_out_as_it_was(roomy, connected, by_sockets, numel):
    """Those of the others lie in the host's one array, or are each rank's own; what one sends has no place there."""
    counts = [numel + 3 * r for r in range(WORLD.size)]
    with open_hosts(dataclasses.replace(roomy, sockets="always" if by_sockets else "never")) as group:
        shared, own = group.zeros_shared(counts, np.float32), group.zeros(sum(counts), np.float32)
        mine = group.zeros(counts[group.rank], np.float32)

        def start(out):
            return group.all_gather(mine, counts=counts, out=out)

        def agree(step):
            mine[:] = step + group.rank
            expected = np.repeat(np.arange(group.size) + np.float32(step), counts)
            for out in (shared.full, own):
                assert (start(out).wait() == expected).all()
            return expected

        for step in range(4):
            agree(step)
        assert shortcuts(group) == ({"all_gather"} if native.AVAILABLE else set())
        for odd, numbers in ((0, 2), (group.size - 1, 2 * numel)):  # shorter and longer than what the others send
            expected, other = agree(odd), np.full(numbers, 7, np.float32)
            for out in (shared.full, own):
                mine[:] = -1
                call = (
                    functools.partial(group.all_gather, other) if group.rank == odd else functools.partial(start, out)
                )
                with pytest.raises(CollectiveMismatchError):
                    call().wait()
                assert (out == expected).all()
                group.barrier().wait()  # all have looked
            agree(odd + 1)


@pytest.mark.skipif(not native.AVAILABLE, reason="only the compiled form has sockets")
@pytest.mark.parametrize("is_far", [False, True])
def test_only_what_goes_far_is_paced(roomy, connected, is_far, monkeypatch):
    """Where the machine's connections use BBR; elsewhere none of them does, near or far."""
    monkeypatch.setattr(sockets, "_FAR", -1.0 if is_far else 60.0)
    with open_hosts(dataclasses.replace(roomy, sockets="always")) as group:
        group.all_reduce(np.ones(1_000_000)).wait()  # in rounds: every rank sends
        used = set()
        for fd in [one for one in Path("/proc/self/fd").iterdir() if one.is_socket()]:
            with socket.socket(fileno=os.dup(int(fd.name))) as one:
                if one.type == socket.SOCK_STREAM and one.family == socket.AF_INET:
                    used.add(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))
    with socket.socket() as plain:
        usual = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    assert used == ({usual, b"reno"} if usual == b"bbr" and not is_far else {usual})
