"""The placement table: every legal move, and every other one refused with the cure."""

from __future__ import annotations

import itertools
import pickle

import pytest

from zerort.errors import PlanError
from zerort.layout import TRANSITIONS, Collective, Placement, transition
from zerort.layout import placement as module

MOVES = {
    ("SHARDED", "REPLICATED"): "ALL_GATHER",
    ("PARTIAL", "SHARDED"): "REDUCE_SCATTER",
    ("PARTIAL", "REPLICATED"): "ALL_REDUCE",
    ("REPLICATED", "SHARDED"): "SLICE",
    ("REPLICATED", "REPLICATED"): "NONE",
    ("PARTIAL", "PARTIAL"): "NONE",
    ("SHARDED", "SHARDED"): "NONE",
}


@pytest.mark.parametrize(("source", "to"), list(itertools.product(Placement, Placement)))
def test_every_pair_of_placements_is_in_the_table_or_refused(source: Placement, to: Placement) -> None:
    expected = MOVES.get((source.name, to.name))
    if expected is None:
        with pytest.raises(PlanError, match=rf"^Expected one of the moves .*, got {source} → {to}\."):
            transition(source, to=to)
    else:
        assert transition(source, to=to) is Collective[expected]


def test_the_refusal_lists_the_four_legal_moves() -> None:
    with pytest.raises(PlanError) as caught:
        transition(Placement.SHARDED, to=Placement.PARTIAL)
    for source, to in MOVES:
        assert (f"{source} → {to}" in str(caught.value)) == (source != to)


def test_text_is_no_placement() -> None:
    with pytest.raises(PlanError, match="got sharded → REPLICATED"):
        transition("sharded", to=Placement.REPLICATED)  # type: ignore[arg-type]


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[Placement.SHARDED, Placement.PARTIAL] = Collective.NONE  # type: ignore[index]


def test_the_drawn_table_is_the_table() -> None:
    lines = [line.split() for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    columns = lines[0][3:]
    drawn = {(row[0], to): cell for row in lines[1:] for to, cell in zip(columns, row[1:], strict=True)}
    assert len(drawn) == 9
    for (source, to), cell in drawn.items():
        assert MOVES.get((source, to), "-").lower() == cell


def test_names_are_short_and_identity_survives_pickling() -> None:
    assert repr(Placement.SHARDED) == "Placement.SHARDED"
    assert str(Collective.SLICE) == "SLICE"
    assert pickle.loads(pickle.dumps(Placement.PARTIAL)) is Placement.PARTIAL
