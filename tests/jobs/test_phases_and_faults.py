"""One rank dies, stops, is asked to stop or raises, in each phase of a run: the job ends, and tells whose fault it was.

Phases × faults × transports × forms of the kernels: a selection in which each of them occurs is run here, all of them
with ``ZERORT_ALL_FAULTS=1`` (`make faults`). Shared memory is as before after each job (the fixture ``job`` looks), and
scratch after the next run, which sweeps what killed ones left.
"""

import itertools
import os
import re
from dataclasses import dataclass

import pytest

PHASES = ("open", "register", "gather", "reduce", "step", "save", "load", "split", "close")
FAULTS = ("KILL", "STOP", "TERM", "INT", "_exit", "raise", "MemoryError")
KINDS = ("node", "mpi", "hierarchical")

RUN = """
from mpi4py import MPI
from zerort.comm.bootstrap.opening import best_transport
from zerort.comm.guard.failure import abort_job_on_exception
phase, fault, kind, scratch, path = sys.argv[1:]
world = MPI.COMM_WORLD
culprit = world.rank == 1
ours = os.path.dirname(zr.__file__) + os.sep

def commit():
    # What the culprit does, a few calls deep in the phase.
    say("culprit: process", os.getpid())
    if fault == "_exit":
        os._exit(11)
    elif fault == "raise":
        raise ZeroDivisionError("on purpose")
    elif fault == "MemoryError":
        raise MemoryError("on purpose")
    os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))

class Phase:
    def __init__(self, name):
        self.left = 15 if culprit and name == phase else 0

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename.startswith(ours) and self.left:
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                commit()

    def __enter__(self):
        if self.left:
            sys.settrace(self.trace)

    def __exit__(self, kind, *exc):
        sys.settrace(None)
        if self.left and kind is None:
            self.left = 0
            commit()

# Only who is stopped is waited for until then; a busy disk must not be taken for one.
options = zr.GroupOptions.from_environment(timeout=5.0 if fault == "STOP" else 10.0)
abort_job_on_exception(world)
with Phase("open"):
    if kind == "hierarchical":
        machine = world.Split(world.rank // 2, world.rank)
        group = zr.Group(best_transport(world, name="world", options=options, kind=kind, machine=machine))
    else:
        group = zr.open_group(kind=kind, options=options)
    state = zr.Tier.NVME
    rt = zr.open(plan=zr.Plan.zero(3, state=state), optimizer=zr.AdamW(lr=0.1), group=group, scratch=scratch)
with rt:
    with Phase("register"):
        unit = rt.register("unit", {"w": np.ones(20_000, np.float32)})
    for step in range(3):
        with Phase("gather"), unit.gathered() as parameters:
            gradients = {"w": np.ones(20_000, np.float32)}
        with Phase("reduce"):
            unit.reduce(gradients)
        with Phase("step"):
            report = rt.step()
        if report.stop:
            say("stopped")
            break
    with Phase("save"):
        rt.save(path)
    with Phase("load"):
        rt.load(path)
    with Phase("split"):
        group.split(0).close()
    with Phase("close"):
        rt.close()
group.close()
"""


@dataclass(frozen=True)
class Case:
    """A fault, and when and where it happens."""

    phase: str
    fault: str
    kind: str
    native: bool

    @property
    def dies_at_once(self) -> bool:
        """Whether the launcher hears of it first: it ends the others, and names any process or none."""
        # Until zr.open has set its handlers, SIGTERM does what it does to any process.
        return self.fault in ("KILL", "_exit") or (self.phase, self.fault) == ("open", "TERM")

    def __str__(self) -> str:
        return f"{self.phase}, {self.fault}, over {self.kind}, {'native' if self.native else 'numpy'}"


# Not a rank that is stopped when it closes: the others have all they need of it, and wait as MPI does at the end.
ALL = [Case(*one) for one in itertools.product(PHASES, FAULTS, KINDS, (True, False)) if one[:2] != ("close", "STOP")]
SELECTED = [
    Case(phase, FAULTS[(5 * number + turn + 1) % 7], KINDS[(number + turn) % 3], native=(number + turn) % 2 == 0)
    for number, phase in enumerate(PHASES)
    for turn in range(2)
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def test_each_phase_fault_transport_and_form_is_among_the_selected():
    assert set(SELECTED) <= set(ALL)
    assert len(set(SELECTED)) == len(SELECTED)
    assert {case.phase for case in SELECTED} == set(PHASES)
    assert {case.fault for case in SELECTED} == set(FAULTS)
    assert {(case.kind, case.native) for case in SELECTED} == set(itertools.product(KINDS, (True, False)))


@pytest.mark.parametrize("case", ALL if os.environ.get("ZERORT_ALL_FAULTS") == "1" else SELECTED, ids=str)
def test_the_job_ends_and_tells_whose_fault_it_was(job, scratch, tmp_path, case):
    words = [case.phase, case.fault, case.kind, scratch, tmp_path / "c"]
    result = job(3, RUN, args=words, timeout=90.0, env={"ZERORT_NATIVE": str(int(case.native))})
    assert not result.timed_out, result.output
    process = re.search(r"culprit: process (\d+)", result.output)
    assert process, result.output
    if case.fault in ("TERM", "INT") and result.code == 0:  # the next step told of it, or there was none left
        assert "stopped" in result.output or case.phase == "close", result.output
        return
    assert result.code != 0, result.output
    if (case.phase, case.fault) == ("open", "STOP"):  # nobody is known yet
        assert "Expected all 3 ranks to open group 'world' within 5 s, got fewer" in result.output, result.output
    elif not case.dies_at_once:
        told = result.output.replace(process[0], "")
        assert re.search(r"\b[Rr]ank 1\b", told), result.output
        blamed = re.findall(r"got (?:no|none of|an error on) ranks? ([\d, ]*\d)", told)
        assert set(blamed) <= {"1"}, result.output


def test_scratch_is_empty_after_the_next_run(job, scratch, tmp_path):
    result = job(3, RUN, args=["none", "none", "node", scratch, tmp_path / "c"])
    assert result.code == 0, result.output
    assert not os.listdir(scratch)
