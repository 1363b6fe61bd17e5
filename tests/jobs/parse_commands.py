"""Read commands as JSON and let the parser of each program read its words; nothing else of the program runs.

Started by test_docs.py: `parse_commands.py < commands.json`, each a list such as `["python", "examples/train.py", …]`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


class Parsed(BaseException):
    """The parser was content: the program need not go on."""


def main() -> None:
    """Print what was wrong, a line for each command."""
    right = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args: object, **options: object) -> None:
        right(*args, **options)
        raise Parsed

    argparse.ArgumentParser.parse_args = parse_and_stop
    for words in json.load(sys.stdin):
        problem = complaint(words)
        if problem and words[0] == "zerort" and not any(word.startswith("-") for word in words):
            problem = complaint([*words, "--help"])  # the name of a command, not a call of it
        if problem:
            print(f"{' '.join(words)}: {' '.join(problem.split())}")


def complaint(words: list[str]) -> str:
    """Return why a program cannot be started with these words; nothing if it can."""
    head, *rest = words
    errors, path = io.StringIO(), list(sys.path)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            if head == "zerort":
                sys.argv = words
                runpy.run_module("zerort", run_name="__main__", alter_sys=False)
            elif rest[0] == "-m":
                sys.argv = rest[1:]
                runpy.run_module(rest[1], run_name="__main__", alter_sys=False)
            else:
                sys.argv = rest
                sys.path.insert(0, str(Path(rest[0]).parent.absolute()))
                runpy.run_path(rest[0], run_name="__main__")
    except Parsed:
        return ""
    except SystemExit as end:
        return "" if words[-1] == "--help" and end.code == 0 else errors.getvalue() or f"exit code {end.code}"
    except Exception as error:
        return repr(error)
    finally:
        sys.path[:] = path
    return "it ended without having parsed its words" if rest[1:] else ""  # one that takes none has done its work


if __name__ == "__main__":
    main()
