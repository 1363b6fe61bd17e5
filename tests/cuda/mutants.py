"""Take one wait or one event out of the GPU path at a time: a test must fail. ``make mutants``, or some of them:

    python tests/cuda/mutants.py cuda_stream precede      those whose file and line have all these words in them
    python tests/cuda/mutants.py --count                  write anew how many annotations each file has

Each mutant is a copy of the package with one statement changed, never the package itself. It runs the test that is to
catch it, under a few seeds of the emulated device, until it fails. Which statements and tests these are is said by
annotations on the lines (`synchronisations.py`); `test_mutants.py` sees to it that none is missing.
"""

import ast
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import synchronisations

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mutation"))

from copies import ROOT, check_copy, copy_package, python  # noqa: E402 (of tests/mutation)

COUNTS = HERE / "mutants.txt"
"""How many mutants and excuses each file has: what goes, or comes, is seen."""

SEEDS = (0, 1, 2)
RANKS = 2
SHOWN = 200
"""Characters of what a test said against a mutant."""

SOURCES = synchronisations.read_tree(ROOT / "zerort")
MUTANTS = tuple(mutant for source in SOURCES for mutant in source.mutants)


@cache
def tests():
    """Return the names of tests and of their classes by file below tests/cuda, those of contracts included."""
    contracts = {}
    for path in (ROOT / "zerort/testing/contracts").glob("*.py"):
        contracts.update(
            {one.name: one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ClassDef)}
        )

    def named(node):
        for one in ast.walk(node):
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and one.name.lower().startswith("test"):
                yield one.name
            for base in getattr(one, "bases", ()):
                yield from named(contracts.get(ast.unparse(base).rpartition(".")[2], ast.Module([], [])))

    return {path: set(named(ast.parse(path.read_text()))) for path in HERE.rglob("test_*.py")}


def places(test):
    """Return the files that have a test whose name the words are part of: there is to be one."""
    return [path for path, names in tests().items() if any(test in name for name in names)]


def pytest_words(test):
    """Return what to start, after ``python``, to run a test."""
    (file,) = places(test)
    words = ["-x", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", file, "-k", test]
    return ["-m", "zerort.testing", RANKS, "--", *words] if file.parent.name == "ranks" else ["-m", "pytest", *words]


def told(output):
    """Return what pytest's summary says of the first test that failed: a race, an order, a hang."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].partition("::")[2][:SHOWN] if lines else "without a word"


def fate(mutant, directory):
    """Return how a mutant ended: under which seed it was caught and what showed it, or that it was not."""
    place = directory / "zerort" / mutant.file
    whole = place.read_text()
    place.write_text(mutant.text)
    try:
        for seed in SEEDS:
            try:
                done = python(directory, *pytest_words(mutant.test), CUSIM_SEED=str(seed))
            except subprocess.TimeoutExpired:
                return f"caught, it hangs (seed {seed})"
            if done.returncode == 1:
                return f"caught (seed {seed}): {told(done.stdout)}"
            if done.returncode:  # no such test, say
                return f"SURVIVED: pytest ended with {done.returncode}\n{done.stdout[-2000:]}"
    finally:
        place.write_text(whole)
    return "SURVIVED"


def counts():
    """Return how many mutants and excuses each file has, as `COUNTS` has it."""
    rows = [f"{one.file} {len(one.mutants)} {len(one.excuses)}" for one in SOURCES if one.mutants or one.excuses]
    return "\n".join(["# file, mutants, excuses: python tests/cuda/mutants.py --count", *rows, ""])


def main():
    """Run the mutants that all words on the command line fit, and return how many survived."""
    chosen = [one for one in MUTANTS if all(word in f"{one.file}: {one.was}" for word in sys.argv[1:])]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="zerort-mutants-") as name:
        directory = Path(name)
        copy_package(directory)
        check_copy(directory)
        for test in sorted({one.test for one in chosen}):
            done = python(directory, *pytest_words(test))
            if done.returncode:
                sys.exit(f"Expected {test} to pass before anything is changed, got:\n{done.stdout}")
        for mutant in chosen:
            end = fate(mutant, directory)
            survived += end.startswith("SURVIVED")
            print(f"{mutant.file}:{mutant.line}: {mutant.was} -> {mutant.becomes}\n    {end}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutants were caught.")
    return survived


if __name__ == "__main__":
    if sys.argv[1:] == ["--count"]:
        sys.exit(not COUNTS.write_text(counts()))
    sys.exit(1 if main() else 0)
