"""Jobs on several hosts of one machine, for tests: `zerort bench hosts` makes them in the same way.

``make test-hosts`` runs them at all `SHAPES`, ``make test`` at a few.
"""

import os
import subprocess

from zerort.cli.bench.hosts.namespaces import Hosts, expect_hosts
from zerort.errors import BootstrapError
from zerort.testing.jobs import JobResult, wait_for_job

SHAPES = ([1, 1], [2, 2], [1, 1, 1], [1, 3], [3, 1, 2], [1, 2, 2, 1], [2, 2, 2, 2], [1] * 8, [2, 1] * 4)
"""Ranks on each host."""


def shapes(*short: list[int]) -> list:
    """Return all `SHAPES` in ``make test-hosts``, else ``short``; as parameters of a test."""
    import pytest

    chosen = SHAPES if os.environ.get("ZERORT_TEST_HOSTS") == "all" else short
    return [pytest.param(shape, id="+".join(map(str, shape))) for shape in chosen]


def why_not() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    try:
        expect_hosts()
    except BootstrapError as error:
        return str(error)
    return None


def run(*words: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


def run_on_hosts(ranks: list[int], words: list, *, timeout: float, env: dict[str, str]) -> JobResult:
    """Run ``python words…`` with so many ranks on each of several hosts."""
    with Hosts(len(ranks)) as hosts:
        return wait_for_job(hosts.command(ranks, words), timeout=timeout, env=env)
