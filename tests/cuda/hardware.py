"""The GPUs that the tests run on: emulated by `tests/cusim`, or real ones with ``CUSIM=0``. Tests ask only here.

EMULATED               the one flag
only_emulated(why)     a mark for tests that need what no real GPU has: races that are found, limits that are set
environment(…)         of child processes, in either mode
host_reads, reseed, …  cusim's, which say and do nothing on a real GPU
"""

import os

import pytest

EMULATED = os.environ.get("CUSIM") != "0"

_OF_NO_CONSEQUENCE = {"seed", "delay_us", "report"}
"""Settings of the emulator without which a test shows less, and passes all the same."""

if EMULATED:
    import cusim

    host_reads, host_writes, clear, findings = cusim.host_reads, cusim.host_writes, cusim.clear, cusim.findings
    findings_in, reseed = cusim.findings_in, cusim.reseed
else:

    def _nothing(*_):
        return []

    host_reads = host_writes = clear = findings = findings_in = reseed = _nothing


def only_emulated(why):
    """Skip a test on real GPUs, which cannot do what it needs."""
    return pytest.mark.skipif(not EMULATED, reason=f"only on the emulated GPU: {why}")


def start():
    """Make CuPy find emulated GPUs, if that is what the tests run on."""
    if EMULATED:
        os.environ.setdefault("CUSIM_DEVICES", "4")
        os.environ.setdefault("CUSIM_MEM_MB", "512")
        os.environ.setdefault("CUSIM_DELAY_US", "200")
        cusim.start()


def count():
    """Return how many GPUs there are; 0 without CuPy or a driver."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # CuPy says it in more than one way
        return 0


def environment(*, devices, mem_mb=None, **settings):
    """Return the environment of a child process that sees so many GPUs.

    Args:
        devices: How many; on real GPUs the test is skipped if there are fewer.
        mem_mb: Memory of each, if the test needs that limit.
        settings: Of the emulator, as in its README. The test is skipped on real GPUs if it needs one of them.
    """
    if EMULATED:
        return cusim.environment(devices=devices, mem_mb=256 if mem_mb is None else mem_mb, **settings)
    needed = sorted({*settings, *(["mem_mb"] if mem_mb is not None else [])} - _OF_NO_CONSEQUENCE)
    if needed:
        pytest.skip(f"only on the emulated GPU: a real one cannot be told {', '.join(needed)}")
    if count() < devices:
        pytest.skip(f"needs {devices} GPUs, found {count()}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count())))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:devices])}
