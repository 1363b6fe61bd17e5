"""Change one thing in the core at a time, at random: a test must fail. ``make mutants-core MUTANTS=60 SEED=1``, or:

    python tests/mutation/core.py --mutants 12 --seed 3 --only checkpoint/reader.py:97

Each mutant is a copy of the package with one change of `mutate.changes`, never the package itself. The rooms take
turns. A mutant runs the tests of its room in stages, cheap ones first, until one fails; whatever hangs is caught, too.
What survives is either the same program or lacks a test: docs/reliability.md.
"""

import argparse
import functools
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from copies import ROOT, check_copy, copy_package, python
from mutate import Change, changes

TESTS = ROOT / "tests"
STAGES = {
    "layout": ["unit/layout", "unit/buffer unit/engine/test_units.py"],
    "buffer": [
        "unit/buffer",
        "unit/engine/test_units.py unit/engine/test_overlap.py unit/engine/test_copies.py",
        "3 ranks/test_walk.py",
    ],
    "comm": [
        "unit/comm",
        "2 ranks/test_groups.py",
        "3 ranks/test_groups.py ranks/test_partners.py",
        "jobs/test_ranks_that_die.py jobs/test_last_words.py",
        "jobs/test_nothing_hangs.py",
    ],
    "checkpoint": [
        "unit/checkpoint/test_r*.py unit/checkpoint/test_manifest.py unit/checkpoint/test_[dls]*.py",
        "unit/checkpoint/test_[ceh]*.py unit/checkpoint/test_powerloss.py",
        "3 ranks/test_checkpoint.py",
    ],
    "storage": ["unit/storage", "unit/engine/test_tiers.py unit/engine/test_tier_failures.py"],
    "streaming": ["unit/streaming", "unit/engine/test_tiers.py unit/engine/test_tier_failures.py"],
    "engine": [
        "unit/engine/test_runtime.py unit/engine/test_units.py unit/engine/test_co*.py",
        "unit/engine",
        "unit/cli/test_plan.py unit/bindings",
        "2 ranks/test_walk.py",
        "3 ranks/test_walk.py",
        "2 ranks/test_tiers.py",
    ],
}
"""By room, the tests that are to catch its mutants, below tests/: the cheapest first. A number: on so many ranks."""

NOT_HERE = ("*/nccl/*",)
"""What needs a GPU, or one that is emulated: `make mutants`."""

SHOWN = 160
"""Characters of what a test said against a mutant."""


class Mutant(NamedTuple):
    """A change in a file of the package."""

    file: str
    """Below zerort/."""
    change: Change
    text: str
    """Of the whole file, as it is."""

    @property
    def room(self):
        """Return the folder right below zerort/."""
        return self.file.split("/")[0]

    @property
    def where(self):
        """Return file and line."""
        return f"{self.file}:{self.change.line(self.text)}"

    def __str__(self):
        number = self.change.line(self.text) - 1
        before, after = self.text.splitlines()[number], self.change.apply(self.text).splitlines()[number]
        return f"{self.where}: {before.strip()}  ->  {after.strip()}"


@functools.cache
def all_mutants(room):
    """Return every mutant of a room, its folders included."""
    paths = sorted(path for path in (ROOT / "zerort" / room).rglob("*.py") if not any(map(path.match, NOT_HERE)))
    texts = {str(path.relative_to(ROOT / "zerort")): path.read_text() for path in paths}
    return [Mutant(file, change, text) for file, text in texts.items() for change in changes(text)]


def choose(count, seed, only=""):
    """Return mutants at random, one room after the other; with ``only``, those whose file and line begin so."""
    rooms = []
    for room in STAGES:
        mutants = [*all_mutants(room)]
        random.Random(f"{seed} {room}").shuffle(mutants)  # what is chosen in a room hangs on that room alone
        rooms.append([one for one in mutants if f"{one.where}:".startswith(only)])
    turns = [mutants[turn] for turn in range(max(map(len, rooms))) for mutants in rooms if turn < len(mutants)]
    return turns[:count]


def stages_of(mutant):
    """Return the stages of a mutant: those of its room, and before them the unit tests that are named like its file."""
    own = f"unit/{mutant.room}/test_{Path(mutant.file).stem}*.py"
    return [own, *STAGES[mutant.room]] if any(TESTS.glob(own)) else STAGES[mutant.room]


def words_of(stage):
    """Return what to start, after ``python``, for a stage."""
    ranks = [word for word in stage.split() if word.isdigit()]
    files = sorted(path for word in stage.split() if word not in ranks for path in TESTS.glob(word))
    words = ["-x", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", *files]
    start = ["zerort.testing", *ranks, "--", "-p", "no:hypothesispytest"] if ranks else ["pytest"]
    return ["-m", *start, *words]


def told(output):
    """Return what pytest's summary says of the first test that failed."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    first = lines[0] if lines else f"without a word: {output[-SHOWN:]!r}"
    return re.sub(r" \S*/tests/", " tests/", first, count=1)[:SHOWN]


class Trial:
    """A copy of the package, in which one mutant after the other is tried."""

    def __init__(self, directory, limit=None):
        self.directory = directory
        self.limits = {}
        """By stage: the seconds that it may take. `limit` for all, or found out when a stage is first run."""
        self._limit = limit
        copy_package(directory)
        check_copy(directory)

    def _measure(self, stage):
        """Return a few times what a stage takes with nothing changed; it has to pass."""
        began = time.monotonic()
        done = python(self.directory, *words_of(stage), longest=3600)
        if done.returncode:
            sys.exit(f"Expected the tests to pass before anything is changed, got:\n{done.stdout}")
        return 60 + 2 * (time.monotonic() - began)

    def fate(self, mutant, stages=None):
        """Return what caught a mutant, or that it survived."""
        place = self.directory / "zerort" / mutant.file
        for stage in stages_of(mutant) if stages is None else stages:
            if stage not in self.limits:
                self.limits[stage] = self._limit or self._measure(stage)
            place.write_text(mutant.change.apply(mutant.text))
            try:
                done = python(self.directory, *words_of(stage), longest=self.limits[stage])
            except subprocess.TimeoutExpired:
                return f"caught, it hangs: {stage}"
            finally:
                place.write_text(mutant.text)
            if done.returncode:
                return f"caught: {told(done.stdout)}"
        return "SURVIVED"


def main():
    """Try the mutants that the command line asks for, list those that survived, and return how many did."""
    parser = argparse.ArgumentParser(description="Change one thing in the core at a time: a test must fail.")
    parser.add_argument("--mutants", type=int, default=60, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="for another choice (default: %(default)s)")
    parser.add_argument("--only", default="", help="a room, file or file:line below zerort/")
    parser.add_argument("--limit", type=float, help="seconds per stage (default: measured, with nothing changed)")
    asked = parser.parse_args()
    chosen = choose(asked.mutants, asked.seed, asked.only)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="zerort-mutants-") as name:
        trial = Trial(Path(name), asked.limit)
        for mutant in chosen:
            end = trial.fate(mutant)
            print(f"{mutant}\n    {end}", flush=True)
            if end == "SURVIVED":
                survivors.append(mutant)
    print(f"Seed {asked.seed}: {len(chosen) - len(survivors)} of {len(chosen)} mutants were caught.")
    for mutant in survivors:
        print(f"SURVIVED  {mutant}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
