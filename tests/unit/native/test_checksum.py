"""crc32c: known values, pieces, joining; every form the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.native import reference
from zerort.native.extension import kernels

needs_native = pytest.mark.skipif(not native.AVAILABLE, reason=f"kernels are {native.describe()}")


def portable(data: object, value: int = 0) -> int:
    assert kernels is not None
    result = kernels.crc32c_portable(data, value)
    assert result is not None
    return result


FORMS = [
    pytest.param(native.crc32c, id="native", marks=needs_native),
    pytest.param(portable, id="native-portable", marks=needs_native),
    pytest.param(reference.crc32c, id="numpy"),
]
COMBINES = [
    pytest.param(native.crc32c_combine, id="native", marks=needs_native),
    pytest.param(reference.crc32c_combine, id="numpy"),
]


def bitwise(data: bytes, value: int = 0) -> int:
    """The definition: one bit at a time."""
    state = value ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (b"a", 0xC1D04330),
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_values(form, data: bytes, value: int) -> None:
    assert form(data) == value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nbytes", [1, 7, 15, 16, 17, 255, 767, 768, 769, 1023, 3000])
def test_equals_the_definition(form, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes + 3)
    for start in range(3):  # starts that no load is aligned to
        assert form(memoryview(data)[start:], 0xDEADBEEF) == bitwise(data[start:], 0xDEADBEEF)


@needs_native
@pytest.mark.parametrize("nbytes", [12287, 12288, 12289, 100_003, (1 << 21) - 1, (1 << 21) + 4321, 5_000_011])
def test_all_forms_agree_on_large_data(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert native.crc32c(data) == portable(data) == reference.crc32c(data)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(data=st.binary(max_size=2000), cut=st.integers(0, 2000))
def test_goes_on_from_a_value(form, data: bytes, cut: int) -> None:
    assert form(data[cut:], form(data[:cut])) == form(data)


@pytest.mark.parametrize("combine", COMBINES)
@settings(max_examples=60)
@given(a=st.binary(max_size=300), b=st.binary(max_size=3000))
def test_combines(combine, a: bytes, b: bytes) -> None:
    assert combine(reference.crc32c(a), reference.crc32c(b), len(b)) == reference.crc32c(a + b)


@pytest.mark.parametrize("combine", COMBINES)
def test_combines_beyond_memory(combine) -> None:
    # Appending in two goes or in one is the same, also for lengths that nobody can allocate.
    a, zeros, half = 0x12345678, 0, 3 << 41
    assert combine(combine(a, zeros, half), zeros, half) == combine(a, zeros, 2 * half)


@pytest.mark.parametrize("form", FORMS)
def test_takes_any_contiguous_buffer(form) -> None:
    array = np.random.default_rng(0).standard_normal((30, 41))
    want = form(array.tobytes())
    for data in (
        array,
        array.view(np.int64),
        memoryview(array),
        bytearray(array.tobytes()),
        array.view(ml_dtypes.bfloat16),
    ):
        assert form(data) == want
    array.flags.writeable = False
    assert form(array) == want
    assert form(np.empty(0, ml_dtypes.bfloat16)) == 0


def test_refuses_what_is_not_contiguous() -> None:
    with pytest.raises(ValueError, match=r"Expected data to be a contiguous buffer or array, got ndarray"):
        native.crc32c(np.zeros((4, 4)).T[1:])
    with pytest.raises(ValueError, match=r"got memoryview \(not contiguous\)\. Pass bytes"):
        native.crc32c(memoryview(b"abcdef")[::2])
    with pytest.raises(ValueError, match=r"got str"):
        native.crc32c("text")


def test_refuses_what_is_no_checksum() -> None:
    with pytest.raises(ValueError, match=r"Expected value from 0 to 2\*\*32 - 1, got -1"):
        native.crc32c(b"", -1)
    with pytest.raises(ValueError, match=r"Expected b from 0"):
        native.crc32c_combine(0, 1 << 32, 4)
    with pytest.raises(ValueError, match=r"Expected length_of_b"):
        native.crc32c_combine(0, 0, -4)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 300_000])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda data, grain, copy: native.crc32c_grains(data, grain, copy_out=copy), id="native"),
        pytest.param(reference.crc32c_grains, id="numpy"),
    ],
)
def test_grains_are_summed_one_by_one(form, nbytes: int, copied: bool) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    copy = np.zeros(nbytes + 5, np.uint8) if copied else None
    sums = form(data, 4096, copy)
    assert sums.tolist() == [reference.crc32c(data[at : at + 4096]) for at in range(0, nbytes, 4096)]
    if copy is not None:
        assert np.array_equal(copy[:nbytes], data)
        assert not copy[nbytes:].any()


def test_grains_refuse_what_cannot_be_summed() -> None:
    with pytest.raises(ValueError, match="grain of at least one byte, got 0"):
        native.crc32c_grains(np.zeros(4, np.uint8), 0)
    with pytest.raises(ValueError, match="copy_out to hold 8 bytes, got 4"):
        native.crc32c_grains(np.zeros(8, np.uint8), 4, copy_out=np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        native.crc32c_grains(np.zeros(8, np.uint8)[::2], 4)
