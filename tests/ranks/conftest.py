"""Ranks under pytest; see `zerort.testing.pytest_ranks`."""

import pytest
from mpi4py import MPI

from zerort.comm.transports.messages import sockets
from zerort.testing.pytest_ranks import options, pytest_configure, pytest_runtest_makereport  # noqa: F401


@pytest.fixture
def connected(monkeypatch):
    """Give hosts that are none addresses of their own, at which sockets find them."""
    mine = sockets.Interface(0x7F000002 + MPI.COMM_WORLD.rank, 0xFF000000)
    monkeypatch.setattr(sockets, "interfaces", lambda: (mine,))
