"""Run a command while other processes keep the cores busy: what depends on time fails here first.

    python tests/loaded.py 16 make test-jobs

The busy processes end with the command, and by themselves if this one is killed. The exit code is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys

# Looks now and then whether it still has its parent: nobody else would end it.
BUSY = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def main(words: list[str]) -> int:
    """Start as many busy processes as the first word says, then the command that the others are."""
    if len(words) < 2 or not words[0].isdecimal():
        print("Expected a number of busy processes and a command, got", *words, file=sys.stderr)
        return 2
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(int(words[0]))]
    try:
        return subprocess.run(words[1:], check=False).returncode
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
