"""Delays by seed: a program that forgets to wait is wrong for some seeds, one that waits is right for all."""

import pytest

# A copy to the host on a stream of its own; {wait} is what a correct program does in between.
PIPELINE = """
from cupy.cuda import Stream

one, two = Stream(non_blocking=True), Stream(non_blocking=True)
device = cupy.zeros(64, "f")
hosts = [np.frombuffer(cupy.cuda.alloc_pinned_memory(256), "f", 64) for _ in range(2)]
hosts[0][:] = 7
runtime.deviceSynchronize()
runtime.memcpyAsync(device.data.ptr, hosts[0].ctypes.data, 256, runtime.memcpyDefault, one.ptr)
{wait}
runtime.memcpyAsync(hosts[1].ctypes.data, device.data.ptr, 256, runtime.memcpyDefault, two.ptr)
two.synchronize()
print(hosts[1][0])
"""
SEEDS = range(1, 7)


@pytest.fixture
def results(program):
    """What the pipeline gives for each seed; one process each, as a seed is for life."""

    def run(wait):
        code = PIPELINE.replace("{wait}", wait)
        return [program(code, seed=seed, delay_us=50_000, races=0).stdout.strip() for seed in SEEDS]

    return run


def test_a_missing_wait_gives_wrong_results_for_some_seeds(results):
    given = results("")
    assert "7.0" in given
    assert {"0.0", "nan"} & set(given), given


def test_a_program_that_waits_is_right_for_every_seed(results):
    assert set(results("two.wait_event(one.record())")) == {"7.0"}


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
