"""Arrays of which many elements are zero: the others and a bitmap give the same bits back."""

import ml_dtypes
import numpy as np
import pytest

from zerort.codec import decode_sparse, encode_sparse, sparse_nbytes

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.uint8]


def half_zero(numel, dtype, share=0.5):
    lot = np.random.default_rng(numel)
    values = (lot.standard_normal(numel) * 8).astype(dtype)
    values[lot.random(numel) < share] = 0
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: np.dtype(one).name)
@pytest.mark.parametrize("numel", [1, 9, 65_536, 65_537 + 1_000])
def test_what_is_encoded_comes_back(numel, dtype):
    for share in (0.5, 1.0):
        values = half_zero(numel, dtype, share)
        payload = encode_sparse(values)
        assert sparse_nbytes(values) == np.count_nonzero(values.view(f"u{values.itemsize}")) * values.itemsize + (
            -(-numel // 8)
        )
        if payload is None:
            assert sparse_nbytes(values) >= values.nbytes
            continue
        assert payload.nbytes == sparse_nbytes(values) < values.nbytes
        out = np.full(numel, 3, dtype)
        decode_sparse(out, payload)
        assert out.tobytes() == values.tobytes()


def test_bits_count_and_not_values():
    values = np.zeros(100, np.float32)
    values[[3, 50, 99]] = -0.0, np.nan, 1e-45
    payload = encode_sparse(values)
    assert payload.nbytes == 3 * 4 + 13
    out = np.ones(100, np.float32)
    decode_sparse(out, payload)
    assert out.tobytes() == values.tobytes()
    assert encode_sparse(np.ones(100, np.float32)) is None


def test_what_does_not_fit_is_refused():
    payload = encode_sparse(half_zero(1000, np.float32))
    for other, numel in ((payload[:-1], 1000), (payload, 900), (payload[:100], 1000), (payload[4:], 1000)):
        with pytest.raises(ValueError, match=r"got|Expected"):
            decode_sparse(np.empty(numel, np.float32), other.copy())


def test_each_element_is_written_once():
    """Others read the array who have decoded the same there: nothing in it is zero for a while."""
    values = half_zero(1000, np.float32)
    payload = encode_sparse(values)

    class Watched(np.ndarray):
        writes = 0

        def __setitem__(self, key, value):
            Watched.writes += np.asarray(value).size
            super().__setitem__(key, value)

        def fill(self, value):
            raise AssertionError("zeroed first")

    out = np.empty(1000, np.float32).view(Watched)
    decode_sparse(out, payload)
    assert Watched.writes == 1000
    assert out.tobytes() == values.tobytes()
