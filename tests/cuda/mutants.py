"""Take one wait or one event out of the GPU path at a time: a test must fail. ``make mutants``, or some of them:

    python tests/cuda/mutants.py cuda_stream precede      those whose file and line have all these words in them

Each mutant is a copy of the package with one line changed, never the package itself. It runs the tests that are to
catch it, under a few seeds of the emulated device, until one fails. `test_mutants.py` sees to it that this list stays
true: each line is there, once, and every synchronisation of `FILES` is in it. A room that comes to GPUs adds its files
and rows.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("device/cuda*.py", "comm/nccl*.py", "optim/kernels_cuda.py")
"""What is looked through for synchronisations, under zerort/."""

SYNCHRONISES = re.compile(r"(?<!def )\b(wait|wait_for|wait_event|record|order|precede|synchronize|arrive)\(")

SEEDS = (0, 1, 2)
LONGEST = 120
"""Seconds that the tests get; a mutant that hangs is caught, too."""

DEVICE, WATCH, GROUPS = "test_device.py", "test_watch.py", "ranks/test_groups_on_gpus.py"


@dataclass(frozen=True)
class Mutant:
    """A line without its synchronisation, and the tests that must not like that."""

    file: str
    line: str
    """As it stands in the file, without the space round it; there once."""
    instead: str
    tests: tuple[str, ...]
    """The file below tests/cuda, then names of tests in it."""
    ranks: int = 0
    """0: in one process."""


MUTANTS = (
    # -- the order of groups ---------------------------------------------------------------------------------------
    Mutant(
        "device/cuda_order.py",
        "self._moved.wait_for(lambda: self._served >= place)",
        "pass",
        (DEVICE, "take_turns_on_the_host"),
    ),
    Mutant("device/cuda_order.py", "stream.wait_event(self._last)", "pass", (DEVICE, "take_turns_on_the_gpu")),
    Mutant("device/cuda_order.py", "self._last = event", "pass", (DEVICE, "take_turns_on_the_gpu")),
    Mutant(
        "comm/nccl.py",
        "order=order_of_nccl(self.device.ordinal),",
        "order=None,",
        (GROUPS, "a_group_of_parts_works_beside_its_whole"),
        ranks=2,
    ),
    # -- streams ---------------------------------------------------------------------------------------------------
    Mutant("device/cuda_stream.py", "self._issued.wait(timeout)", "pass", (DEVICE, "errors_reach_the_waiter")),
    Mutant(
        "device/cuda_stream.py",
        "self._issued.wait()",
        "pass",
        (DEVICE, "work_comes_after_tickets_that_the_host_has_not_come_to"),
    ),
    Mutant("device/cuda_stream.py", "stream.wait_event(self._cuda)", "pass", (DEVICE, "copies_go_all_four_ways")),
    Mutant(
        "device/cuda_stream.py",
        "self.cuda.wait_event(before)",
        "pass",
        (DEVICE, "a_copy_waits_for_what_the_caller_computed"),
    ),
    Mutant(
        "device/cuda_stream.py",
        "order(earlier, before=self.cuda)",
        "pass",
        (DEVICE, "work_can_come_after_tickets_alone"),
    ),
    Mutant("device/cuda_stream.py", "event._cuda.record(self.cuda)", "pass", (DEVICE, "the_gpu_can_time_out")),
    Mutant(
        "device/cuda_stream.py",
        "self._held.append((event._cuda, tuple(given)))",
        "pass",
        (DEVICE, "arrays_live_until_the_gpu_is_done"),
    ),
    Mutant(
        "device/cuda_stream.py",
        'return self.submit(lambda: order(ticket, before=self.cuda), name="wait", keep=(ticket,), after=())',
        'return self.submit(lambda: None, name="wait", keep=(ticket,), after=())',
        (DEVICE, "copies_go_all_four_ways"),
    ),
    Mutant(
        "device/cuda_stream.py",
        'self.submit(lambda: None, name="synchronize", eager=True, after=()).wait()',
        'self.submit(lambda: None, name="synchronize", eager=True, after=())',
        (DEVICE, "synchronize_waits_for_the_gpu"),
    ),
    Mutant(
        "device/cuda_stream.py",
        "return None if current.ptr == self.cuda.ptr else current.record(cupy.cuda.Event(disable_timing=True))",
        "return None",
        (DEVICE, "a_copy_waits_for_what_the_caller_computed"),
    ),
    Mutant("device/cuda_stream.py", "event.precede(before)", "pass", (DEVICE, "tickets_alone")),
    Mutant(
        "device/cuda_stream.py",
        "event.wait()",
        "pass",
        (DEVICE, "work_comes_after_tickets_that_the_host_has_not_come_to"),
    ),
    Mutant(
        "device/cuda_stream.py",
        "while self._held and (self.trouble() is None or time.monotonic() < until):",
        "while False:",
        (DEVICE, "a_stream_closes_behind_its_work"),
    ),
    # -- the device ------------------------------------------------------------------------------------------------
    Mutant(
        "device/cuda.py",
        "self.copy(source, out=out).wait()  # it may be pageable: then it is the caller's again only now",
        "self.copy(source, out=out)",
        (DEVICE, "what_is_put_is_there_for_what_comes_next"),
    ),
    Mutant(
        "device/cuda.py",
        "self.arrive(self.copy(source, out=out))",
        "self.copy(source, out=out)",
        (DEVICE, "what_is_put_is_there_for_what_comes_next"),
    ),
    Mutant(
        "device/cuda.py",
        "self.copy(self.flat(array), out=copy.reshape(-1)).wait()",
        "self.copy(self.flat(array), out=copy.reshape(-1))",
        (DEVICE, "what_is_fetched_is_what_was_computed"),
    ),
    Mutant(
        "device/cuda.py",
        "return order(ticket, before=cupy.cuda.get_current_stream(self.ordinal))",
        "return ticket.result",
        (DEVICE, "what_arrives_is_ordered_before_what_comes_next"),
    ),
    Mutant(
        "device/cuda.py",
        "current.wait_event(self._left)",
        "pass",
        ("test_dlpack.py", "blocks_on_different_streams_follow_each_other"),
    ),
    Mutant(
        "device/cuda.py",
        "self._left.record(current)",
        "pass",
        ("test_dlpack.py", "blocks_on_different_streams_follow_each_other"),
    ),
    # -- groups ----------------------------------------------------------------------------------------------------
    Mutant(
        "comm/nccl.py",
        "cupy.cuda.get_current_stream().synchronize()",
        "pass",
        (GROUPS, "spans_are_as_long_as_their_calls"),
        ranks=2,
    ),
    Mutant(
        "comm/nccl_watch.py",
        "flight.event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))",
        "flight.event = cupy.cuda.Event(disable_timing=True)",
        (WATCH, "a_call_that_does_not_end_on_the_gpu"),
    ),
    Mutant(
        "comm/nccl_watch.py",
        "if not self._gate.wait_for(lambda: not self._inside, _LEFT_WITHIN):",
        "if False:",
        (WATCH, "the_end_waits_until_nobody_is_inside"),
    ),
    Mutant(
        "comm/nccl_watch.py",
        "while not self._stop.wait(_EVERY):",
        "while False:",
        (WATCH, "an_entry_that_does_not_return"),
    ),
)

# Where the package is installed in place, a finder points to it before any path is looked at.
HOOK = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
"""


