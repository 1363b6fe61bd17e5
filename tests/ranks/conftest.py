"""Ranks under pytest; see `zerort.testing.pytest_ranks`."""

import dataclasses

import pytest
from mpi4py import MPI

from zerort.comm.transports import carrier, hosts_shortcut
from zerort.comm.transports.messages import sockets
from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401


@pytest.fixture
def connected(monkeypatch):
    """Give hosts that are none addresses of their own, at which sockets find them."""
    mine = sockets.Interface(0x7F000002 + MPI.COMM_WORLD.rank, 0xFF000000)
    monkeypatch.setattr(sockets, "interfaces", lambda: (mine,))


@pytest.fixture
def long(options, monkeypatch):  # noqa: F811
    """Pieces of some KiB: a call of these arrays takes many rounds, and slots of a landing are filled many times."""
    monkeypatch.setattr(carrier, "_IN_PLACE_NBYTES", 8 * 1024)
    return dataclasses.replace(options, staging_nbytes=8 * 1024, exchange_nbytes=16 * 1024)


@pytest.fixture
def patient(monkeypatch):
    """The native step waits for whoever is late: nothing is left to Python because a machine is busy."""
    monkeypatch.setattr(hosts_shortcut, "_PATIENCE", 30.0)
    monkeypatch.setattr(hosts_shortcut, "_MEETING_PATIENCE", 30.0)
