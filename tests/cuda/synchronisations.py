"""Find the waits and events of the GPU path, and what each line's annotation says of it.

A statement that waits, or lets others wait, says beside it or in a comment above which test fails without it:

    self.cuda.wait_event(before)  # gpu-wait: a_copy_waits_for_what_the_caller_computed

Its words are part of the name of exactly one test (or class of tests) below tests/cuda; those below tests/cuda/ranks
run on two ranks. What is changed follows from the statement (`_Statement.without`), or the annotation says it:

    [old -> new]    instead of `old`, which is there once, the statement has `new`
    [-> new]        the statement's value is `new`

A line that is no synchronisation of a GPU says why: ``# not-gpu: reason``. Such a comment before a file's first
statement speaks for the file, and in an ``__init__.py`` for its folder, except for files that have annotations.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Excuse", "Mutant", "Source", "read_tree"]

_WAITS = (
    "wait",
    "wait_for",
    "wait_event",
    "record",
    "order",
    "precede",
    "synchronize",
    "order_after",
    "after",
    "finish",
)
"""Calls that wait or let wait; `.on(stream)`, too, and any call that is queued after something: ``f(after=…)``."""
_GIVEN_A_TICKET = ("order_after", "order")
"""They wait for their first argument, not for what they are called on."""

_ANNOTATION = re.compile(r"# (?P<kind>gpu-wait|not-gpu): (?P<words>.*?)(?: \[(?:(?P<old>.+?) )?-> ?(?P<new>.*)\])?$")

# So that not every file need be parsed:
_ANNOTATED = re.compile(r"# (gpu-wait|not-gpu): ")
_MAY_WAIT = re.compile(rf"\b({'|'.join(_WAITS)}|on)\s*\(|\bafter\s*=")


@dataclass(frozen=True)
class Mutant:
    """A statement without its synchronisation, and the test that must not like that."""

    file: str
    line: int
    test: str
    was: str
    becomes: str
    text: str = field(repr=False)
    """The file with that statement changed."""


@dataclass(frozen=True)
class Excuse:
    """What looks like a synchronisation of a GPU and is none; line 0: a whole file, or folder."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class _Comment:
    line: int
    """That it speaks of."""
    kind: str
    words: str
    old: str | None
    new: str | None


@dataclass
class _Statement:
    """A simple statement, or what a compound one has before its body."""

    node: ast.stmt
    parts: list[ast.expr]
    calls: list[ast.Call] = field(init=False)
    """Those that synchronise."""

    def __post_init__(self) -> None:
        found = (inner for part in self.parts for inner in ast.walk(part))
        self.calls = [one for one in found if isinstance(one, ast.Call) and (_waits(one) or _queued_after(one))]

    @property
    def begin(self) -> tuple[int, int]:
        return self.node.lineno, self.node.col_offset

    @property
    def end(self) -> tuple[int, int]:
        last = self.parts[-1] if hasattr(self.node, "body") else self.node
        return last.end_lineno or last.lineno, last.end_col_offset or 0

    @property
    def lines(self) -> range:
        return range(self.node.lineno, self.end[0] + 1)

    @property
    def value(self) -> ast.expr | None:
        """Return what it computes: the right side, what is returned, or the condition."""
        return getattr(self.node, "test", None) or getattr(self.node, "value", None)

    def without(self) -> tuple[ast.AST, ast.AST | str]:
        """Return which part is to be replaced, and by which other part or text.

        Work queued after something is queued after nothing. A condition is false. A ticket's result is taken without
        a wait; if nobody takes it, what made the ticket stays. Any other statement goes.
        """
        for call in self.calls:
            if keyword := _queued_after(call):
                return keyword.value, "()"
        if isinstance(self.node, (ast.If, ast.While)):
            return self.node.test, "False"
        if isinstance(value := self.value, ast.Call) and _waits(value):
            ticket = value.args[0] if _name(value) in _GIVEN_A_TICKET else getattr(value.func, "value", None)
            if not isinstance(self.node, ast.Expr):
                return value, f"{ast.unparse(ticket)}.result" if ticket else "None"
            if isinstance(ticket, ast.Call):
                return value, ticket
        return self.node, "pass"