def copy_package(directory):
    """Copy zerort to where Python finds it first, with the native kernels, wherever those are."""
    shutil.copytree(ROOT / "zerort", directory / "zerort", ignore=shutil.ignore_patterns("__pycache__", "src"))
    kernels = find_spec("zerort.native._kernels")
    if kernels is not None and kernels.origin is not None:
        shutil.copy(kernels.origin, directory / "zerort" / "native")
    (directory / "sitecustomize.py").write_text(HOOK)


def python(directory, *words, **settings):
    """Run Python on the copy."""
    env = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def pytest_words(file, names, ranks):
    """Return what to start, after ``python``, to run tests of a file."""
    words = ["-x", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", HERE / file, "-k", " or ".join(names)]
    return ["-m", "zerort.testing", ranks, "--", *words] if ranks else ["-m", "pytest", *words]


def fate(mutant, directory):
    """Return how a mutant ended: under which seed it was caught, or that it was not."""
    file, *names = mutant.tests
    place = directory / "zerort" / mutant.file
    whole = place.read_text()
    line = re.compile(rf"^( *){re.escape(mutant.line)}$", re.MULTILINE)
    place.write_text(line.sub(lambda found: found[1] + mutant.instead, whole))
    try:
        for seed in SEEDS:
            try:
                done = python(directory, *pytest_words(file, names, mutant.ranks), CUSIM_SEED=str(seed))
            except subprocess.TimeoutExpired:
                return f"caught, it hangs (seed {seed})"
            if done.returncode == 1:
                return f"caught (seed {seed})"
            if done.returncode:  # no such test, say
                return f"SURVIVED: pytest ended with {done.returncode}\n{done.stdout[-2000:]}"
    finally:
        place.write_text(whole)
    return "SURVIVED"


def main():
    """Run the mutants that all words on the command line fit, and return how many survived."""
    chosen = [one for one in MUTANTS if all(word in f"{one.file}: {one.line}" for word in sys.argv[1:])]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="zerort-mutants-") as name:
        directory = Path(name)
        copy_package(directory)
        used = python(directory, "-c", "import zerort; print(zerort.__file__)").stdout.strip()
        if not used.startswith(name):
            sys.exit(f"Expected the copy of zerort in {name} to be imported, got {used}.")
        for file, ranks in sorted({(one.tests[0], one.ranks) for one in chosen}):
            names = {name for one in chosen for name in one.tests[1:] if one.tests[0] == file}
            done = python(directory, *pytest_words(file, sorted(names), ranks))
            if done.returncode:
                sys.exit(f"Expected the tests to pass before anything is changed, got:\n{done.stdout}")
        for mutant in chosen:
            end = fate(mutant, directory)
            survived += end.startswith("SURVIVED")
            print(f"{mutant.file}: {mutant.line} -> {mutant.instead}\n    {end}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutants were caught.")
    return survived


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
