"""The contract of groups, kept by every transport between processes."""

import dataclasses
import platform
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from zerort import native
from zerort.comm import Group, open_group
from zerort.comm.bootstrap.opening import best_transport, open_node
from zerort.errors import BootstrapError
from zerort.native import rendezvous
from zerort.testing.group_contract import GroupContract

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
