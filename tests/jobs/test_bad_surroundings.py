"""What goes wrong around a job: the wrong mpirun, too little shared memory, ranks that ask for different things."""

import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from zerort.comm.bootstrap.environment import find_launcher, without_launcher
from zerort.comm.neighbours import cpu_quotas
from zerort.testing.jobs import wait_for_job

PRELUDE = "import os, numpy as np, zerort as zr\ndef say(*w): os.write(1, (' '.join(map(str, w)) + chr(10)).encode())\n"


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_an_mpirun_of_another_mpi_is_named(variable):
    """That launcher leaves its variable, and the library knows nothing of it: each process is a world of one."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM"))}
    done = subprocess.run(
        [sys.executable, "-c", "import zerort; zerort.open_group()"],
        env={**clean, variable: "4"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "LauncherMismatchError: Expected a world of 4 ranks" in done.stderr
    assert "4 worlds of one rank" in done.stderr
    assert "Start with" in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"WORLD_SIZE": "2"}, "unset WORLD_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "batch script, instead of srun"),
    ],
)
def test_processes_that_mpi_did_not_start_are_told_what_to_type(given, told):
    script = "import zerort; zerort.open()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=without_launcher() | given,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "LauncherMismatchError: Expected one world of 2 ranks" in done.stderr
    assert "got 2 worlds of one rank" in done.stderr
    command = next(line.strip() for line in done.stderr.splitlines() if "mpirun -n 2" in line)
    assert shlex.split(command)[-2:] == ["-c", script]
    assert told in done.stderr
    typed = subprocess.run(shlex.split(command), env=without_launcher(), capture_output=True, timeout=280, check=False)
    assert typed.returncode == 0, typed.stderr


def test_a_start_that_is_meant_is_none_of_those():
    """A batch script's count of tasks, one process, a group that is solo on purpose: nothing is wrong with these."""
    code = "import zerort; print(zerort.open({}).size)"
    for given, arguments in [
        ({"SLURM_NTASKS": "2", "SLURM_NPROCS": "2"}, ""),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ""),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "group=zerort.open_group(kind='solo')"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code.format(arguments)],
            env=without_launcher() | given,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.stdout.strip() == "1", (given, done.stderr)


@pytest.mark.parametrize(("ranks", "counts"), [(2, 2), (1, 3)])
def test_an_mpirun_in_between_is_what_counts(job, ranks, counts):
    """Benchmarks set WORLD_SIZE for torch; an mpirun in an allocation starts its ranks through srun."""
    given = {"WORLD_SIZE": str(counts), "RANK": "0", "SLURM_STEP_NUM_TASKS": str(counts)}
    result = job(ranks, "with zr.open() as rt: say('size', rt.size)", env=given)
    assert result.output.count(f"size {ranks}") == ranks, result.output


def test_without_an_mpi_library_one_rank_works_and_several_are_told(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: initialize, finalize = True, None")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    script = "import numpy, zerort; print(zerort.open_group().all_reduce(numpy.ones(2)).wait())"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM"))}
    alone = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert alone.stdout.strip() == "[1. 1.]", alone.stderr
    several = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "PYTHONPATH": path, "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert several.returncode == 1
    assert "BootstrapError: Expected an MPI library for the 2 ranks" in several.stderr
    assert "pip install mpich" in several.stderr
    foreign = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "PYTHONPATH": path, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "LauncherMismatchError: Expected one world of 2 ranks" in foreign.stderr
    assert "pip install mpich" in foreign.stderr


