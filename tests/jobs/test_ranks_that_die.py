"""A rank that dies without a word is named by every rank that outlives it, over every transport.

Launchers end all ranks within milliseconds of one rank's death. So ranks of a node are started without one here, or
each rank is the child of the process that the launcher knows.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest

from zerort import native
from zerort.comm.transports.node.meeting import open_control
from zerort.native.rendezvous import is_alive

TELL = """
def die(*words, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def tell_of_the_others(group):
    began = time.monotonic()
    try:
        group.all_reduce(np.ones(300_000), name="loss").wait()
        group.barrier(name="next").wait()
        say("rank", group.rank, "got through")
    except CollectiveError as error:
        seconds = int(time.monotonic() - began)
        say("rank", group.rank, type(error).__name__, "after", seconds, "s:", json.dumps(str(error)))
"""

ON_A_NODE = (
    TELL
    + """
from zerort.comm.transports.node.transport import NodeTransport
control, rank, victim, form, moment = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
options = zr.GroupOptions.from_environment(timeout=25.0)
native = form == "native"
transport = NodeTransport(control, rank, 3, name="world", options=options, in_native=native, sees_processes=True)
transport.start()
group = zr.Group(transport)
group.barrier(name="before").wait()
if rank == victim and moment == "before the call":
    die()
elif rank == victim and form == "numpy":
    transport._link.wait = die  # it has arrived, and looks no more who else has
elif rank == victim:
    transport._agree = die  # it has arrived, and its memory goes with it
tell_of_the_others(group)
"""
)


@dataclass(frozen=True)
class Death:
    victim: int
    form: str
    moment: str

    def __str__(self) -> str:
        return f"rank {self.victim} {self.moment}, {self.form}"


def assert_named_by(output, victim, others):
    for rank in others:
        told = re.search(rf"^rank {rank} RankFailedError after (\d+) s: (.*)$", output, re.MULTILINE)
        assert told, output
        assert f", got none of rank {victim}: gone.\n" in json.loads(told[2]), output
        assert int(told[1]) < 20, output  # not by its timeout


@pytest.mark.parametrize(
    "death",
    [
        Death(1, "native", "before the call"),
        Death(0, "native", "in the call"),
        Death(2, "numpy", "before the call"),
        Death(0, "numpy", "in the call"),
    ],
    ids=str,
)
def test_a_rank_of_a_node_that_dies_is_named_by_all_others(script, tmp_path, death):
    if death.form == "native" and not native.AVAILABLE:
        pytest.skip("not built")
    control = open_control(3, "/dev/shm")
    words = [str(death.victim), death.form, death.moment]
    path = script(ON_A_NODE)
    ranks = [
        subprocess.Popen(
            [sys.executable, path, control.path, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "ZERORT_FLIGHT_DIR": str(tmp_path)},
        )
        for rank in range(3)
    ]
    try:
        others = {rank: process for rank, process in enumerate(ranks) if rank != death.victim}
        output = "".join(process.communicate(timeout=90)[0] for process in others.values())
        assert_named_by(output, death.victim, others)
    finally:  # not before: who was not waited for is a zombie, and must not pass for alive
        control.close()
        for process in ranks:
            process.kill()
            process.communicate()


OUTLIVED = """
child = os.fork()  # a rank of its own: the launcher waits for the parent, and does not learn of the death
if child:
    os.waitpid(child, 0)
    wait_for_gates(0, 2, 3)
    os._exit(42)  # not 0: nobody finalizes MPI, so its shared memory is left as by a job that was killed
from mpi4py import MPI
from zerort.comm.bootstrap.opening import best_transport
world, kind, time_of_death = MPI.COMM_WORLD, sys.argv[1], f"{__file__}-death"
options = zr.GroupOptions.from_environment(timeout=60.0)
machine = world.Split(world.rank // 2, world.rank) if kind == "hierarchical" else None
group = zr.Group(best_transport(world, name="world", options=options, kind=kind, machine=machine))
assert ("NumPy" in group._transport.details()) == (kind != "mpi" and os.environ["ZERORT_NATIVE"] == "0")
group.barrier(name="before").wait()
if world.rank == 1:
    wait_for_gates("0 calls", "2 calls", "3 calls")
    with open(time_of_death, "w") as file:
        file.write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
open_gate(f"{world.rank} calls")
try:
    group.all_reduce(np.ones(300_000), name="loss").wait()
except CollectiveError as error:
    now = time.monotonic()
    with open(time_of_death) as file:
        seconds = now - float(file.read())
    say("rank", world.rank, type(error).__name__, "after", f"{seconds:.3f}", "s:", json.dumps(str(error)))
open_gate(world.rank)
wait_for_gates(0, 2, 3)
os._exit(42)  # MPI_Finalize would wait for the dead
"""


@pytest.mark.parametrize("form", ["native", "numpy"])
@pytest.mark.parametrize("kind", ["node", pytest.param("mpi", id="over-mpi"), "hierarchical"])
def test_every_rank_that_lives_on_names_the_dead_one_long_before_its_timeout(job, kind, form):
    """The promise is half a second; here it is far less than the 60 s of the timeout. The seconds are printed."""
    if form == "native" and not native.AVAILABLE:
        pytest.skip("not built")
    result = job(4, OUTLIVED, args=[kind], env={"ZERORT_NATIVE": str(int(form == "native"))})
    assert not result.timed_out, result.output  # how a job ends in which nobody finalizes MPI is the launcher's affair
    told = re.findall(r"^rank (\d) RankFailedError after ([\d.]+) s: (.*)$", result.output, re.MULTILINE)
    assert sorted(rank for rank, _, _ in told) == ["0", "2", "3"], result.output
    assert all(", got none of rank 1: gone.\n" in json.loads(text) for _, _, text in told), result.output
    print(f"{kind}, {form}: named after {max(float(seconds) for _, seconds, _ in told):.3f} s")
    assert all(float(seconds) < 20 for _, seconds, _ in told), result.output


def test_a_process_that_nobody_has_waited_for_is_not_alive():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert is_alive(child.pid)
        child.stdin.close()
        child.stdout.read()  # until it has ended
        while is_alive(child.pid):
            assert child.returncode is None
    assert not is_alive(child.pid)
