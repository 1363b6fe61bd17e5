"""Tests patch objects: a path in a string is wrong after a move, or names what nobody uses any more."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def by_path(text: str) -> list[int]:
    """Return the lines that patch what a dotted string names."""
    calls = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call) and one.args]
    patches = [one for one in calls if ast.unparse(one.func).split(".")[-1] in ("patch", "setattr", "delattr")]
    return [
        one.lineno
        for one in patches
        if isinstance(one.args[0], ast.JoinedStr)
        or (isinstance(one.args[0], ast.Constant) and "." in str(one.args[0].value))
    ]


def test_a_patch_by_path_is_seen() -> None:
    text = 'mock.patch("a.b.c", 1)\nmonkeypatch.setattr("a.b", 2)\npatch(f"{a}.b")\nmock.patch.object(a, "b.c")\n'
    assert by_path(text) == [1, 2, 3]


def test_no_test_patches_by_path() -> None:
    files = list(TESTS.rglob("*.py"))
    assert len(files) > 100
    assert not [f"{path.relative_to(TESTS)}:{line}" for path in files for line in by_path(path.read_text())]
