"""Take one wait or one event out of the GPU path at a time: a test must fail. ``make mutants``, or some of them:

    python tests/cuda/mutants.py cuda_stream precede      those whose file and line have all these words in them

Each mutant is a copy of the package with one line changed, never the package itself. It runs the tests that are to
catch it, under a few seeds of the emulated device, until one fails. `test_mutants.py` sees to it that this list stays
true: each line is there, once, and every synchronisation of `FILES` is in it. A room that comes to GPUs adds its files
and rows, in one of the modules `mutants_*.py`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import mutants_device
import mutants_engine
import mutants_offload

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mutation"))

from copies import ROOT, check_copy, copy_package, python  # noqa: E402 (of tests/mutation)

FILES = (
    *("device/cuda*.py", "comm/nccl*.py", "optim/kernels_cuda.py", "buffer/*.py", "engine/*.py"),
    *(f"offload/{name}.py" for name in ("staging", "careful", "bridged", "passage", "later", "memory")),
    *(f"offload/{name}.py" for name in ("pipeline", "run", "slots")),
)
"""What is looked through for synchronisations, under zerort/."""

SYNCHRONISES = re.compile(
    r"(?<!def )\b(wait|wait_for|wait_event|record|order|precede|synchronize|arrive|after|finish)\(|\.on\(|"
    r"\bafter=(?!\(\))"
)
"""A call that waits or lets wait, or work that is queued after something."""

SEEDS = (0, 1, 2)
SHOWN = 200
"""Characters of what a test said against a mutant."""

MUTANTS = (*mutants_device.DEVICE_AND_GROUPS, *mutants_offload.OFFLOAD, *mutants_engine.ENGINE)

NOT_OF_THE_GPU = {**mutants_device.NOT_OF_THE_GPU, **mutants_offload.NOT_OF_THE_GPU, **mutants_engine.NOT_OF_THE_GPU}
"""By file: lines that need no mutant, and why."""


def pytest_words(file, names, ranks):
    """Return what to start, after ``python``, to run tests of a file."""
    words = ["-x", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", HERE / file, "-k", " or ".join(names)]
    return ["-m", "zerort.testing", ranks, "--", *words] if ranks else ["-m", "pytest", *words]


def told(output):
    """Return what pytest's summary says of the first test that failed: a race, an order, a hang."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].partition("::")[2][:SHOWN] if lines else "without a word"


def fate(mutant, directory):
    """Return how a mutant ended: under which seed it was caught and what showed it, or that it was not."""
    file, *names = mutant.tests
    place = directory / "zerort" / mutant.file
    whole = place.read_text()
    place.write_text(mutant.change(whole))
    try:
        for seed in SEEDS:
            try:
                done = python(directory, *pytest_words(file, names, mutant.ranks), CUSIM_SEED=str(seed))
            except subprocess.TimeoutExpired:
                return f"caught, it hangs (seed {seed})"
            if done.returncode == 1:
                return f"caught (seed {seed}): {told(done.stdout)}"
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
        check_copy(directory)
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
