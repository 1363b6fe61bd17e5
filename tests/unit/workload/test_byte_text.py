"""The example's text: a step's rows are the same however many ranks share them."""

import numpy as np
import pytest

from zerort.workload.byte_text import ByteText

TEXT = ByteText(rows=13, context=24, limit=50_000)


def test_rows_are_text_and_what_follows():
    x, y = TEXT.batch(3)
    assert x.shape == y.shape == (13, 24)
    assert x.dtype == y.dtype == np.uint8
    assert len(TEXT.bytes) == 50_000
    whole = TEXT.bytes.tobytes()
    for row, after in zip(x, y, strict=True):
        assert row.tobytes() + after[-1:].tobytes() in whole
        np.testing.assert_array_equal(row[1:], after[:-1])


@pytest.mark.parametrize("of", [1, 2, 3, 4, 8, 20])
def test_shards_make_up_the_batch(of):
    for step in (0, 7, 1_000_000):
        parts = [TEXT.batch(step, shard, of=of) for shard in range(of)]
        assert max(map(len, (x for x, _ in parts))) - min(map(len, (x for x, _ in parts))) <= 1
        for at in range(2):
            np.testing.assert_array_equal(np.concatenate([part[at] for part in parts]), TEXT.batch(step)[at])


def test_steps_and_seeds_differ_and_repeat():
    again = ByteText(rows=13, context=24, limit=50_000)
    other = ByteText(rows=13, context=24, limit=50_000, seed=1)
    np.testing.assert_array_equal(TEXT.batch(5)[0], again.batch(5)[0])
    assert (TEXT.batch(5)[0] != TEXT.batch(6)[0]).any()
    assert (TEXT.batch(5)[0] != other.batch(5)[0]).any()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="rows=0"):
        ByteText(rows=0, context=8)
    with pytest.raises(ValueError, match="limit=9"):
        ByteText(rows=1, context=8, limit=9)
    with pytest.raises(ValueError, match="Expected a shard from 0 to 3, got 4"):
        TEXT.batch(0, 4, of=4)
