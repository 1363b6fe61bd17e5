"""`make test-cpus` names tests that exist: a file that moves must not leave it without a word."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
import cpus  # noqa: E402


def test_every_file_of_every_row_is_there():
    rows = [cpus.KERNELS[name] for name in cpus.KERNELS]
    named = {word for row in rows for suite in row.suites for word in suite if word.startswith("tests/")}
    assert len(named) > 10
    assert [word for word in sorted(named) if not (TESTS.parent / word).is_file()] == []
