"""Sets of places: told once, found by where this rank last called from, forgotten alike on every rank."""

from zerort.comm.transports import places
from zerort.comm.transports.places import Places


def test_a_set_is_learnt_once_and_found_by_the_place_of_this_rank():
    mine = Places(0)
    first, second = mine.learn([b"a", b"x"]), mine.learn([b"b", b"y"])
    assert first != second
    assert 0 not in (first, second)
    assert (mine.number_of(b"a"), mine.number_of(b"b"), mine.number_of(b"x")) == (first, second, 0)
    assert mine.learn([b"a", b"x"]) == first
    assert mine.tails(second) == [b"b", b"y"]
    assert mine.tails(0) is None


def test_of_sets_with_the_same_place_the_last_used_is_found():
    mine = Places(0)
    first, second = mine.learn([b"a", b"x"]), mine.learn([b"a", b"y"])
    assert mine.number_of(b"a") == second
    assert mine.use(first) == [b"a", b"x"]
    assert mine.number_of(b"a") == first


def test_the_oldest_is_forgotten_whoever_used_which(monkeypatch):
    monkeypatch.setattr(places, "MOST_PLACES", 2)
    ranks = [Places(rank) for rank in range(2)]
    sets = [[b"a", b"x"], [b"b", b"x"], [b"c", b"z"]]
    numbers = [[one.learn(tails) for tails in sets] for one in ranks]
    assert numbers[0] == numbers[1]
    oldest, kept, _ = numbers[0]
    assert [one.tails(oldest) for one in ranks] == [None, None]
    assert ranks[0].number_of(b"a") == 0
    assert ranks[1].number_of(b"x") == kept
    assert ranks[0].learn(sets[0]) not in numbers[0]


def test_numbers_are_used_again_but_never_0(monkeypatch):
    monkeypatch.setattr(places, "MOST_PLACES", 2)
    monkeypatch.setattr(places, "NUMBER_BITS", 2)
    mine = Places(0)
    numbers = [mine.learn([bytes([k])]) for k in range(8)]
    assert set(numbers) == {1, 2, 3}
    assert mine.tails(numbers[-1]) == [bytes([7])]


def test_a_number_whose_set_is_still_told_is_not_given_to_another(monkeypatch):
    monkeypatch.setattr(places, "MOST_PLACES", 2)
    monkeypatch.setattr(places, "NUMBER_BITS", 2)
    mine = Places(0)
    kept = mine.learn([b"kept"])
    for k in range(8):
        assert mine.learn([bytes([k])]) != kept
        assert mine.learn([b"kept"]) == kept
    assert mine.tails(kept) == [b"kept"]
