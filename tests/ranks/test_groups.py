"""The contract of groups, kept by every transport between processes."""

import dataclasses
import os
import platform
import time
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from zerort import native, trace
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport, open_node
from zerort.comm.transports import mpi
from zerort.comm.transports.messages.exchange import Exchange
from zerort.errors import BootstrapError, CollectiveMismatchError, CollectiveTimeoutError
from zerort.native import rendezvous
from zerort.testing.contracts.group import GroupContract

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

# Of these no more is to be seen with more ranks, which take their time on two cores.
few = pytest.mark.skipif(MPI.COMM_WORLD.size > 3, reason="1 to 3 ranks")


@pytest.fixture(scope="class")
def group(request, options):
    """One group for all tests of a class: opening one takes longer than most tests."""
    group = request.cls.open(options)
    yield group
    group.close()


class ProcessContract(GroupContract):
    @pytest.fixture
    def on_ranks(self, group):
        return lambda body: body(group)


@pytest.mark.smoke
class TestNode(ProcessContract):
    @staticmethod
    def open(options):
        return open_group(kind="node", options=options)


class TestNodeStaged(ProcessContract):
    """As where the kernel forbids one process to read another's memory."""

    @staticmethod
    def open(options):
        return open_group(kind="node", options=dataclasses.replace(options, cross_memory=False))


@few
class TestNodeWithoutCompiler(ProcessContract):
    """The rendezvous in Python, as where the native kernels were not built."""

    @staticmethod
    def open(options):
        return Group(open_node(WORLD, name="python", options=options, allow_native=False))


class TestMpi(ProcessContract):
    @staticmethod
    def open(options):
        return open_group(kind="mpi", options=options)


