"""Addresses of which ranges come into use one after the other: what is in two of them stays where it is."""

import mmap
import os
import resource

import numpy as np
import pytest
import seams

from zerort.device import HostDevice
from zerort.device.host.reserve import LEAST_NBYTES, Reserve

NUMEL = 4 * LEAST_NBYTES // 4


def resident(array):
    """Return the bytes of an array's pages that have memory behind them."""
    first = array.ctypes.data // mmap.PAGESIZE
    last = -(-(array.ctypes.data + array.nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * mmap.PAGESIZE


def opened(dtype="float32", numel=NUMEL):
    found = HostDevice().reserve(numel, dtype)
    assert found is not None
    return found


def test_what_is_in_both_ranges_stays_and_the_rest_goes():
    reserve = opened()
    old = reserve.take(1000, NUMEL // 2)
    assert not old.any()
    old[:] = np.arange(old.size)
    new = reserve.take(NUMEL // 4, NUMEL)
    assert np.shares_memory(old, new)
    new[NUMEL // 4 :] = -1
    reserve.give_back(1000, NUMEL // 2, keep=(NUMEL // 4, NUMEL))
    np.testing.assert_array_equal(new[: NUMEL // 4], np.arange(NUMEL // 4 - 1000, old.size))
    assert resident(new) == new.nbytes
    assert resident(old[: NUMEL // 4 - 1000]) == 0
    assert not old[: NUMEL // 4 - 1000].any()  # an array that is not in use any more can be read still


@pytest.mark.parametrize("keep", [(5, 900), (5000, 5001), (20_000, 20_000), (0, 1 << 20)])
def test_pages_with_values_that_are_kept_stay(keep):
    """Ranges begin and end in the middle of pages."""
    reserve = opened()
    every = reserve.take(0, NUMEL)
    every[:] = 7
    reserve.give_back(3, NUMEL, keep=keep)
    assert (every[slice(*keep)] == 7).all()
    page = mmap.PAGESIZE // 4
    most = (-(-keep[1] // page) - keep[0] // page) * mmap.PAGESIZE if keep[0] < keep[1] else 0
    assert resident(every) == most
    again = reserve.take(0, NUMEL)
    again[:] = 8
    assert (every == 8).all()


def test_what_is_not_in_use_is_no_memory_of_the_process():
    """A limit (ulimit -d) does not count it."""

    def held():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))

    before = held()
    reserve = opened(numel=1 << 28)
    assert held() - before < 1 << 22
    some = reserve.take(0, 1 << 24)
    assert (1 << 26) <= held() - before < (1 << 26) + (1 << 22)
    reserve.give_back(0, 1 << 24, keep=(0, 0))
    assert held() - before < 1 << 22
    assert not some[-1]


def test_memory_that_a_process_may_not_have_is_refused():
    child = os.fork()
    if not child:
        end = 1
        try:
            reserve = opened(numel=1 << 28)
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
            with pytest.raises(MemoryError, match="Expected 1,073,741,824 bytes of memory"):
                reserve.take(0, 1 << 28)
            end = 0
        finally:
            os._exit(end)
    assert os.waitpid(child, 0)[1] == 0


def test_small_arrays_and_processes_with_few_addresses_have_none():
    assert HostDevice().reserve(1000, "float32") is None
    assert HostDevice().reserve(0, "float32") is None
    limited = type(resource)("limited")
    limited.RLIMIT_AS, limited.RLIM_INFINITY = resource.RLIMIT_AS, resource.RLIM_INFINITY
    limited.getrlimit = lambda kind: (1 << 40, 1 << 40)
    with seams.inside(Reserve, resource=limited):
        assert HostDevice().reserve(NUMEL, "float32") is None


def test_a_range_may_be_empty():
    reserve = opened("bfloat16")
    assert reserve.take(64, 64).size == 0
    reserve.give_back(64, 64, keep=(0, 0))
