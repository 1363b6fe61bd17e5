"""A worker is woken for work that nobody has taken within the grace, and for no other; both forms of the bell."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from zerort.native.doorbell import Doorbell, PythonDoorbell

GRACE = 0.05


@pytest.fixture(params=[Doorbell, PythonDoorbell], ids=["built", "python"])
def bell(request: pytest.FixtureRequest) -> Any:
    return request.param(GRACE)


def woken_at(bell: Any) -> tuple[threading.Thread, list[float]]:
    """Start a worker that notes when it is woken, once."""
    times: list[float] = []

    def work() -> None:
        bell.wait()
        times.append(time.monotonic())

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    return worker, times


def test_work_that_nobody_takes_is_the_workers(bell: Any) -> None:
    worker, times = woken_at(bell)
    rung = time.monotonic()
    bell.ring()
    worker.join(10)
    assert times[0] - rung >= 0.9 * GRACE


def test_work_that_is_taken_wakes_nobody(bell: Any) -> None:
    worker, times = woken_at(bell)
    for _ in range(20):
        bell.ring()
        bell.answer()
    time.sleep(3 * GRACE)
    assert times == []
    bell.ring()
    worker.join(10)
    assert len(times) == 1


def test_what_is_left_of_several_pieces_is_the_workers(bell: Any) -> None:
    bell.ring()
    bell.ring()
    bell.answer()
    worker, times = woken_at(bell)  # it comes late, and finds the second piece
    worker.join(10)
    assert len(times) == 1


def test_without_a_grace_it_rings_at_once() -> None:
    for form in (Doorbell, PythonDoorbell):
        bell = form(0.0)
        worker, times = woken_at(bell)
        bell.ring()
        worker.join(10)
        assert len(times) == 1
