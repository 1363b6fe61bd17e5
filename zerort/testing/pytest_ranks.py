"""Ranks under pytest: a test that fails on one rank fails on all, and rank 0 tells the story.

A ``conftest.py`` takes these in by name; ``python -m zerort.testing 1 2 3 4 8 -- tests/ranks`` then makes each size one
mpirun of ``pytest --with-mpi``.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from zerort.comm.guard.failure import abort_job_on_exception
from zerort.config import GroupOptions

__all__ = ["options", "pytest_configure", "pytest_runtest_makereport"]

WORLD = MPI.COMM_WORLD
_AT_ONCE = (0.0,) * 20
"""Looks whether all ranks are there that only let others run in between."""
_PAUSE = 0.0005
"""Seconds between all further ones."""
NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 (open until the process ends)
atexit.register(NOWHERE.close)

# Each rank has a root of its own for tmp_path: ranks that end at once trip over each other in cleaning up old runs.
TEMPORARY = tempfile.TemporaryDirectory(prefix="zerort-ranks-")
atexit.register(TEMPORARY.cleanup)
os.environ["PYTEST_DEBUG_TEMPROOT"] = TEMPORARY.name

faulthandler.register(signal.SIGUSR1, all_threads=True)
abort_job_on_exception()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: Any) -> None:
    """Let rank 0 alone write: eight reports of one run help nobody; failures go through it."""
    if WORLD.rank > 0:
        config.pluginmanager.get_plugin("terminalreporter")._tw._file = NOWHERE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Make a failure on any rank a failure on all."""
    report = yield
    if not _has_failed_anywhere(failed=report.failed):
        return report
    stories = WORLD.allgather(report.longreprtext if report.failed else "")
    failed = [f"-- rank {rank}\n{story}" for rank, story in enumerate(stories) if story]
    if failed and not (report.failed and len(failed) == WORLD.size):
        report.outcome = "failed"
        report.longrepr = "\n".join(failed)
    return report


def _has_failed_anywhere(*, failed: bool) -> bool:
    """Meet the other ranks without polling as MPI does, which takes cores away from those that still compute."""
    mine, anywhere = np.array([failed]), np.array([False])
    meeting = WORLD.Iallreduce(mine, anywhere, op=MPI.LOR)
    for pause in itertools.chain(_AT_ONCE, itertools.repeat(_PAUSE)):
        if meeting.Test():
            return bool(anywhere[0])
        time.sleep(pause)
    raise AssertionError("never")


@pytest.fixture(scope="session")
def options() -> Iterator[GroupOptions]:
    """Slabs of a few pages, so that small arrays already need rounds; a timeout that only a broken test reaches."""
    with tempfile.TemporaryDirectory() as flights:
        yield GroupOptions(
            timeout=90.0,
            staging_nbytes=64 * 1024,
            exchange_nbytes=64 * 1024,
            message_nbytes=16 * 1024,
            eager_nbytes=32 * 1024,
            flight_dir=flights,
        )
