"""Delays by seed: a program that forgets to wait is wrong at times, one that waits is right always."""

import pytest

# Twenty times: to the device on one stream, back on another; {wait} is what a correct program does in between.
PIPELINE = """
from cupy.cuda import Stream

one, two = Stream(non_blocking=True), Stream(non_blocking=True)
device = cupy.zeros(64, "f")
source, target = (np.frombuffer(cupy.cuda.alloc_pinned_memory(256), "f", 64) for _ in range(2))
source[:] = 7
for _ in range(20):
    runtime.memset(device.data.ptr, 0, 256)
    runtime.deviceSynchronize()
    runtime.memcpyAsync(device.data.ptr, source.ctypes.data, 256, runtime.memcpyDefault, one.ptr)
    {wait}
    runtime.memcpyAsync(target.ctypes.data, device.data.ptr, 256, runtime.memcpyDefault, two.ptr)
    two.synchronize()
    print(target[0])
    one.synchronize()
"""


@pytest.fixture
def results(program):
    """What the pipeline gives under some seeds; one process each, as a seed is for life."""

    def run(wait):
        code = PIPELINE.replace("{wait}", wait)
        return {line for seed in (1, 2, 3) for line in program(code, seed=seed, delay_us=50_000).stdout.split()}

    return run


def test_a_missing_wait_gives_wrong_results_at_times(results):
    given = results("")
    assert "7.0" in given
    assert given & {"0.0", "nan"}


def test_a_program_that_waits_is_always_right(results):
    assert results("two.wait_event(one.record())") == {"7.0"}


def test_who_reads_too_early_finds_poison(program):
    code = """
        host = np.frombuffer(cupy.cuda.alloc_pinned_memory(256), "f", 64)
        host[:] = 5  # of the step before, and still right
        device = cupy.full(64, 5, "f")
        runtime.deviceSynchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        seen = set()
        for _ in range(20):
            runtime.memcpyAsync(host.ctypes.data, device.data.ptr, 256, runtime.memcpyDefault, stream.ptr)
            while not stream.done:
                seen.add(str(host[0]))
        print(*seen, host[0])
        """
    done = program(code, seed=1, delay_us=50_000, races=0)
    assert "nan" in done.stdout
    assert done.stdout.split()[-1] == "5.0"


def test_a_seed_repeats_its_delays(program):
    code = """
        a = cupy.zeros(64)
        for _ in range(40):
            a += 1
        a.get()
        """

    def delays(seed):
        done = program(code, seed=seed, trace=1)
        return [line.split("]: ")[1] for line in done.stderr.splitlines() if " us late" in line]

    first, second, other = delays(5), delays(5), delays(6)
    assert len(first) > 40
    assert first == second
    assert first != other