class Source:
    """A file: its statements that synchronise, and what its annotations say."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.file = path.relative_to(root).as_posix()
        self.mutants: list[Mutant] = []
        self.excuses: list[Excuse] = []
        self.faults: list[str] = []
        """What is wrong with its annotations."""
        text = path.read_text()
        self._comments, self._text = _annotations(text)
        self._starts = [0]
        for line in self._text.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        tree = ast.parse(text)
        first = next((one.lineno for one in tree.body if not _is_docstring(one)), len(self._starts) + 1)
        heads = [one for one in self._comments if one.line <= first and one.kind == "not-gpu"]
        self.excuses += [Excuse(self.file, 0, one.words) for one in heads]
        self.statements = [found for found in _statements(tree) if found.parts or not hasattr(found.node, "body")]
        for comment in self._comments:
            if comment not in heads:
                self._read(comment)

    @property
    def excused(self) -> bool:
        """Return whether it says that nothing in it is a GPU's."""
        return any(excuse.line == 0 for excuse in self.excuses)

    @property
    def annotated(self) -> bool:
        """Return whether any of its lines has an annotation."""
        return bool(self.mutants) or any(excuse.line for excuse in self.excuses)

    def unannotated(self) -> list[str]:
        """Return the statements that synchronise and say nothing of it."""
        told = {comment.line for comment in self._comments}
        return [
            f"{self.file}:{one.node.lineno}: {self._segment(one.begin, one.end)}"
            for one in self.statements
            if one.calls and not told.intersection(one.lines)
        ]

    def _read(self, comment: _Comment) -> None:
        here = f"{self.file}:{comment.line}"
        statement = next((one for one in self.statements if comment.line in one.lines), None)
        if statement is None:
            self.faults.append(f"{here}: no statement is there that the annotation could be for")
        elif comment.kind == "gpu-wait":
            self._add_mutant(comment, statement)
        elif not statement.calls:
            self.faults.append(f"{here}: what needs no excuse has one")
        else:
            self.excuses.append(Excuse(self.file, comment.line, comment.words))

    def _add_mutant(self, comment: _Comment, statement: _Statement) -> None:
        was = self._segment(statement.begin, statement.end)
        if comment.old is not None:
            if was.count(comment.old) != 1:
                self.faults.append(f"{self.file}:{comment.line}: expected {comment.old!r} once in {was!r}")
                return
            becomes = was.replace(comment.old, comment.new or "")
        else:
            part, instead = (statement.value, comment.new) if comment.new else statement.without()
            assert part is not None
            begin, end = _ends(part)
            new = instead if isinstance(instead, str) else self._segment(*_ends(instead))
            becomes = self._segment(statement.begin, begin) + new + self._segment(end, statement.end)
        before, after = self._segment((1, 0), statement.begin), self._segment(statement.end, (len(self._starts), 0))
        text = before + becomes + after
        self.mutants.append(Mutant(self.file, comment.line, comment.words, was, becomes, text))

    def _segment(self, begin: tuple[int, int], end: tuple[int, int]) -> str:
        first, last = (self._starts[line - 1] + column for line, column in (begin, end))
        return self._text.encode()[first:last].decode()


def read_tree(root: Path) -> list[Source]:
    """Return the files below a folder that belong to the GPU path, or say that they do not."""
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    annotated = {path: Source(path, root) for path, text in texts.items() if _ANNOTATED.search(text)}
    excused = [path.parent for path, one in annotated.items() if one.excused and path.name == "__init__.py"]
    return [
        annotated.get(path) or Source(path, root)
        for path, text in texts.items()
        if path in annotated or (_MAY_WAIT.search(text) and not any(folder in path.parents for folder in excused))
    ]


def _annotations(text: str) -> tuple[list[_Comment], str]:
    """Return a file's annotations, each with the line it speaks of, and the text without them."""
    lines = text.splitlines(keepends=True)
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (found := _ANNOTATION.search(token.string)):
            row, column = token.start
            begin = column + found.start()
            old = lines[row - 1]
            lines[row - 1] = old[:begin].rstrip(" ") + "\n" if old[:begin].strip() else "\n"
            if not old[:begin].strip():  # a line of its own: it speaks of the next one with code
                row = next((at for at in range(row, len(lines)) if not re.match(r"\s*(#|$)", lines[at])), row) + 1
            comments.append(_Comment(row, found["kind"], found["words"], found["old"], found["new"]))
    return comments, "".join(lines)


def _statements(tree: ast.AST) -> Iterator[_Statement]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside: list[ast.expr] = []
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.withitem):
                    inside += [child.context_expr, *([child.optional_vars] if child.optional_vars else [])]
                elif isinstance(child, ast.expr):
                    inside.append(child)
            yield _Statement(node, inside)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _waits(call: ast.Call) -> bool:
    return _name(call) in _WAITS or (isinstance(call.func, ast.Attribute) and call.func.attr == "on")


def _queued_after(call: ast.Call) -> ast.keyword | None:
    return next((one for one in call.keywords if one.arg == "after" and ast.unparse(one.value) != "()"), None)


def _ends(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where a part of a file begins and ends: lines from 1 on, and bytes within them."""
    at = {name: getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    return (at["lineno"], at["col_offset"]), (at["end_lineno"], at["end_col_offset"])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
