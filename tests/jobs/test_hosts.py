"""Groups over several hosts: the hierarchical group picked by itself, its bytes on the wire, and its timeouts."""

import re
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hosts as network
from conftest import PRELUDE

from zerort.testing.jobs import wait_for_job

WHY_NOT = network.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def on_hosts(tmp_path):
    """Run a script on several hosts: ``on_hosts([3, 1], code)`` for one of three ranks and one of one."""

    def run(ranks, code, timeout=150.0):
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + textwrap.dedent(code))
        env = {"ZERORT_FLIGHT_DIR": str(tmp_path / "flights")}
        return network.run_on_hosts(ranks, [script], timeout=timeout, env=env)

    return run


@pytest.mark.parametrize("ranks", network.shapes([2, 2]))
def test_differences_between_hosts_have_the_bits_of_one_rank(on_hosts, ranks):
    """Each host has one copy, to which its ranks add a part each; one rank alone computes the same."""
    code = """
    from zerort.workload.byte_model import ByteModel
    from zerort.workload.byte_text import ByteText
    from zerort.workload.walk import Walk

    def run(group):
        wire = zr.Wire(gather="int4", feedback=True)
        with zr.open(zr.Plan.zero(3), zr.AdamW(lr=1e-2), virtual_shards=12, wire=wire, group=group) as rt:
            model, text = ByteModel(width=16, layers=1, context=8, heads=2), ByteText(rows=48, context=8, limit=20_000)
            walk = Walk(rt, model, text)
            return walk.train(3), [report.digest for report in walk.reports], walk.reports[-1].wire

    with zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0)) as group:
        found = run(group)
        with zr.open_group(kind="solo") as solo:
            assert run(solo) == found
        say(group.rank, found[2], "alike")
    """
    result = on_hosts(ranks, code)
    assert result.code == 0, result.output
    assert result.output.count("gather int4, feedback alike") == sum(ranks), result.output


