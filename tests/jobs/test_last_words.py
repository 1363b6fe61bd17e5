"""How a job of several ranks ends: with one story, told once, and with the code that a rank asked for."""

import re

import pytest

OPEN = """
how, kind = sys.argv[1:]
options = zr.GroupOptions.from_environment()
if kind == "hierarchical":
    from mpi4py import MPI
    from zerort.comm.bootstrap.opening import best_transport
    world = MPI.COMM_WORLD
    machine = world.Split(world.rank // 2, world.rank)
    group = zr.Group(best_transport(world, name="world", options=options, kind=kind, machine=machine))
else:
    group = zr.open_group(kind=kind, options=options)
"""

EARLY = (
    OPEN
    + """
def train(rt):
    unit = rt.register("block", {"w": np.ones(64, np.float32)})
    for step in range(2 if rt.rank == 0 else 4):
        with unit.gathered():
            unit_gradient = {"w": np.ones(64, np.float32)}
        unit.reduce(unit_gradient)
        rt.step()

rt = zr.open(group=group, plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1))
if how == "with":
    with group, rt:
        train(rt)
elif how == "plain":
    train(rt)
elif how == "exit":
    train(rt)
    sys.exit(3)
elif how == "raise in with":
    with group, rt:
        train(rt)
        raise SystemExit(3)
elif how == "exit after with":
    with group, rt:
        train(rt)
    sys.exit(3)
"""
)

KINDS = ["node", pytest.param("mpi", id="over-mpi"), "hierarchical"]  # pytest-mpi takes an id "mpi" for its marker
ENDS = [("with", 1), ("plain", 1), ("exit", 3), ("raise in with", 3)]


@pytest.mark.parametrize(
    ("how", "code", "kind"),
    [pytest.param(how, code, "node", id=how) for how, code in ENDS]
    + [pytest.param("with", 1, "mpi", id="with-over-mpi"), pytest.param("exit", 3, "mpi", id="exit-over-mpi")]
    + [pytest.param("with", 1, "hierarchical", id="with-hierarchical")],
)
def test_a_rank_that_ends_its_loop_early_is_the_story_on_every_rank(job, how, code, kind):
    result = job(3, EARLY, args=[how, kind])
    assert result.code == code, result.output
    left = "rank 0 left after update 2" + (" with exit code 3" if code == 3 else "")
    story = f"{left}, ranks 1, 2 are at update 3: " + ("look at the" if code == 3 else "give all ranks the same number")
    told = [line for line in result.output.splitlines() if story in line]
    assert len(told) == 2, result.output
    assert sum(line.startswith("[rank 0] zerort: rank 0 of 3 ended before the others: ") for line in told) == 1
    assert sum(line.startswith("[ranks 1, 2] rank 0 left after update 2") for line in told) == 1
    assert "Open a new group" not in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("[")]) < 20, result.output


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_rank_that_saves_alone_is_told_that_all_have_to(job, verb, tmp_path):
    code = f"""
with zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1)) as rt:
    unit = rt.register("block", {{"w": np.ones(64, np.float32)}})
    unit.reduce({{"w": np.ones(64, np.float32)}})
    rt.step()
    if rt.rank == 0:
        rt.{verb}(sys.argv[1])
"""
    result = job(2, code, args=[tmp_path / "checkpoint"])
    assert result.code == 1, result.output
    story = rf"rank 1 left after update 1, rank 0 is in {verb} at job.py:\d+: every rank must call {verb}, not rank 0"
    assert len(re.findall(story, result.output)) == 2, result.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_asks_for_its_code_after_it_has_closed_the_group_gets_it(job, kind):
    """The others miss it before it says with which code it ends."""
    result = job(3, EARLY, args=["exit after with", kind])
    assert result.code == 3, result.output
    assert result.output.count("rank 0 left after update 2, ranks 1, 2 are at update 3: give all ranks the same") == 2


