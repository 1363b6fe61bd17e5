"""A rank that is late, gone, killed or raising never leaves the others waiting for ever."""

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from zerort.comm.bootstrap.environment import find_launcher
from zerort.testing import run_job


def opened(timeout):
    """Return the first lines of a script: ``group``, of the kind that is its argument."""
    return f"""
kind = sys.argv[1]
options = zr.GroupOptions.from_environment(timeout={timeout})
if kind == "hierarchical":
    from mpi4py import MPI
    from zerort.comm.bootstrap.opening import best_transport
    from zerort.comm.guard.failure import abort_job_on_exception
    abort_job_on_exception()
    world = MPI.COMM_WORLD
    machine = world.Split(world.rank // 2, world.rank)
    group = zr.Group(best_transport(world, name="world", options=options, kind=kind, machine=machine))
else:
    group = zr.open_group(kind=kind, options=options)
"""


KINDS = ["node", pytest.param("mpi", id="over-mpi"), "hierarchical"]  # pytest-mpi takes an id "mpi" for its marker


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_is_named_with_what_it_last_did(job, kind, tmp_path):
    code = (
        opened(timeout=6.0)
        + """
group.all_reduce(np.ones(3), name="before").wait()
if group.rank == 1:
    wait_for_gates(0, 2, 3)
try:
    group.all_reduce(np.ones(8), name="loss").wait()
except CollectiveTimeoutError as error:
    say("rank", group.rank, "raised", json.dumps(str(error)))
except RankFailedError as error:
    say("rank", group.rank, "failed", json.dumps(str(error)))
open_gate(group.rank)
try:
    group.barrier()
except CollectiveError as error:
    say("rank", group.rank, "refused", error)
group.close()
say("rank", group.rank, "done")
"""
    )
    result = job(4, code, args=[kind])
    assert not result.timed_out, result.output
    assert result.output.count("done") == 4, result.output
    assert result.output.count("refused") == 4, result.output
    raised = dict(re.findall(r"rank (\d) raised (.*)", result.output))
    assert set(raised) == {"0", "1", "2", "3"}, result.output
    assert "got it later: the others had given up waiting" in json.loads(raised["1"])
    for text in (json.loads(raised[rank]) for rank in "023"):
        assert "got no rank 1." in text
        assert "rank 1: missing; last in #0 all_reduce(float64[3], sum) 'before' at" in text
        assert "all_reduce(float64[8], sum) 'loss' at" in text
        assert "ZERORT_TIMEOUT" in text
        record = json.loads(Path(re.search(r"Flight record: (\S+)", text).group(1)).read_text())
        assert "all_reduce" in json.dumps(record)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_is_noticed_at_once(job, kind):
    code = (
        opened(timeout=40.0)
        + """
group.barrier().wait()
if group.rank == 2:
    group.close()
    say("rank 2 left")
    sys.exit(0)
began = time.monotonic()
try:
    group.all_reduce(np.ones(8)).wait()
except RankFailedError as error:
    say("rank", group.rank, "noticed after", round(time.monotonic() - began, 1), "rank 2: gone" in str(error))
"""
    )
    result = job(4, code, args=[kind])
    noticed = re.findall(r"rank (\d) noticed after ([\d.]+) True", result.output)
    assert sorted(rank for rank, _ in noticed) == ["0", "1", "3"], result.output
    assert max(float(seconds) for _, seconds in noticed) < 20


@pytest.mark.parametrize("kind", KINDS)
def test_an_unhandled_exception_ends_the_job(job, kind):
    code = (
        opened(timeout=300.0)
        + """
group.barrier().wait()
if group.rank == 1:
    raise ZeroDivisionError("batch 17 was empty")
group.all_reduce(np.ones(8)).wait()
say("got through")
"""
    )
    result = job(3, code, args=[kind])
    assert result.code not in (0, 124), result.output
    assert "[rank 1] ZeroDivisionError: batch 17 was empty" in result.output
    assert "got through" not in result.output


def test_an_exception_on_a_thread_ends_the_job(job):
    code = """
import threading
group = zr.open_group(options=zr.GroupOptions(timeout=300.0))
group.barrier().wait()
if group.rank == 0:
    threading.Thread(target=lambda: 1 / 0).start()
group.barrier().wait() if group.rank else time.sleep(100)
"""
    result = job(2, code)
    assert result.code not in (0, 124), result.output
    assert "[rank 0] ZeroDivisionError" in result.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_ends_the_job_and_leaves_nothing_behind(job, kind):
    """The fixture compares shared memory before and after."""
    code = (
        opened(timeout=300.0)
        + """
array = group.zeros(1 << 20, "float32")
for step in range(1000000):
    if group.rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(array, out=array, reduction="max").wait()
"""
    )
    result = job(3, code, args=[kind])
    assert result.code not in (0, 124), result.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_a_window_is_made_leaves_no_file_behind(job, rank):
    """Rank 0 dies when it has made the file and told nobody; rank 1 when it should say that it has mapped it."""
    code = f"""
group = zr.open_group()
memory = group._transport.memory
tell, texts = memory._tell, []
def told(text):
    texts.append(text)
    if group.rank == {rank} and len(texts) == {rank + 1}:
        say("dies, having said", text)
        os.kill(os.getpid(), signal.SIGKILL)
    return tell(text)
memory._tell = told
group.zeros_shared([1000, 1000], "float32")
"""
    result = job(2, code)
    assert "dies, having said" in result.output
    assert result.code not in (0, 124), result.output


