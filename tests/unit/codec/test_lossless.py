"""Deltas and byte planes give back every bit, in both forms of the kernels; damaged ones are refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import native
from zerort.codec import apply_delta, delta_nbytes, encode_delta, join_planes, measure_delta, split_planes
from zerort.codec.delta import HEADER_NBYTES
from zerort.errors import CallError
from zerort.native import reference

FORMS = [
    pytest.param(native, id="native", marks=pytest.mark.skipif(not native.AVAILABLE, reason="no native kernels")),
    pytest.param(reference, id="numpy"),
]
DTYPES = [np.uint8, ml_dtypes.bfloat16, np.float32, np.float64]


def pair(numel, share, dtype=ml_dtypes.bfloat16, seed=0):
    """Return bits, and the same with a share of the elements changed; NaN among both."""
    lot = np.random.default_rng(seed)
    base = np.frombuffer(lot.bytes(numel * np.dtype(dtype).itemsize), dtype)
    now = base.copy()
    bits = now.view(f"u{now.itemsize}")
    bits[lot.random(numel) < share] ^= 1
    return base, now


def rebuilt(base, payload):
    target = base.copy()
    apply_delta(target, payload)
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: np.dtype(one).name)
@pytest.mark.parametrize("share", [0, 1e-3, 0.01, 0.2, 1])
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 5_000])
def test_a_delta_makes_the_base_equal(numel, share, dtype):
    base, now = pair(numel, share, dtype)
    payload = encode_delta(base, now)
    assert rebuilt(base, payload).tobytes() == now.tobytes()
    assert rebuilt(now, payload).tobytes() == now.tobytes()  # values are absolute


@pytest.mark.parametrize("share", [0, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1])
def test_a_delta_is_as_small_as_promised(share):
    """At most 1.6 times the changed share and 1 % of the array, never above 1.01 times."""
    base, now = pair(200_000, share)
    changed = float((base.view(np.uint16) != now.view(np.uint16)).mean())
    part = encode_delta(base, now).nbytes / now.nbytes
    assert part <= 1.6 * changed + 0.01
    assert part <= 1.01
    if share == 0:
        assert part * now.nbytes == HEADER_NBYTES


@pytest.mark.parametrize("share", [0, 0.01, 0.2, 1])
def test_a_delta_goes_where_it_was_measured_for(share):
    base, now = pair(3_001, share)
    size = measure_delta(base, now)
    assert size.changed == np.count_nonzero(base.view(np.uint16) != now.view(np.uint16))
    room = np.zeros(delta_nbytes(now.size, now.itemsize) + 8, np.uint8)
    assert size.nbytes <= delta_nbytes(now.size, now.itemsize)
    payload = encode_delta(base, now, size=size, out=room[: size.nbytes])
    assert payload.tobytes() == encode_delta(base, now).tobytes() == room[: size.nbytes].tobytes()
    assert not room[size.nbytes :].any()
    assert rebuilt(base, payload).tobytes() == now.tobytes()


@settings(max_examples=80, deadline=None)
@given(numel=st.integers(0, 2_000), where=st.lists(st.integers(0, 1_999), max_size=20), form=st.sampled_from([0, 1]))
def test_gaps_of_any_length(numel, where, form):
    """255 and more unchanged elements in a row, at the beginning, between, at the end."""
    kernels = (native, reference)[form]
    base = np.zeros(numel, np.uint16)
    now = base.copy()
    now[[at for at in where if at < numel]] = 7
    for bitmap in (False, True):
        changed, gap_nbytes = kernels.find_changes(base, now)
        positions = np.zeros(-(-numel // 8) if bitmap else gap_nbytes, np.uint8)
        values = np.zeros(changed, np.uint16)
        kernels.write_changes(base, now, positions, values, bitmap=bitmap)
        target = base.copy()
        kernels.apply_changes(target, positions, values, bitmap=bitmap)
        assert target.tobytes() == now.tobytes()


@pytest.mark.skipif(not native.AVAILABLE, reason="no native kernels")
@pytest.mark.parametrize("bitmap", [False, True])
@pytest.mark.parametrize("share", [0, 1e-3, 0.02, 0.7])
def test_native_writes_what_numpy_writes(share, bitmap):
    base, now = (one.view(np.uint32) for one in pair(70_001, share, np.float32))
    assert native.find_changes(base, now) == reference.find_changes(base, now)
    changed, gap_nbytes = reference.find_changes(base, now)
    written = []
    for kernels in (native, reference):
        positions = np.zeros(-(-base.size // 8) if bitmap else gap_nbytes, np.uint8)
        values = np.zeros(changed, np.uint32)
        kernels.write_changes(base, now, positions, values, bitmap=bitmap)
        written.append((positions.tobytes(), values.tobytes()))
    assert written[0] == written[1]


@pytest.mark.parametrize("form", FORMS)
def test_positions_that_do_not_fit_write_nothing_outside(form):
    memory = np.zeros(100, np.uint16)
    target = memory[:50]
    for positions, values, bitmap in (
        ([49, 0], [1, 2], False),
        ([255, 255, 0], [1], False),
        ([3], [], False),
        ([3], [1, 2], False),
        ([255] * 7, [1] * 56, True),
        ([255] * 3, [1] * 24, True),
    ):
        arrays = (np.array(positions, np.uint8), np.array(values, np.uint16))
        refused = False
        try:
            refused = form.apply_changes(target, *arrays, bitmap=bitmap) is False
        except ValueError as error:
            refused = "The changes are damaged" in str(error)
        assert refused
        assert not memory[50:].any()


@pytest.mark.parametrize("damage", range(HEADER_NBYTES))
def test_a_damaged_header_is_refused_or_harmless(damage):
    base, now = pair(4_000, 0.02)
    payload = encode_delta(base, now)
    payload[damage] ^= 0x81
    if damage in range(2, 8):  # padding
        assert rebuilt(base, payload).tobytes() == now.tobytes()
    else:
        with pytest.raises(CallError):
            rebuilt(base, payload)


def test_a_delta_of_another_array_is_refused():
    base, now = pair(4_000, 0.02)
    payload = encode_delta(base, now)
    with pytest.raises(CallError, match="4001 elements of 2 bytes, got one of 4000"):
        rebuilt(pair(4_001, 0)[0], payload)
    with pytest.raises(CallError, match="at least 24 bytes, got 10"):
        rebuilt(base, payload[:10])
    with pytest.raises(CallError, match="damaged"):
        rebuilt(base, payload[:-1].copy())
    with pytest.raises(ValueError, match="now of 4000 elements, got 3999"):
        encode_delta(base, now[:-1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: np.dtype(one).name)
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 1_000])
def test_planes_give_back_every_bit(numel, dtype, form):
    elements = pair(numel, 0, dtype)[0]
    planes = np.zeros(elements.nbytes, np.uint8)
    form.split_planes(planes, elements)
    octets = elements.view(np.uint8).reshape(numel, elements.itemsize)
    assert planes.tobytes() == octets.T.tobytes()
    back = np.zeros_like(elements)
    form.join_planes(back, planes)
    assert back.tobytes() == elements.tobytes()


def test_planes_of_an_array():
    elements = pair(777, 0, np.float32)[0]
    back = np.empty_like(elements)
    join_planes(back, split_planes(elements))
    assert back.tobytes() == elements.tobytes()
    with pytest.raises(ValueError, match="planes of 3108 elements, got 3107"):
        join_planes(back, split_planes(elements)[:-1])
