"""`Record`: named facts of all ranks, each with its reduction, in one exchange."""

import json

import numpy as np
import pytest

import zerort as zr
from zerort.engine.binding import Attachment
from zerort.engine.step.record import Record
from zerort.errors import CallError
from zerort.testing import run_threads

VALUES = np.array([[3, 0], [1, 0], [2, 4]])
"""Of three ranks."""


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("or", [True, True]),
        ("and", [True, False]),
        ("min", [1, 0]),
        ("max", [3, 4]),
        ("sum", [6, 4]),
        ("each", VALUES),
    ],
)
def test_a_fact_is_reduced_over_the_ranks(reduction, expected):
    def body(group):
        record = Record()
        record.add("before", group.rank, "sum")
        record.add("fact", VALUES[group.rank], reduction)
        return record.exchange(group, name="facts")["fact"]

    for found in run_threads(3, body):
        np.testing.assert_array_equal(found, expected)


def test_floating_point_facts_keep_their_bits():
    values = np.array([0.1, np.nan, -0.0])

    def body(group):
        record = Record()
        record.add("rates", values * (group.rank + 1), "each")
        record.add("norm", 0.25 * (group.rank + 1), "sum")
        return record.exchange(group, name="facts")

    for found in run_threads(2, body):
        assert found["rates"].tobytes() == np.stack([values, values * 2]).tobytes()
        assert found["norm"] == [0.75]


def test_texts_cost_a_collective_only_when_a_rank_has_one(tmp_path):
    def calls_of(group):
        path = group.flight_record(tmp_path / str(group.rank))
        return len(json.loads(path.read_text())["calls"])

    def body(group, said):
        record = Record()
        record.add("fact", 1, "sum")
        record.add_text("why", said if group.rank == 1 else "")
        before = calls_of(group)
        return record.exchange(group, name="facts")["why"], calls_of(group) - before

    assert run_threads(2, lambda group: body(group, "")) == [(["", ""], 1)] * 2
    assert run_threads(2, lambda group: body(group, "a fan failed")) == [(["", "a fan failed"], 3)] * 2


def test_a_binding_adds_a_fact_to_the_step():
    class Counting(Attachment):
        def __init__(self, rank):
            self.rank, self.heard = rank, []

        def agree(self, record):
            record.add("tokens", 10 + self.rank, "sum", then=lambda total: self.heard.append(int(total[0])))

    def body(group):
        with zr.open(group=group, optimizer=zr.SGD(lr=1.0)) as rt:
            unit = rt.register("a", {"w": np.zeros(3, np.float32)})
            counting = Counting(rt.rank)
            rt.attachments.append(counting)
            unit.reduce({"w": np.ones(3, np.float32)})
            rt.step()
            return counting.heard

    assert run_threads(2, body) == [[21], [21]]


def test_a_name_is_used_once():
    record = Record()
    record.add("fact", 1, "sum")
    for again in (lambda: record.add("fact", 1, "sum"), lambda: record.add_text("fact", "")):
        with pytest.raises(CallError, match="'fact' twice"):
            again()
    with pytest.raises(CallError, match="'mean'"):
        record.add("other", 1, "mean")


def test_the_name_that_texts_travel_under_is_refused():
    with pytest.raises(CallError, match="Expected a new name for a fact"):
        Record().add("some rank has a text", 1, "or")
