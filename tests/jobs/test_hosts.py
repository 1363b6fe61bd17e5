"""Groups over several hosts: the hierarchical group picked by itself, its bytes on the wire, and its timeouts."""

import re
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hosts as network
from conftest import PRELUDE

WHY_NOT = network.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def on_hosts(tmp_path):
    """Run a script on several hosts: ``on_hosts(2, 3, code)`` for two hosts of three ranks."""

    def run(hosts, ranks_per_host, code, timeout=150.0):
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + textwrap.dedent(code))
        with network.Hosts(hosts, tmp_path) as machines:
            env = {"ZERORT_FLIGHT_DIR": str(tmp_path / "flights")}
            return machines.run(ranks_per_host, [script], timeout=timeout, env=env)

    return run


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (3, 2), (2, 1)])
def test_every_byte_crosses_the_wire_once_per_pair_of_hosts(on_hosts, hosts, ranks):
    code = """
    from zerort import trace
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0))
    n, r, numel = group.size, group.rank, 120_000
    say(group)

    def wire(ticket):
        before = trace.counters().get("wire.bytes", 0)
        result = ticket().wait()
        sent = np.array([trace.counters().get("wire.bytes", 0) - before])
        return result, int(group.all_reduce(sent).wait()[0])

    shard = np.full(numel // n, r, np.float32)
    result, sent = wire(lambda: group.all_gather(shard))
    assert (result == np.repeat(np.arange(n), numel // n)).all()
    say("all_gather sent", sent) if r == 0 else None

    shards = group.empty_shared([numel // n] * n, "float32")
    shards.mine[:] = r
    result, sent = wire(lambda: group.all_gather(shards.mine, out=shards.full))
    assert (shards.full == np.repeat(np.arange(n), numel // n)).all()
    say("shared all_gather sent", sent) if r == 0 else None

    source = group.empty(numel, "float32")
    source[:] = r + 1
    result, sent = wire(lambda: group.reduce_scatter(source))
    assert (result == n * (n + 1) // 2).all()
    say("reduce_scatter sent", sent) if r == 0 else None

    result, sent = wire(lambda: group.all_reduce(np.full(numel, r + 1.0, np.float32)))
    assert (result == n * (n + 1) // 2).all()
    say("all_reduce sent", sent) if r == 0 else None
    group.close()
    """
    result = on_hosts(hosts, ranks, code)
    assert result.code == 0, result.output
    kind = "hierarchical" if ranks > 1 else "mpi"
    assert result.output.count(f"Group('world', {kind}") == hosts * ranks, result.output
    sent = {verb: int(number) for verb, number in re.findall(r"^(\w[\w ]*) sent (\d+)$", result.output, re.MULTILINE)}
    # The bound: each host must get, or give away, what the other hosts hold: (hosts - 1) times the array, in all.
    bound = (hosts - 1) * 120_000 * 4
    assert sent == {
        "all_gather": bound,
        "shared all_gather": bound,
        "reduce_scatter": bound,
        "all_reduce": 2 * bound,
    }


def test_a_missing_rank_on_another_host_is_named(on_hosts):
    code = """
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=5.0))
    group.barrier(name="before").wait()
    if group.rank == 3:
        wait_for_gates(0, 1, 2)
    try:
        group.all_reduce(np.ones(8), name="loss").wait()
    except CollectiveTimeoutError as error:
        text = str(error)
        good = "got no rank 3." in text and "rank 3: missing; last in #0 barrier() 'before'" in text
        say("rank", group.rank, "told" if good or "got it later" in text else text)
    open_gate(group.rank)
    group.close()
    """
    result = on_hosts(2, 2, code)
    assert not result.timed_out, result.output
    assert sorted(re.findall(r"rank (\d) told", result.output)) == ["0", "1", "2", "3"], result.output


def test_a_mismatch_across_hosts_is_the_same_everywhere(on_hosts):
    code = """
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0))
    try:
        group.all_reduce(np.ones(8 if group.rank else 9)).wait()
    except CollectiveMismatchError as error:
        say("rank", group.rank, "told", "rank 0: all_reduce(float64[9], sum)" in str(error))
    say("sum", group.all_reduce(np.ones(1)).wait()[0])
    group.close()
    """
    result = on_hosts(2, 2, code)
    assert result.code == 0, result.output
    assert result.output.count("told True") == 4, result.output
    assert result.output.count("sum 4.0") == 4


def test_an_exception_on_one_host_ends_the_job_on_all(on_hosts):
    code = """
    group = zr.open_group()
    group.barrier().wait()
    if group.rank == 3:
        raise KeyError("weights")
    group.barrier().wait()
    """
    result = on_hosts(2, 2, code)
    assert result.code not in (0, 124), result.output
    assert "[rank 3] KeyError: 'weights'" in result.output