@pytest.fixture
def small_shm(tmp_path):
    """Yield a directory with 1 MiB of shared memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    where = tmp_path / "shm"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount a file system")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_too_little_shared_memory_is_said_on_every_rank(job, small_shm):
    code = """
    options = zr.GroupOptions.from_environment(staging_nbytes=65536)
    group = zr.open_group(options=options)
    try:
        group.zeros(1 << 20, "float32")
    except SharedMemoryError as error:
        say("rank", group.rank, "raised", error)
    say("still", group.all_reduce(np.ones(1)).wait()[0])
    small = group.zeros(100, "float32")
    small[:] = 1
    say("small", group.all_reduce(small).wait()[0])
    """
    result = job(3, code, env={"ZERORT_SHM_DIR": str(small_shm)})
    assert result.code == 0, result.output
    assert result.output.count("raised Expected room for 12,582,912 bytes of shared memory") == 3, result.output
    assert result.output.count("--shm-size") == 3
    assert result.output.count("still 3.0") == 3
    assert result.output.count("small 3.0") == 3
    assert not list(small_shm.iterdir())


def test_no_room_even_to_meet_fails_on_every_rank(job, small_shm):
    (small_shm / "filler").write_bytes(bytes(1 << 20))
    code = """
    try:
        zr.open_group()
    except SharedMemoryError as error:
        say("raised", error)
    """
    result = job(2, code, env={"ZERORT_SHM_DIR": str(small_shm)})
    assert result.output.count("raised Expected room for") == 2, result.output
    assert not [path for path in small_shm.iterdir() if path.name != "filler"]


def test_an_mpi_without_threads_still_works(job):
    code = """
    import mpi4py
    mpi4py.rc.thread_level = "funneled"
    import threading
    group = zr.open_group(kind="mpi")
    total = group.all_reduce(np.ones(500_000))
    assert total.done()
    say("sum", total.wait().sum(), [thread.name for thread in threading.enumerate()])
    group.close()
    """
    result = job(2, code)
    assert result.output.count("sum 1000000.0 ['MainThread']") == 2, result.output


def test_copies_of_a_model_without_threads_sum_in_the_step(job):
    code = """
    import mpi4py
    mpi4py.rc.thread_level = "funneled"
    import threading
    from zerort.errors import CallError, UnitStateError
    mesh = zr.mesh(shard=1, replicate=2, group=zr.open_group(kind="mpi"))
    with zr.open(mesh=mesh, optimizer=zr.SGD(lr=1.0), reduction="sum") as rt:
        units = [rt.register(name, {"w": np.zeros(100, "float32")}) for name in "abc"]
        gradients = {"w": np.full(100, rt.rank + 1.0, "float32")}
        def step(lacking=""):
            for unit in units:
                if unit.name not in lacking:
                    unit.reduce(gradients)
            rt.step()
        step()
        try:
            step(lacking="b" * rt.rank)
        except UnitStateError as error:
            say("raised", error)
        step()
        with units[1].gathered() as p:
            say("sum", p["w"].sum(), [thread.name for thread in threading.enumerate()])
        try:
            units[0].reduce({"w": np.zeros(3, "float32")}) if rt.rank else step()
        except CallError as error:
            say("refused", error)
    mesh.world.close()
    """
    result = job(2, code, env={"PYTHONWARNINGS": "error"})
    assert result.output.count("raised Expected unit 'b' to be reduced on every rank or on none") == 2, result.output
    assert result.output.count("sum -600.0 ['MainThread']") == 2, result.output
    assert result.output.count("refused Expected the gradient of 'w'") == 2, result.output


def test_ranks_must_want_the_same_kind(job):
    code = """
    from mpi4py import MPI
    try:
        zr.open_group(kind="node" if MPI.COMM_WORLD.rank else "mpi")
    except BootstrapError as error:
        say("raised", error)
    """
    result = job(3, code)
    assert result.output.count("raised Expected one kind of group on all ranks, got rank 0: mpi, rank 1: node") == 3


def test_ranks_must_have_the_same_options(job):
    code = """
    from mpi4py import MPI
    size = 65536 * (1 + MPI.COMM_WORLD.rank)
    try:
        zr.open_group(options=zr.GroupOptions(staging_nbytes=size))
    except BootstrapError as error:
        say("raised", error)
    """
    result = job(2, code)
    wanted = "raised Expected the same GroupOptions.staging_nbytes on all ranks, got rank 0: 65536, rank 1: 131072."
    assert result.output.count(wanted) == 2, result.output


def test_ranks_that_share_memory_but_no_processes_do_not_mistake_each_other(tmp_path):
    """As in two containers on one machine: each rank is process 1 of its own, at the same addresses."""
    if os.geteuid() != 0 or find_launcher().vendor != "MPICH":
        pytest.skip("making process namespaces needs root, and MPICH's launcher")
    script = tmp_path / "job.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent(
            """
            group = zr.open_group()
            say(group)
            say("sum", group.reduce_scatter(np.full(200_000, group.rank + 1.0)).wait()[0])
            """
        )
    )
    own = ["unshare", "--pid", "--fork", "setarch", "-R", sys.executable, str(script)]
    result = wait_for_job([*find_launcher().command(2), *own], timeout=280)
    if "Operation not permitted" in result.output:
        pytest.skip("this container may not make process namespaces")
    assert result.output.count("own arrays staged") == 2, result.output
    assert result.output.count("sum 3.0") == 2, result.output


def test_a_bad_variable_is_named(job):
    code = """
    try:
        zr.open_group()
    except CallError as error:
        say("raised", error)
    """
    result = job(2, code, env={"ZERORT_TIMEOUT": "soon"})
    assert result.output.count("raised Expected ZERORT_TIMEOUT to be seconds above 0, got 'soon'.") == 2, result.output


def test_ranks_that_are_bound_to_one_core_share_it_and_those_with_one_each_do_not(job):
    granted = min([len(os.sched_getaffinity(0)), *cpu_quotas().values()])
    if granted < 2:
        pytest.skip(f"two ranks with a core each need 2 of them, and this process may use {granted:g}")
    result = job(
        2,
        """
        cores = sorted(os.sched_getaffinity(0))
        from mpi4py import MPI
        for mine in (cores[0], cores[MPI.COMM_WORLD.rank]):
            os.sched_setaffinity(0, {mine})
            with zr.open_group(kind="node") as group:
                assert group.all_reduce(np.ones(3)).wait().sum() == 6
                say("rank", group.rank, "shares" if "cores shared" in repr(group) else "has its own")
        """,
    )
    assert result.code == 0, result.output
    assert result.output.count("shares") == 2, result.output
    assert result.output.count("has its own") == 2, result.output


def test_importing_zerort_imports_no_mpi_and_no_framework():
    script = textwrap.dedent(
        """
        import sys
        import numpy
        import time
        began = time.perf_counter()
        import zerort
        heavy = [name for name in ("mpi4py.MPI", "cupy", "torch", "jax", "numba", "rich") if name in sys.modules]
        print(heavy)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.strip() == "[]"