@pytest.mark.parametrize("raised", ["sys.exit(3)", "raise SystemExit(3)"])
def test_a_code_that_one_rank_ends_with_is_the_jobs(job, raised):
    result = job(3, f"with zr.open_group() as group:\n    group.barrier().wait()\nif group.rank == 1:\n    {raised}\n")
    assert result.code == 3, result.output


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_all_ranks_raise_is_printed_once(job, kind):
    code = (
        OPEN
        + """
with group, zr.open(group=group) as rt:
    rt.register("", {"w": np.ones(3, np.float32)}).reduce({"x": np.ones(3, np.float32)})
"""
    )
    result = job(4, code, args=["", kind])
    assert result.code == 1, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("[")]
    assert lines[0] == "[all 4 ranks] zerort: the same error on all 4 ranks; ending all ranks.", result.output
    assert lines[-1].startswith("[all 4 ranks] zerort.errors.CallError: Expected one of 'w' of the root unit; got 'x'.")
    assert len(re.findall(r"… \d+ frames inside zerort \(ZERORT_FULL_TRACEBACK=1 shows them\) …", result.output)) == 1
    assert len(lines) < 8, result.output


def test_the_full_traceback_is_there_for_the_asking(job):
    code = OPEN + "zr.open(group=group).register('', None)"
    result = job(2, code, args=["", "node"], env={"ZERORT_FULL_TRACEBACK": "1"})
    assert "registration.py" in result.output
    assert "inside zerort" not in result.output
    assert result.output.count("[all 2 ranks] Traceback") == 1, result.output


def test_errors_that_differ_are_each_printed_once(job):
    code = OPEN + "raise KeyError('low' if group.rank < 2 else 'high')"
    result = job(4, code, args=["", "node"])
    assert result.code == 1, result.output
    for ranks, error in (("0, 1", "KeyError: 'low'"), ("2, 3", "KeyError: 'high'")):
        assert result.output.count(f"[ranks {ranks}] zerort: ranks {ranks} of 4 raised the same error;") == 1
        assert result.output.count(f"[ranks {ranks}] {error}") == 1
    assert result.output.count("Traceback") == 2, result.output


def test_what_follows_from_another_ranks_error_is_not_printed(job):
    code = (
        OPEN
        + """
with group, zr.open(group=group) as rt:
    rt.group.barrier().wait()
    if rt.rank == 1:
        raise ZeroDivisionError("batch 17 was empty")
    rt.group.barrier().wait()
"""
    )
    result = job(3, code, args=["", "node"])
    assert result.code == 1, result.output
    assert (
        "[rank 1] zerort: rank 1 of 3 raised; ending all ranks. (ranks 0, 2 missed it and raised, too.)"
        in result.output
    )
    assert result.output.count("Traceback") == 1, result.output
    assert "RankFailedError" not in result.output


def test_a_rank_that_raises_alone_does_not_wait_for_the_others(job):
    """They compute, or are stuck: nobody hears of them."""
    code = (
        OPEN
        + """
group.barrier().wait()
if group.rank == 1:
    raise ZeroDivisionError("batch 17 was empty")
time.sleep(100)
"""
    )
    result = job(3, code, args=["", "node"])
    assert result.code == 1, result.output
    assert result.output.count("[rank 1] ZeroDivisionError: batch 17 was empty") == 1
    assert result.seconds < 40


def test_a_job_whose_ranks_end_at_different_times_ends_well(job):
    code = (
        OPEN
        + """
group.barrier().wait()
if group.rank == 1:
    time.sleep(1)
say("done")
sys.exit(0)
"""
    )
    result = job(3, code, args=["", "node"])
    assert (result.code, result.output.count("done")) == (0, 3), result.output
    assert "zerort:" not in result.output


def test_a_job_that_goes_on_in_a_new_group_is_not_ended_for_the_old_one(job):
    """Rank 0 works on when rank 1 has ended, for longer than a broken group is waited for."""
    code = """
import zerort.comm.ending
zerort.comm.ending._END_WITHIN = 1.0
group = zr.open_group(options=zr.GroupOptions.from_environment(timeout=1.0))
try:
    if group.rank == 1:
        time.sleep(3)
    group.barrier().wait()
except RankFailedError as error:
    say("rank", group.rank, "caught")
except CollectiveError as error:
    say("rank", group.rank, "caught")
group.close()
with zr.open_group(options=zr.GroupOptions.from_environment(timeout=60.0)) as again:
    again.barrier().wait()
if again.rank == 0:
    time.sleep(4)
    say("rank 0 has done its work")
"""
    result = job(2, code)
    assert result.code == 0, result.output
    assert "rank 0 caught" in result.output
    assert "rank 0 has done its work" in result.output
