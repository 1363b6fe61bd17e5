"""Units that only some ranks use, gathered without slots: their memory, and their bytes."""

import threading
from collections import Counter

import numpy as np
import pytest

import zerort as zr
from zerort.engine.binding import Binding
from zerort.testing.threads import run_threads
from zerort.testing.threads_transport import ThreadsTransport

UNITS = {name: {"w": zr.TensorSpec((30, 7)), "b": zr.TensorSpec((5,))} for name in "ab"}
PLAN, OPTIMIZER = zr.Plan.zero(3), zr.SGD(lr=0.1)


@pytest.fixture
def no_shared_memory(monkeypatch):
    monkeypatch.setattr(ThreadsTransport, "one_memory", False)


def bind(rt):
    """Register the model as a binding does."""
    binding = Binding(rt)
    return {
        name: binding.register(name, {local: np.ones(spec.shape, np.float32) for local, spec in tensors.items()})
        for name, tensors in UNITS.items()
    }


def test_the_memory_that_they_take_is_counted_and_told(no_shared_memory):
    """Rank 1 holds a unit of its own while it joins rank 0's, whose turn is first: the most that can be."""

    def body(group):
        with zr.open(PLAN, OPTIMIZER, group=group) as rt:
            units = bind(rt)
            for unit in units.values():
                unit.copy_parts(np.copy)
            before = rt.memory().gathered_apart
            units["b" if rt.rank else "a"].copy_parts(np.copy)
            group.barrier().wait()
            return before, rt.memory().gathered_apart

    told = zr.forecast(UNITS, plan=PLAN, optimizer=OPTIMIZER, size=2, one_memory=False)
    assert run_threads(2, body) == [(0, told.gathered_apart // 2), (0, told.gathered_apart)]
    assert told.gathered_apart >= 2 * 4 * (30 * 7 + 5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"one_memory": True}, id="gathers that meet nobody"),
        pytest.param({"size": 1}, id="one rank"),
        pytest.param({"replicate": 2}, id="copies of the model"),
        pytest.param({"plan": zr.Plan.zero(2)}, id="replicated"),
        pytest.param({"plan": zr.Plan.zero(3, secondary="host")}, id="a copy on each host"),
        pytest.param({"wire": zr.Wire(gather="int8")}, id="codes"),
        pytest.param({"frozen": True, "frozen_format": "int8"}, id="frozen codes"),
        pytest.param({"rows": {"a": ("w",)}}, id="tables by rows"),
        pytest.param({"device": "cuda"}, id="gpus"),
    ],
)
def test_a_forecast_tells_of_none_where_ranks_cannot_join(settings):
    told = zr.forecast(UNITS, **{"plan": PLAN, "optimizer": OPTIMIZER, "size": 2, "one_memory": False, **settings})
    assert told.gathered_apart == 0


def test_parameters_on_a_disk_are_gathered_apart_also_in_one_memory():
    told = zr.forecast(UNITS, plan=zr.Plan.zero(3, parameter=zr.Tier.NVME), optimizer=OPTIMIZER, size=2)
    assert told.gathered_apart > 0


def test_bytes_that_another_thread_joins_are_not_lost():
    """A join between the read and the write of a sum on the thread that steps."""

    def body(group):
        with zr.open(PLAN, OPTIMIZER, group=group) as rt:
            bind(rt)
            ledger = rt.context.ledger
            ledger.turn()

            section, stepping = rt.units["a"].sections[0], threading.current_thread()

            def join():
                with group.differences.joins[f"{section.name} apart"]():
                    pass

            class Interleaved(Counter):
                def __getitem__(self, key):
                    value = self.get(key, 0)
                    if threading.current_thread() is stepping:
                        other = threading.Thread(target=join)
                        other.start()
                        other.join()
                    return value

            ledger.moved = Interleaved()
            ledger.moved["all_gather"] += 8
            ledger.moved = Counter(ledger.moved)
            joined = section.layout.end * section.parameters.dtype.itemsize
            return ledger.turn()[0] == {"all_gather": 8 + joined} and ledger.turn()[0] == {}

    assert run_threads(2, body) == [True, True]
