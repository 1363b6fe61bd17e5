"""Run pytest under mpirun at several sizes: ``python -m zerort.testing 1 2 3 4 8 -- tests/ranks``."""

from __future__ import annotations

import argparse
import signal
import sys

from zerort.testing.jobs import run_job


def main() -> int:
    """Run the suite at every size, whatever the others gave; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(
        prog="python -m zerort.testing",
        description="Run pytest under mpirun at several sizes, one run each.",
        epilog="words after -- go to pytest",
    )
    parser.add_argument("sizes", nargs="+", type=int, help="how many ranks, for one run each")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per run (default: %(default)s)")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    failures: list[tuple[int, int]] = []
    for size in options.sizes:
        print(f"== {size} ranks", flush=True)
        words = ["-m", "pytest", "--with-mpi", "-q", "--color=no", "-p", "no:cacheprovider", *sys.argv[split + 1 :]]
        # A rank is a worker already: more BLAS threads than cores only wait for each other.
        result = run_job(size, words, timeout=options.timeout, env={"OPENBLAS_NUM_THREADS": "1"}, echo=True)
        if result.code:
            print(f"== {size} ranks: exit code {result.code} after {result.seconds:.0f} s", flush=True)
            failures.append((size, result.code))
    if failures:
        said = ", ".join(f"{size} ranks (exit code {code})" for size, code in failures)
        print(f"== failed: {said}; of sizes {' '.join(map(str, options.sizes))}", flush=True)
    return failures[0][1] if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as Ctrl-C does: the ranks end, too
    sys.exit(main())
