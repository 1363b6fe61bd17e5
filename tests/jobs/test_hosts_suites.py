"""The contract of groups and the walk under every plan, by ranks on several hosts that talk over a network."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hosts as network

WHY_NOT = network.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

RANKS = Path(__file__).parent.parent / "ranks"
WHOLE = os.environ.get("ZERORT_TEST_HOSTS") == "all"
PYTEST = ["-m", "pytest", "--with-mpi", "-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]


def expect_suite_passes(ranks, *words, sockets="auto"):
    env = {"OPENBLAS_NUM_THREADS": "1", "ZERORT_SOCKETS": sockets}
    result = network.run_on_hosts(ranks, [*PYTEST, *words], timeout=600.0, env=env)
    assert result.code == 0, result.output[-20_000:]
    assert "....." in result.output  # not all were skipped


@pytest.mark.parametrize("sockets", ["always", "never"])
@pytest.mark.parametrize("ranks", network.shapes([2, 1]))
def test_groups_keep_their_contract(ranks, sockets):
    few = "" if WHOLE else " and (uneven or broadcast_and_reduce)"
    expect_suite_passes(ranks, RANKS / "test_groups.py", "-k", f"TestNetwork{few}", sockets=sockets)


@pytest.mark.parametrize("ranks", network.shapes([1, 2]))
def test_a_sharded_run_is_the_reference(ranks):
    few = "" if WHOLE else " and (sharded_run or uneven)"
    expect_suite_passes(ranks, RANKS / "test_walk.py", "-k", f"network{few}")
