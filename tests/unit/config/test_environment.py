"""Environment variables are read in one place, which knows all of them, and the guide tells of those that users set."""

import ast
import re
from pathlib import Path

import zerort
from zerort.config.environment import FOREIGN, KNOWN_VARIABLES

ROOT = Path(zerort.__file__).parent
READERS = {
    "config/environment.py": "the one place",
    "comm/bootstrap/environment.py": "what launchers leave, and what their children get",
    "native/extension.py": "lies below config",
}
HANDS_ON = {  # the whole environment, to a process that they start
    "cli/ranks.py",
    "cli/bench/hosts/command.py",
    "cli/bench/wire/link.py",
    "testing/pytest_ranks.py",
}
OF_TESTS = {"ZERORT_STACKS", "ZERORT_JOB"}


def sources():
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def reads_environment(text):
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        for node in ast.walk(ast.parse(text))
    )


def test_nobody_else_reads_the_environment():
    found = {name for name, text in sources().items() if "env" in text and reads_environment(text)}
    assert found == set(READERS) | HANDS_ON


def test_every_variable_that_is_named_is_known():
    named = {one for text in sources().values() for one in re.findall(r'"(ZERORT_[A-Z_]+)"', text)}
    assert named == set(KNOWN_VARIABLES)
    assert not set(FOREIGN) & set(KNOWN_VARIABLES)


def test_the_guide_tells_of_every_variable_that_users_set():
    guide = (ROOT.parent / "docs" / "tuning.md").read_text()
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `ZERORT_")]
    told = set()
    for row in rows:
        names = re.findall(r"`([A-Z_]+)", row)
        stem = names[0].removesuffix("_DEPTH")
        told |= {stem + one if one.startswith("_") else one for one in names}
    assert told == set(KNOWN_VARIABLES) - OF_TESTS
