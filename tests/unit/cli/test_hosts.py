"""What has to cross the wire between hosts, as `zerort bench hosts` holds collectives against it."""

from __future__ import annotations

import argparse

import pytest

from zerort.cli.bench.hosts import namespaces
from zerort.cli.bench.hosts.wire import Wire, parse_delay, parse_rate, transfers
from zerort.cli.main import main
from zerort.comm.bootstrap.environment import Launcher

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all")


@pytest.mark.parametrize(
    ("op", "ranks", "crosses"),
    [
        ("all_gather", (2, 2), 500),
        ("all_gather shared", (2, 2), 500),
        ("all_gather", (1, 3), 750),  # the smaller host has to hear of more
        ("reduce_scatter", (2, 2, 2, 2), 750),
        ("all_reduce", (2, 2), 1000),
        ("broadcast", (2, 2), 1000),
        ("all_to_all", (2, 2), 1000),
        ("barrier", (2, 2), 0),
        ("all_reduce", (4,), 0),
    ],
)
def test_the_busiest_host_carries(op: str, ranks: tuple[int, ...], crosses: int) -> None:
    assert Wire(ranks).busiest_nbytes(op, 1000) == crosses


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2, 2), (3, 1, 2)])
def test_sockets_carry_no_less_than_the_bound(op: str, ranks: tuple[int, ...]) -> None:
    nbytes = 6 * 2**20
    sent = [sum(sum(phase[host]) for phase in transfers(op, nbytes, ranks)) for host in range(len(ranks))]
    got = [sum(row[host] for phase in transfers(op, nbytes, ranks) for row in phase) for host in range(len(ranks))]
    busiest = max(*sent, *got)
    assert busiest >= Wire(ranks).busiest_nbytes(op, nbytes) - 1
    assert all(phase[host][host] == 0 for phase in transfers(op, nbytes, ranks) for host in range(len(ranks)))


def test_a_bound_needs_a_rate_and_counts_the_delay_once() -> None:
    assert Wire((2, 2)).seconds("all_gather", 1000) is None
    assert Wire((2, 2), "1gbit").seconds("all_gather", 2**26) == pytest.approx(0.268, abs=1e-3)
    assert Wire((2, 2), "1gbit", "5ms").seconds("barrier", 0) == pytest.approx(5e-3)


def test_rates_and_delays_are_read_as_tc_reads_them() -> None:
    assert (parse_rate("1Gbit"), parse_rate("2.5mbit"), parse_delay("100us")) == ("1gbit", "2.5mbit", "100us")
    for text in ("1", "gbit", "0gbit", "1gb", "5ms"):
        with pytest.raises(argparse.ArgumentTypeError, match="Expected a rate"):
            parse_rate(text)
    with pytest.raises(argparse.ArgumentTypeError, match="Expected a delay"):
        parse_delay("1gbit")


def test_another_user_than_root_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert main(["bench", "hosts"]) == 1
    assert "Expected root, to make network namespaces, got another user. Use sudo." in capsys.readouterr().err


def test_another_mpi_than_mpich_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces, "find_launcher", lambda: Launcher("mpirun", "Open MPI"))
    assert main(["bench", "hosts"]) == 1
    assert "Expected MPICH's mpirun, which can be led into network namespaces, got Open MPI's." in (
        capsys.readouterr().err
    )
