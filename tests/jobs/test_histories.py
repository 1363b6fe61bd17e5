"""Savers, a resumer and readers of one directory, killed and stopped at random, see one register of whole saves."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("histories.py")
violations = runpy.run_path(str(SCRIPT))["violations"]


def test_what_savers_and_readers_of_one_directory_see_is_possible(tmp_path):
    answer = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "7", "25"], capture_output=True, text=True, check=False, timeout=150
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "0 violations" in answer.stdout


SAVED = [
    {"what": "saves", "stamp": 1, "at": 1},
    {"what": "saved", "stamp": 1, "at": 2},
    {"what": "saves", "stamp": 2, "at": 3},
    {"what": "saved", "stamp": 2, "at": 4},
]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([{"what": "reads", "at": 5}, {"what": "read", "stamp": 1, "wrong": 0, "at": 6}], r"read 1 after \[2\] had"),
        ([{"what": "reads", "at": 5}, {"what": "read", "stamp": 3, "wrong": 0, "at": 6}], "which nobody saved"),
        ([{"what": "reads", "at": 5}, {"what": "read", "stamp": 2, "wrong": 9, "at": 6}], "9 values that were not"),
        ([{"what": "told", "text": "got process 99 on h", "at": 5}], "told of nobody"),
        ([{"what": "damage", "text": "a file is missing", "at": 5}], "a file is missing"),
    ],
)
def test_histories_that_cannot_be_are_found_out(events, text):
    (found,) = violations([{"who": "x", "pid": 1, **one} for one in SAVED + events])
    assert re.search(text, found)


def test_a_read_beside_a_save_may_see_either():
    reads = [{"what": "reads", "at": 3}, {"what": "read", "stamp": 1, "wrong": 0, "at": 6}]
    assert violations([{"who": "x", "pid": 1, **one} for one in SAVED + reads]) == []