def test_a_stuck_job_is_ended_with_every_ranks_stacks(job):
    code = """
group = zr.open_group()
def wait_for_godot():
    while True:
        time.sleep(0.1)
wait_for_godot()
"""
    to_start = job(2, "zr.open_group()").seconds  # on however busy a machine
    result = job(2, code, timeout=5 + 3 * to_start)
    assert result.timed_out
    assert len(re.findall(r"^  File .*, line \d+ in wait_for_godot$", result.output, re.MULTILINE)) == 2, result.output


def test_a_host_that_leaves_as_one_tells_the_others(job):
    """As groups over GPUs close: their hosts' ranks leave together, and other hosts must not wait for them."""
    code = (
        opened(timeout=60.0)
        + """
if group.rank < 2:
    say("rank", group.rank, "left", group._transport.all_leave(within=50.0))
    wait_for_gates(2, 3)
else:
    try:
        group.barrier().wait()
    except CollectiveTimeoutError:
        say("rank", group.rank, "was not told")
    except CollectiveError as error:
        say("rank", group.rank, "told", json.dumps(str(error)))
    open_gate(group.rank)
"""
    )
    result = job(4, code, args=["hierarchical"])
    assert not result.timed_out, result.output
    assert result.output.count("left True") == 2, result.output
    assert len(re.findall(r"rank [23] told .*left", result.output)) == 2, result.output


def test_ranks_that_do_not_open_the_group_end_the_job(job):
    code = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(200)
zr.open_group(options=zr.GroupOptions(timeout=2.0))
"""
    result = job(2, code)
    assert result.code not in (0, 124), result.output
    assert "Every rank must call open_group" in result.output


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_of_a_collective_reaches_all(job, kind):
    """One rank fails after all have met; a call queued behind it must not stand in for what it never finished."""
    code = (
        opened(timeout=60.0)
        + """
array = group.zeros(1_000_000, "float32")  # more than travels with a greeting
array[:] = group.rank + 1
group.barrier().wait()
if group.rank == 1:
    whole = group._transport.all_reduce
    def fail(call):
        raise MemoryError("no scratch left")
    group._transport.all_reduce = fail
first = group.all_reduce(array)
second = group.barrier()
began = time.monotonic()
for name, ticket in (("first", first), ("second", second)):
    try:
        ticket.wait()
        say("rank", group.rank, name, "returned")
    except (CollectiveError, MemoryError) as error:
        say("rank", group.rank, name, type(error).__name__, str(error).replace(chr(10), " "))
say("rank", group.rank, "took", int(time.monotonic() - began))
"""
    )
    result = job(3, code, args=[kind])
    assert not result.timed_out, result.output
    assert "returned" not in result.output, result.output
    assert "rank 1 first MemoryError no scratch left" in result.output
    for rank in (0, 2):
        assert re.search(
            rf"rank {rank} first RankFailedError .*got an error on rank 1: MemoryError: no scratch left", result.output
        ), result.output
    assert result.output.count(" second ") == 3
    assert max(int(seconds) for seconds in re.findall(r"took (\d+)", result.output)) < 30


def test_a_signal_that_raises_while_waiting_breaks_the_group_cleanly(job):
    code = """
class Alarm(Exception): pass
def ring(*_): raise Alarm
signal.signal(signal.SIGALRM, ring)
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0))
group.barrier().wait()
if group.rank == 0:
    try:
        group.all_reduce(np.ones(4)).wait()
    except Alarm:
        say("rank 0 alarmed")
else:
    transport = group._transport
    while not transport._slots()[0].arrived:
        time.sleep(0.01)
    os.kill(transport._slots()[0].pid, signal.SIGALRM)
    while transport.peer_failure() is None:
        time.sleep(0.01)
try:
    group.all_reduce(np.ones(4), name="next").wait()
    say("wrong")
except CollectiveError as error:
    say("rank", group.rank, type(error).__name__, "Alarm" in str(error))
"""
    result = job(2, code)
    assert "rank 0 alarmed" in result.output, result.output
    assert "rank 0 CollectiveError True" in result.output, result.output
    assert "rank 1 RankFailedError True" in result.output, result.output


def test_a_thread_may_end_itself(job):
    code = """
