"""A rank that dies without a word is named by every rank that outlives it, over every transport.

Launchers end all ranks within milliseconds of one rank's death. So ranks of a node are started without one here; over
MPI a rank shows the number of a process that can die while the rank itself only falls silent.
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
    control = open_control(3, "/dev/shm", sees_processes=True)
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


@pytest.mark.parametrize("kind", [pytest.param("mpi", id="over-mpi"), "hierarchical"])
def test_a_rank_that_dies_is_named_on_every_host(job, kind):
    code = (
        TELL
        + """
import subprocess
from mpi4py import MPI
from zerort.comm.bootstrap.opening import best_transport
world, kind = MPI.COMM_WORLD, sys.argv[1]
options = zr.GroupOptions.from_environment(timeout=25.0)
if world.rank == 1:
    body = subprocess.Popen(["sleep", "1000"])
    real, os.getpid = os.getpid, lambda: body.pid
machine = world.Split(world.rank // 2, world.rank)
group = zr.Group(best_transport(world, name="world", options=options, kind=kind, machine=machine))
group.barrier(name="before").wait()
if world.rank == 1:
    os.getpid = real
    body.kill()
else:
    tell_of_the_others(group)
world.Barrier()
os._exit(0)
"""
    )
    result = job(4, code, args=[kind])
    assert not result.timed_out, result.output
    assert_named_by(result.output, 1, [0, 2, 3])


def test_a_process_that_nobody_has_waited_for_is_not_alive():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert is_alive(child.pid)
        child.stdin.close()
        child.stdout.read()  # until it has ended
        while is_alive(child.pid):
            assert child.returncode is None
    assert not is_alive(child.pid)