class TestHierarchical(ProcessContract):
    """Hosts of up to three ranks, the last one smaller: the ranks of a host share memory, the others talk over MPI."""

    @staticmethod
    def open(options):
        machine = WORLD.Split(WORLD.rank // 3, WORLD.rank)
        return Group(best_transport(WORLD, name="hosts", options=options, kind="hierarchical", machine=machine))


@few
class TestHierarchicalInterleaved(ProcessContract):
    """Neighbouring ranks on different hosts, and no reading of each other's memory."""

    @staticmethod
    def open(options):
        machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
        forbidden = dataclasses.replace(options, cross_memory=False)
        return Group(best_transport(WORLD, name="hosts", options=forbidden, kind="hierarchical", machine=machine))


@few
@pytest.mark.parametrize("kind", ["mpi", "hierarchical"])
def test_headers_travel_only_when_some_rank_calls_from_a_new_place(options, kind):
    machine = WORLD.Split(WORLD.rank // 2, WORLD.rank)
    with Group(best_transport(WORLD, name="hosts", options=options, kind=kind, machine=machine)) as group:

        def exchanged(calls):
            before = trace.counters().get("headers exchanged", 0)
            calls()
            return trace.counters().get("headers exchanged", 0) - before

        def total():
            return group.all_reduce(np.ones(3), name="total").wait()

        def again():
            for _ in range(5):
                assert total().tolist() == [group.size] * 3
            for _ in range(5):
                group.all_reduce(np.ones(50_000), name="large").wait()

        def elsewhere():
            group.all_reduce(np.ones(3), name="total").wait() if group.rank == group.size - 1 else total()

        def differently():
            with pytest.raises(CollectiveMismatchError, match="barrier") as caught:
                group.barrier().wait() if group.rank == 0 else total()
            assert str(caught.value).count("test_groups.py:") == (2 if group.size > 1 else 1)

        assert [exchanged(calls) for calls in (again, again, elsewhere, elsewhere)] == [2, 0, 1, 0]
        if group.size > 1:
            assert exchanged(differently) == 0
        assert exchanged(again) <= 1  # the last rank is back at the first place


if len(set(WORLD.allgather(os.uname().nodename))) > 1:  # tests/jobs/test_hosts_suites.py

    class TestNetwork(ProcessContract):
        """Ranks on several hosts, reached as the group finds best."""

        @staticmethod
        def open(options):
            return open_group(options=options)

    @few
    class TestNetworkStaged(ProcessContract):
        """The same where the kernel forbids one process to read another's memory."""

        @staticmethod
        def open(options):
            return open_group(options=dataclasses.replace(options, cross_memory=False))


def test_others_may_read_this_process_only_while_a_group_needs_it(options, monkeypatch):
    said = []
    monkeypatch.setattr(rendezvous.kernels, "allow_readers", lambda *, allowed: said.append(allowed))
    first = open_group(kind="node", options=options)
    assert said == [True]
    with first.split(0), open_group(kind="node", options=dataclasses.replace(options, cross_memory=False)):
        pass
    assert said == [True]
    first.close()
    first.close()
    assert said == [True, False]


@few
@pytest.mark.parametrize("field", ["staging_nbytes", "exchange_nbytes"])
def test_hosts_without_room_to_stage_an_element_of_each_rank_are_refused(options, field):
    """An array would pass in pieces of nothing, and come out as it was."""
    machine = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    tight = dataclasses.replace(options, **{field: 64})
    refused = pytest.raises(BootstrapError, match=r"Expected at least 96 bytes .* 3 ranks, got 64")
    with (
        refused if WORLD.size == 3 else nullcontext(),
        Group(best_transport(WORLD, name="hosts", options=tight, kind="hierarchical", machine=machine)) as group,
    ):
        whole = group.all_gather(np.full(9, 1 + group.rank, np.clongdouble)).wait()
        assert (whole == np.repeat(np.arange(1, 1 + group.size), 9)).all()


@few
def test_without_native_kernels_and_stores_in_order_ranks_talk_over_mpi(options, monkeypatch):
    """The rendezvous in Python relies on what x86-64 promises of memory, and other processors do not."""
    monkeypatch.setattr(native, "AVAILABLE", False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with open_group(options=options) as group:
        assert group.kind == ("mpi" if WORLD.size > 1 else "solo")
    if WORLD.size > 1:
        with pytest.raises(BootstrapError, match="Expected the native kernels for a node group on aarch64"):
            open_group(kind="node", options=options)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with open_group(options=options) as group:
        assert group.kind == ("node" if WORLD.size > 1 else "solo")


@few
def test_a_split_without_a_rank_is_given_up_with_its_name(options, monkeypatch):
    """The ranks of a part measure the network between them: one that does not come then is missing as in any call."""
    if WORLD.size == 1:
        pytest.skip("nobody to wait for")
    late, measure = WORLD.size - 1, mpi.measure

    def measure_late(*args):
        time.sleep(4.0)  # the others give up after one, and hear each other for another
        return measure(*args)

    with open_group(kind="mpi", options=dataclasses.replace(options, timeout=1.0)) as group:
        if group.rank == late:
            monkeypatch.setattr(mpi, "measure", measure_late)
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.split(0)
        expected = "got it later" if group.rank == late else f"got no rank {late}."
        assert expected in str(caught.value), str(caught.value)
        assert "open()" in str(caught.value), str(caught.value)
        WORLD.barrier()


@few
def test_over_mpi_a_call_that_takes_several_exchanges_does_not_hold_its_caller(options):
    large = np.ones(16 * 1024)  # 128 KiB
    with open_group(kind="mpi", options=dataclasses.replace(options, eager_nbytes=1024**2)) as group:
        if group.size == 1 or not group.runs_ahead:
            pytest.skip("nobody to wait for, or no other thread")
        group.all_reduce(large).wait()
        if group.rank:
            WORLD.recv(source=0)
        ticket = group.all_reduce(large)
        if group.rank == 0:
            for rank in range(1, group.size):
                WORLD.send("rank 0 has gone on", dest=rank)
        assert ticket.wait()[0] == group.size


def test_an_alarm_may_come_while_alarms_are_read():
    exchange = Exchange(MPI.COMM_SELF, hosts=[0], message_nbytes=64, timeout=1.0)
    known = exchange._alarms.known
    known[1] = mpi.Alarm(1, 0, "left", "{}")
    for _ in exchange.alarms.values():
        known[2] = mpi.Alarm(2, 0, "left", "{}")  # as another thread does that listens
    assert list(exchange.alarms) == [1, 2]
    exchange.close(patience=1.0)