import threading
group = zr.open_group()
thread = threading.Thread(target=sys.exit)
thread.start()
thread.join()
say("sum", group.all_reduce(np.ones(1)).wait()[0])
"""
    result = job(2, code)
    assert result.code == 0, result.output
    assert result.output.count("sum 2.0") == 2


def test_a_forked_child_does_not_leave_for_its_parent(job):
    code = """
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=10.0))
group.barrier().wait()
if group.rank == 0:
    child = os.fork()
    if child == 0:
        import atexit
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
say("sum", group.all_reduce(np.ones(1)).wait()[0])
"""
    result = job(2, code)
    assert result.output.count("sum 2.0") == 2, result.output


def test_a_failure_that_nobody_waited_for_is_told(job):
    code = """
group = zr.open_group()
group.all_reduce(np.ones(4 + group.rank))
group.close()
"""
    result = job(2, code)
    assert result.output.count("CollectiveMismatchError") >= 2, result.output
    assert result.output.count("Call wait() on every ticket") == 2, result.output


def test_deadlines_hold_inside_a_collective(job):
    """A rank that dies between meeting and parting is noticed by those who wait at the parting."""
    code = """
import threading
group = zr.open_group(options=zr.GroupOptions(timeout=3.0))
array = group.zeros(100, "float32")
if group.rank == 1:
    group._transport.end_barrier = lambda call: wait_for_gates(0)
try:
    group.all_reduce(array, out=array).wait()
    say("through")
except CollectiveError as error:
    say("rank", group.rank, type(error).__name__)
open_gate(group.rank)
"""
    result = job(2, code)
    assert not result.timed_out
    assert "rank 0 CollectiveTimeoutError" in result.output, result.output


def test_a_rank_that_goes_while_memory_is_made_is_blamed_on_every_host(job):
    """Its own host notices; the other one must hear of it, and not take both ranks there for the culprits."""
    code = (
        opened(timeout=40.0)
        + """
group.barrier().wait()
if group.rank == 1:
    def go(nbytes):
        group._transport._node.leave()
        wait_for_gates(0, 2, 3)
        raise MemoryError
    group._transport._node.allocate = go
began = time.monotonic()
try:
    group.zeros(1000, "float32")
except (CollectiveError, MemoryError) as error:
    say("rank", group.rank, "after", int(time.monotonic() - began), "s:", str(error).splitlines()[0])
open_gate(group.rank)
"""
    )
    result = job(4, code, args=["hierarchical"])
    assert not result.timed_out, result.output
    for rank in (0, 2, 3):
        told = re.search(rf"rank {rank} after (\d+) s: .*got (none of rank 1: gone|no rank 1)\.", result.output)
        assert told, result.output
        assert int(told[1]) < 30, result.output


def test_a_caught_error_and_an_exit_do_not_wait_for_a_rank_that_is_stopped(job):
    """MPI_Finalize would: it knows nothing of a group that broke."""
    code = """
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=6.0))
group.barrier().wait()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    group.barrier().wait()
except CollectiveTimeoutError as error:
    say("rank", group.rank, "caught it")
    group.close()
    sys.exit(3)
"""
    result = job(3, code)
    assert result.code not in (0, 124), result.output
    for rank in (0, 2):  # Open MPI wakes rank 1 before it kills it, so that it may say so, too
        assert f"rank {rank} caught it" in result.output, result.output
    assert re.search(
        r"rank \d of 3 ends after group 'world' \(node, 3 ranks\) broke; other ranks did not", result.output
    )


def test_ranks_that_all_caught_the_error_end_with_codes_of_their_own(job):
    code = """
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=20.0))
group.barrier().wait()
if group.rank == 0:
    group._transport.fail(zr.comm.guard.call.Call("barrier", ""), MemoryError("on purpose"))
try:
    group.barrier().wait()
except CollectiveError as error:
    say("rank", group.rank, "caught it")
    sys.exit(7)
"""
    result = job(3, code)
    assert result.code == 7, result.output
    assert result.output.count("caught it") == 3, result.output


def test_what_a_killed_job_leaves_of_mpis_memory_is_found(script, tmp_path):
    """So that the fixture's comparison of shared memory, MPI's own included, can fail."""
    code = """
group = zr.open_group()
open_gate(group.rank)
wait_for_gates("killer")
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = script(code)

    def kill_when_mapped():
        while not all((tmp_path / f"job.py-gate-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        time.sleep(1.0)  # longer than between two looks at what is mapped
        (tmp_path / "job.py-gate-killer").touch()

    killer = threading.Thread(target=kill_when_mapped)
    killer.start()
    result = run_job(2, [path], cwd=tmp_path, timeout=60)
    killer.join()
    mapped = [name for name in result.left if "mpich_shm_" in name]
    assert result.code not in (0, 124), result.output
    if find_launcher().vendor == "MPICH":
        assert len(mapped) == 1, result.left
    for name in mapped:
        os.unlink(name)
