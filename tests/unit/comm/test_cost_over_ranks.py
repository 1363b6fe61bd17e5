"""What a rank sends between hosts, counted at up to 64 ranks, is what its formula says."""

import sys
from pathlib import Path

import pytest

from zerort.comm.transports import carrier

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import cost_over_ranks


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("row", cost_over_ranks.ROWS, ids=lambda row: row.title)
def test_messages_and_bytes_are_those_of_the_formula(row, ranks):
    assert row.counted(ranks) == row.formula(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_shards_longer_than_a_message_are_gathered_in_pieces(ranks, monkeypatch):
    monkeypatch.setattr(carrier, "_IN_PLACE_NBYTES", 40_000)
    assert cost_over_ranks.carry(ranks, gathers=True).messages == (ranks - 1) * -(-(1024**2) // ranks // 40_000)


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("row", cost_over_ranks.BOUNDS, ids=lambda row: row.title)
def test_alarms_stay_below_their_bound(row, ranks):
    counted, bound = row.counted(ranks), row.formula(ranks)
    assert counted.messages <= bound.messages
    assert counted.nbytes <= bound.nbytes


def test_the_picture_shows_what_was_counted(tmp_path):
    found = {row.title: {n: row.formula(n) for n in (2, 4)} for row in (*cost_over_ranks.ROWS, *cost_over_ranks.BOUNDS)}
    picture = cost_over_ranks.draw(found, found)
    assert picture.count("<polyline") == 2 * len(found)
    assert all(title in picture for title in found)
