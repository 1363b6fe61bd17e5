"""An unhandled error shows its user's lines; those inside zerort are one line, unless zerort itself is at fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import zerort as zr
from zerort.comm.guard.folded import format_error, likeness
from zerort.errors import CallError, CollectiveTimeoutError


def error_of(act: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (each test says which)
        act()
    return caught.value


def refused() -> object:
    with zr.open(plan=zr.Plan.zero(0)) as rt:
        return rt.register("block", {"w": np.ones(3, np.float32)}).reduce({"x": np.ones(3, np.float32)})


def test_frames_inside_zerort_are_folded_into_one_line() -> None:
    error = error_of(refused)
    text = format_error(error)
    assert "in refused\n" in text
    assert " frames inside zerort (ZERORT_FULL_TRACEBACK=1 shows them) …\n" in text
    assert "unit.py" not in text
    assert text.splitlines()[-1].startswith("zerort.errors.CallError: Expected one of 'w' of unit 'block'; got 'x'.")
    assert "unit.py" in format_error(error, full=True)


def test_a_users_own_error_keeps_its_frames_on_both_sides() -> None:
    def schedule(update: int) -> float:
        raise ZeroDivisionError(f"no rate for {update}")

    def act() -> None:
        with zr.open(plan=zr.Plan.zero(0), optimizer=zr.SGD(lr=schedule)) as rt:
            rt.register("block", {"w": np.ones(3, np.float32)}).reduce({"w": np.ones(3, np.float32)})
            rt.step()

    text = format_error(error_of(act))
    assert "rt.step()\n" in text
    assert " inside zerort " in text
    assert 'raise ZeroDivisionError(f"no rate for {update}")' in text


def test_an_error_that_zerort_does_not_raise_by_name_keeps_all_frames() -> None:
    def act() -> None:
        with zr.open(plan=zr.Plan.zero(0)) as rt:
            rt.units = None  # type: ignore[assignment]  # a mistake of ours, as it were
            rt.discard_gradients()

    text = format_error(error_of(act))
    assert "AttributeError" in text
    assert " inside zerort " not in text


def test_how_zerort_found_out_is_left_out_and_what_a_user_handled_stays() -> None:
    def act() -> None:
        try:
            raise KeyError("the user's")
        except KeyError:
            refused()

    assert "During handling of the above exception" in format_error(error_of(act))


def test_a_context_manager_of_the_users_is_not_folded() -> None:
    @contextlib.contextmanager
    def mine() -> Iterator[None]:
        yield
        raise ValueError("at the end")

    def act() -> None:
        with mine():
            pass

    text = format_error(error_of(act))
    assert " inside zerort " not in text
    assert "contextlib.py" in text


def test_errors_that_say_the_same_are_alike() -> None:
    assert likeness(ValueError("at 0x7f1234567890")) == likeness(ValueError("at 0x7f1234567111"))
    assert likeness(ValueError("batch 17")) != likeness(ValueError("batch 18"))
    assert likeness(CallError("Expected x, got y.")) == likeness(CallError("Expected x, got y. (rank 0)"))
    assert likeness(ValueError("x")) != likeness(KeyError("x"))
    here, there = (CollectiveTimeoutError(f"got no rank 1.\n  {s} s ago\nRaise the timeout.") for s in (1, 2))
    assert likeness(here) == likeness(there)
