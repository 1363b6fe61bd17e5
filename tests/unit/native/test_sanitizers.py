"""The native code under ThreadSanitizer and AddressSanitizer, ranks as threads: a few rounds of ``make sanitize``."""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "native"))

import sanitize

TIMEOUT = 600  # of a hung harness: on a busy machine seconds become minutes


@functools.cache
def reason():
    return sanitize.missing()


@pytest.fixture(scope="module", params=list(sanitize.SANITIZERS))
def built(request, tmp_path_factory):
    """The name of a sanitizer, and the harness built with it."""
    if reason():
        pytest.skip(reason())
    return request.param, sanitize.build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
def test_no_race_and_no_bad_access(built):
    _, program = built
    done = sanitize.start(program, 1, 2, 40, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert "meetings=640\n" in done.stdout


FAULTS = {
    "thread": {"counter": "data race", "parting": "data race"},
    "address": {"overflow": "heap-buffer-overflow", "undefined": "signed integer overflow"},
}


def test_a_fault_made_on_purpose_is_reported(built):
    name, program = built
    for fault, report in FAULTS[name].items():
        done = sanitize.start(program, 1, 1, 40, fault, timeout=TIMEOUT)
        assert done.returncode not in (0, 70), f"{fault}: {done.stderr}"
        assert report in done.stderr, f"{fault}: {done.stderr}"
