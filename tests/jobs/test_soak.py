"""Steps with kills, resumes and stops end as those without do, and nothing grows: 300 (`make soak-faults`: 10,000)."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")
soak = runpy.run_path(str(SCRIPT))


def test_steps_with_kills_and_stops_end_as_those_without(tmp_path):
    answer = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "run", "3", "300"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert ", 0 wrong" in answer.stdout


def step(update: int, life: int = 1, **facts: object) -> dict[str, object]:
    return {"what": "returned", "life": life, "rank": 0, "update": update, "began_with": 7 * update, **facts}


def life(number: int, update: int, **facts: object) -> dict[str, object]:
    return {"what": "begins", "life": number, "rank": 0, "update": update, "progress": [0, update], **facts}


ALONE = [step(update) for update in range(1, 20)]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([step(3), life(2, 2)], "life 2, rank 0 began after update 2, though 3 had returned"),
        ([step(3), life(2, 5)], "life 2, rank 0 began after update 5, though 3 had returned"),
        ([step(3), life(2, 4), life(2, 3, rank=1, progress=[1, 3])], "began after update 3, another rank after 4"),
        ([step(3), life(2, 4, progress=[0, 3])], "was given [0, 3]"),
        ([step(3, began_with=5)], "had other parameters before 3"),
    ],
)
def test_steps_that_are_lost_are_found_out(events, text):
    (found,) = soak["violations"](events, ALONE)
    assert text in found


@pytest.mark.parametrize("update", [3, 4])
def test_a_life_may_begin_with_the_last_step_that_returned_or_the_next(update):
    assert soak["violations"]([step(3), life(2, update)], ALONE) == []


HELD = {"rss": 70 << 20, "descriptors": 50, "threads": 17, "scratch": 20, "last step": 13}


@pytest.mark.parametrize(
    ("name", "per_step"), [("rss", 2048), ("descriptors", 0.02), ("threads", 0.02), ("scratch", 0.12), ("last step", 1)]
)
def test_what_grows_with_steps_is_found_out(name, per_step):
    events = [step(n, **{**HELD, name: HELD[name] + int(per_step * n)}) for n in range(10, 2000, 10)]
    (found,) = soak["growth"](events, rss=3 << 18)
    assert re.match(f"{name}: at most", found)


def test_what_a_process_maps_at_first_is_no_growth():
    warm = [step(n, **{**HELD, "rss": HELD["rss"] - 200_000 + min(n, 300) * 800}) for n in range(10, 400, 10)]
    assert soak["growth"](warm, rss=3 << 18) == []