def test_ranks_that_may_not_open_each_others_files_share_memory_by_name(job):
    """A process that is not dumpable shows its open files to nobody but those who may trace everything."""
    code = """
import ctypes
from mpi4py import MPI
libc = ctypes.CDLL(None, use_errno=True)
head, caps = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(head, caps) == 0
caps[0] &= ~(1 << 19)  # CAP_SYS_PTRACE, effective and permitted
caps[1] &= ~(1 << 19)
assert libc.capset(head, caps) == 0
assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
other = MPI.COMM_WORLD.allgather(os.getpid())[MPI.COMM_WORLD.rank - 1]
try:
    os.close(os.open(f"/proc/{other}/fd/1", os.O_RDONLY))
except PermissionError:
    say("refused")
MPI.COMM_WORLD.Barrier()
with zr.open_group(kind="node") as group:
    mine = group.zeros(1000, np.float64)
    mine[:] = group.rank + 1
    assert (group.all_reduce(mine).wait() == 6).all()
    assert (group.all_reduce(np.ones(300_000)).wait() == 3).all()  # of its own, not shared
    with group.split(group.rank % 2) as part:
        assert (part.all_reduce(np.ones(10)).wait() == part.size).all()
    group.barrier().wait()
    say("left", os.listdir(os.environ["ZERORT_SHM_DIR"]))
"""
    result = job(3, code)
    assert result.code == 0, result.output
    assert result.output.count("refused\n") == 3, result.output
    assert result.output.count("left []\n") == 3, result.output
