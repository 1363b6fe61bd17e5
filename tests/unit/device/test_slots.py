"""Slots that the caller waits for: the order, growing in number, taking all back, and memory cut from one array."""

import threading

import numpy as np
import pytest

from zerort.device import HostStream
from zerort.device.slots import Slots, cut_from
from zerort.errors import UnitStateError


def test_a_slot_is_taken_without_waiting_for_what_still_uses_it():
    slots, gate = Slots("slots", allocate=cut_from(np.zeros(20, np.uint8))), threading.Event()
    slots.reserve(10, count=2)
    first, second = slots.take(), slots.take()
    with HostStream("slow") as stream:
        first.release(after=stream.submit(gate.wait))
        second.release()
        assert slots.take() is first
        assert not first.busy.done()
        gate.set()
        first.busy.wait()


def test_more_slots_keep_the_memory_of_those_that_are_there():
    memory = np.zeros(30, np.uint8)
    slots = Slots("slots", allocate=cut_from(memory))
    slots.reserve(10, count=1)
    one = slots.take()
    one.memory.fill(7)
    slots.reserve(10, count=3)  # also while one is in use
    others = [slots.take(), slots.take()]
    for other in others:
        other.memory.fill(9)
    assert memory.tolist() == [7] * 10 + [9] * 20
    with pytest.raises(UnitStateError, match="got all of them in use"):
        slots.take()
    with pytest.raises(UnitStateError, match="Expected no slots in use while they grow, got 3"):
        slots.reserve(11, count=3)


def test_all_slots_are_taken_back_when_a_run_ends_early():
    slots = Slots("slots", allocate=cut_from(np.zeros(20, np.uint8)))
    slots.reserve(10, count=2)
    slots.take(10)
    slots.reclaim()
    assert (slots.available, slots.leased_nbytes, slots.peak_nbytes) == (2, 0, 10)
    assert {id(slots.take()), id(slots.take())} == {id(slot) for slot in slots}
