"""`Record`: named facts of all ranks, each with its reduction, in one exchange."""

import json

import numpy as np
import pytest

import zerort as zr
from zerort.comm.agreed import gather_json
from zerort.engine.attachment import Attachment
from zerort.engine.step.facts.record import Record
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


RANKS, UNITS, TENSORS = 64, 100, 2_000


def nbytes_received(group, folder, name):
    """Return the bytes that calls of this name bring one rank, over any wire, and how many of them there were.

    An all_gather brings what the others give; an all_reduce, two halves of (n - 1) / n of the array.
    """
    path = group.flight_record(folder / str(group.rank))
    rows = [row for row in json.loads(path.read_text())["calls"] if row["name"].startswith(name)]
    share = {"all_gather": group.size - 1, "all_reduce": 2 * (group.size - 1) / group.size}
    return sum(row["numel"] * np.dtype(row["dtype"]).itemsize * share[row["op"]] for row in rows), len(rows)


@pytest.mark.parametrize("differing", [False, True])
def test_the_facts_of_a_large_step_are_few_bytes_on_many_ranks(tmp_path, differing):
    """Without a difference digests travel alone; flags that differ cost a byte each, not one for each rank."""

    def body(group):
        present = np.ones(TENSORS, bool)
        present[group.rank] = not differing
        record = Record()
        record.add("failed", values=False, reduction="or")
        record.add("rates", np.full(3, 1e-3), "each")
        record.add("reduced", np.ones(UNITS, bool), "each")
        record.add("present", present, "or")
        record.add("everywhere", present, "and")
        record.add("nonfinite", -1, "each")
        record.add("stop", 0, "each")
        heard = record.exchange(group, name="facts")
        assert heard["present"].all()
        assert heard["everywhere"].sum() == TENSORS - (group.size if differing else 0)
        assert heard["rates"].shape == (RANKS, 3)
        assert heard["reduced"].all()
        return nbytes_received(group, tmp_path, "facts")

    digests = (3 * 1 + 4 * 2) * 8 * (RANKS - 1)
    flags = 2 * 2 * TENSORS * (RANKS - 1) / RANKS
    for nbytes, calls in run_threads(RANKS, body):
        assert nbytes == digests + (flags if differing else 0)
        assert calls == (2 if differing else 1)
        assert digests + flags / 2 <= 10_000  # a step has one such field: `present`


def test_values_that_are_the_same_everywhere_do_not_travel(tmp_path):
    """What ranks say when they open, register, save and load: a digest each, whatever its length."""
    value = {"names": [f"block{index}.weight" for index in range(TENSORS)]}

    def body(group):
        same = gather_json(group, value, name="same")
        other = gather_json(group, {**value, "rank": group.rank // 5}, name="other")
        assert same == [value] * group.size
        assert [one["rank"] for one in other] == [rank // 5 for rank in range(group.size)]
        same[0]["names"].clear()
        assert same[1] == value
        return [nbytes_received(group, tmp_path, name) for name in ("same", "other")]

    for same, other in run_threads(6, body):
        assert same == (3 * 8 * 5, 1)
        assert other[0] > len(json.dumps(value)) * 5
        assert other[1] == 2


def test_large_facts_that_differ_are_reduced_as_small_ones_are():
    """Numbers and flags of more than a few elements, with every reduction, equal on all ranks or not."""
    generator = np.random.default_rng(5)
    numbers = generator.integers(-9, 9, (3, 40))
    numbers[:, :3] = 0
    flags = numbers > 0
    wanted = {
        "or": [numbers.any(0), flags.any(0)],
        "and": [numbers.all(0), flags.all(0)],
        "min": [numbers.min(0), flags.min(0)],
        "max": [numbers.max(0), flags.max(0)],
        "sum": [numbers.sum(0), flags.sum(0)],
        "each": [numbers, flags],
    }

    def body(group):
        record = Record()
        for reduction in wanted:
            record.add(f"numbers {reduction}", numbers[group.rank], reduction)
            record.add(f"same {reduction}", numbers[0], reduction)
            record.add(f"flags {reduction}", flags[group.rank], reduction)
        return record.exchange(group, name="facts")

    for heard in run_threads(3, body):
        for reduction, (of_numbers, of_flags) in wanted.items():
            np.testing.assert_array_equal(heard[f"numbers {reduction}"], of_numbers, err_msg=reduction)
            np.testing.assert_array_equal(heard[f"flags {reduction}"], of_flags, err_msg=reduction)
        np.testing.assert_array_equal(heard["same sum"], 3 * numbers[0])
        np.testing.assert_array_equal(heard["same each"], np.stack([numbers[0]] * 3))
        np.testing.assert_array_equal(heard["same and"], numbers[0] != 0)