@pytest.mark.parametrize("ranks", network.shapes([2, 2], [1, 3], [1, 1]))
def test_every_byte_crosses_the_wire_once_per_pair_of_hosts(on_hosts, ranks):
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

    shards = group.zeros_shared([numel // n] * n, "float32")
    shards.mine[:] = r
    result, sent = wire(lambda: group.all_gather(shards.mine, out=shards.full))
    assert (shards.full == np.repeat(np.arange(n), numel // n)).all()
    say("shared all_gather sent", sent) if r == 0 else None

    source = group.zeros(numel, "float32")
    source[:] = r + 1
    result, sent = wire(lambda: group.reduce_scatter(source))
    assert (result == n * (n + 1) // 2).all()
    say("reduce_scatter sent", sent) if r == 0 else None

    result, sent = wire(lambda: group.all_reduce(np.full(numel, r + 1.0, np.float32)))
    assert (result == n * (n + 1) // 2).all()
    say("all_reduce sent", sent) if r == 0 else None
    group.close()
    """
    result = on_hosts(ranks, code)
    assert result.code == 0, result.output
    kind = "hierarchical" if max(ranks) > 1 else "mpi"
    assert result.output.count(f"Group('world', {kind}") == sum(ranks), result.output
    sent = {verb: int(number) for verb, number in re.findall(r"^(\w[\w ]*) sent (\d+)$", result.output, re.MULTILINE)}
    # The bound: each host must get, or give away, what the other hosts hold: (hosts - 1) times the array, in all.
    bound = (len(ranks) - 1) * 120_000 * 4
    assert sent == {
        "all_gather": bound,
        "shared all_gather": bound,
        "reduce_scatter": bound,
        "all_reduce": 2 * bound,
    }


@pytest.mark.parametrize("ranks", network.shapes([1, 2, 1]))
def test_a_missing_rank_on_another_host_is_named(on_hosts, ranks):
    code = """
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=5.0))
    group.barrier(name="before").wait()
    last = group.size - 1
    if group.rank == last:
        wait_for_gates(*range(last))
    try:
        group.all_reduce(np.ones(8), name="loss").wait()
    except CollectiveTimeoutError as error:
        text = str(error)
        good = f"got no rank {last}." in text and f"rank {last}: missing; last in #0 barrier() 'before'" in text
        say("rank", group.rank, "told" if good or "got it later" in text else text)
    open_gate(group.rank)
    group.close()
    """
    result = on_hosts(ranks, code)
    assert not result.timed_out, result.output
    assert sorted(map(int, re.findall(r"rank (\d+) told", result.output))) == list(range(sum(ranks))), result.output


@pytest.mark.parametrize("ranks", network.shapes([2, 2], [1, 2, 1]))
def test_a_mismatch_across_hosts_is_the_same_everywhere(on_hosts, ranks):
    code = """
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0))
    try:
        group.all_reduce(np.ones(8 if group.rank else 9)).wait()
    except CollectiveMismatchError as error:
        say("rank", group.rank, "told", "rank 0: all_reduce(float64[9], sum)" in str(error))
    say("sum", group.all_reduce(np.ones(1)).wait()[0])
    group.close()
    """
    result = on_hosts(ranks, code)
    assert result.code == 0, result.output
    assert result.output.count("told True") == sum(ranks), result.output
    assert result.output.count(f"sum {sum(ranks)}.0") == sum(ranks)


@pytest.mark.parametrize("ranks", network.shapes([1, 2]))
def test_an_exception_on_one_host_ends_the_job_on_all(on_hosts, ranks):
    code = """
    group = zr.open_group()
    group.barrier().wait()
    if group.rank == group.size - 1:
        raise KeyError("weights")
    group.barrier().wait()
    """
    result = on_hosts(ranks, code)
    assert result.code not in (0, 124), result.output
    assert f"[rank {sum(ranks) - 1}] KeyError: 'weights'" in result.output


@pytest.mark.parametrize("ranks", network.shapes([2, 1, 1]))
def test_a_rank_that_dies_amid_a_large_call_ends_the_job_on_all_hosts(on_hosts, ranks):
    """While pieces are on the wire: nobody waits for the rest of them."""
    code = """
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0))
    last = group.size - 1
    source = np.ones(16 * 2**20, np.float32)
    group.all_reduce(source).wait()
    if group.rank == last:
        exchange = group._transport._exchange
        finish, count = exchange.finish, iter(range(100))
        def dying(messages, *, sequence):
            finish(messages, sequence=sequence)
            if next(count) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        exchange.finish = dying
    try:
        group.all_reduce(source).wait()
    except CollectiveError as error:
        say("rank", group.rank, "told", type(error).__name__)
        group.close()
    """
    result = on_hosts(ranks, code, timeout=50.0)
    assert result.code not in (0, 124), result.output


def test_eight_hosts_keep_the_contract_and_name_alike_who_is_missing(on_hosts):
    """On either way of greeting, whatever the network suggests; then one rank does not come."""
    code = """
    from zerort.comm.transports import small_calls as transport
    chosen = transport.is_direct

    def check(group):
        n, r = group.size, group.rank
        counts = [3 * k + 1 for k in range(n)]
        first, total = sum(counts[:r]), sum(counts)
        for numel in (5, 3_000, 40_000):  # with the greeting; in rounds
            mine = np.arange(numel, dtype=np.float64) + r
            whole = n * np.arange(numel) + n * (n - 1) // 2
            assert (group.all_reduce(mine).wait() == whole).all()
            got = group.reduce(mine, root=3).wait()
            assert (got is None) if r != 3 else (got == whole).all()
            assert (group.broadcast(mine.copy(), root=5).wait() == np.arange(numel) + 5).all()
        parts = np.arange(total, dtype=np.float64)
        assert (group.reduce_scatter(parts, counts=counts).wait() == n * parts[first : first + counts[r]]).all()
        assert (group.all_gather(parts[first : first + counts[r]], counts=counts).wait() == parts).all()
        try:
            group.all_reduce(np.ones(9 if r == 5 else 8)).wait()
        except CollectiveMismatchError as error:
            assert "rank 5: all_reduce(float64[9], sum)" in str(error), error
        else:
            raise AssertionError("no mismatch")
        assert group.all_reduce(np.ones(1)).wait()[0] == n

    for way in (True, False):
        transport.is_direct = lambda network, hosts: way
        with zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0)) as group:
            check(group)
    transport.is_direct = chosen
    group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=3.0))
    say("rank", group.rank, "kept the contract")
    group.barrier(name="before").wait()
    if group.rank == 6:
        wait_for_gates(0, 1, 2, 3, 4, 5, 7)
    try:
        group.all_reduce(np.ones(8), name="loss").wait()
    except CollectiveTimeoutError as error:
        say("rank", group.rank, "told", str(error).splitlines()[0])
    open_gate(group.rank)
    group.close()
    """
    result = on_hosts([1] * 8, code)
    assert not result.timed_out, result.output
    assert result.output.count("kept the contract") == 8, result.output
    told = dict(re.findall(r"rank (\d) told (.*)", result.output))
    assert "got it later" in told.pop("6"), result.output
    assert sorted(told) == list("0123457"), result.output
    assert len(set(told.values())) == 1, result.output
    assert "got no rank 6." in told["0"], result.output


def test_hosts_reach_each_other_at_different_addresses(tmp_path):
    """Two of three hosts have a link of their own, with addresses that the third cannot reach."""
    script = tmp_path / "job.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent("""
        group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0, sockets="always"))
        assert (group.all_reduce(np.ones(300_000)).wait() == 3).all()
        say("rank", group.rank, "summed", "TCP sockets" in repr(group))
        group.close()
        """)
    )
    with network.Hosts(3) as hosts:
        first, second, _ = hosts.names
        network.run("ip", "link", "add", "own0", "netns", first, "type", "veth", "peer", "own0", "netns", second)
        for name, address in ((first, "10.0.0.1/30"), (second, "10.0.0.2/30")):
            network.run("ip", "-n", name, "addr", "add", address, "dev", "own0")
            network.run("ip", "-n", name, "link", "set", "own0", "up")
        result = wait_for_job(hosts.command(1, [script]), timeout=150.0)
    assert result.output.count("summed True") == 3, result.output


def test_where_hosts_cannot_reach_each_other_by_sockets_mpi_carries_messages(on_hosts):
    """An address that nobody answers at, too few files, a rank that wants none; and who insists hears of it."""
    code = """
    from zerort.comm.transports.messages import sockets

    def check(*, by_sockets, **options):
        with zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0, **options)) as group:
            assert ("TCP sockets" in repr(group)) is by_sockets, group
            for numel in (3, 300_000):  # with the greeting; in rounds
                assert (group.all_reduce(np.arange(numel) + group.rank).wait() == 4 * np.arange(numel) + 6).all()

    check(by_sockets=True, sockets="auto" if zr.open_group().rank == 2 else "always")
    check(by_sockets=False, sockets="never" if zr.open_group().rank == 2 else "always")

    sockets._reached.clear()
    found, sockets.interfaces = sockets.interfaces, lambda: (sockets.Interface(0x7F630102, 0xFFFFFFFF),)
    check(by_sockets=False)
    sockets.interfaces = found
    sockets._reached.clear()

    rank = zr.open_group().rank
    if rank == 1:
        sockets._has_room = lambda ranks: False
    check(by_sockets=False)
    try:
        zr.open_group(options=zr.GroupOptions.from_environment(sockets="always"))
    except BootstrapError as error:
        say("rank", rank, "told", "ulimit -n" in str(error))
    """
    result = on_hosts([2, 2], code)
    assert result.code == 0, result.output
    assert result.output.count("told True") == 4, result.output


def test_connections_between_hosts_have_small_send_buffers_where_the_kernel_grants_them(on_hosts):
    code = """
    import os, socket
    from zerort.comm.transports.messages import sockets

    chosen, send_buffer = [], sockets.send_buffer

    def noted(round_trip, bandwidth, *, granted):
        assert 0 < round_trip < 10, round_trip
        chosen.append(send_buffer(10e-6, 1e9, granted=granted))  # not what was measured: others may take the cores
        return chosen[-1]

    sockets.send_buffer = noted
    with zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0, sockets="always")) as group:
        group.all_reduce(np.ones(1_000_000)).wait()  # every rank sends
        sizes = []
        for one in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{one}") and os.readlink(f"/proc/self/fd/{one}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(one))) as connection:
                    sizes.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        buffer, granted = chosen[-1], sockets._granted_buffer()
        assert (buffer is not None) == (granted >= sockets._BUFFER_NBYTES), (buffer, granted)
        assert buffer is None or sizes.count(2 * buffer) >= 1, (buffer, sizes)
        say(group.rank, "as chosen")
    """
    result = on_hosts([2, 2], code)
    assert result.code == 0, result.output
    assert result.output.count("as chosen") == 4, result.output
