"""What README and docs show: their fenced blocks, the commands in them and in the text, and what each block needs.

A block's language says what is done with it: `python` is run, `console` has its commands parsed, `text` is for readers.
A comment on the line before says more: `<!-- ranks: 1 2 4 -->` where it is started, `<!-- needs: torch -->` what else
must be there: `torch`, an emulated `gpu`. What needs both, `hosts` or `minutes` is compiled and not run
(decision 0068).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerort.comm.bootstrap.environment import without_launcher
from zerort.testing import run_job

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / folder / "README.md" for folder in ("bindings", "benchmarks", "examples")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
LANGUAGES = ("python", "console", "text")
NEEDS = ("torch", "gpu", "hosts", "minutes")
HEADS = ("zerort", "mpirun", "python", "make", "pip", "source")
"""What a command begins with, after variables."""

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_VARIABLE = re.compile(r"^[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    file: Path
    line: int
    """Of its fence, from 1 on."""
    language: str
    code: str
    ranks: tuple[int, ...]
    """How many processes run it, one job for each; empty: a plain `python`."""
    needs: frozenset[str]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, in a block or within a sentence."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where} {shlex.join(self.words)}"


def blocks() -> list[Block]:
    """Return all fenced blocks, in order."""
    return [_block(file, found) for file in FILES for found in _FENCE.finditer(file.read_text())]


def commands() -> list[Command]:
    """Return every command of the console blocks, and every one that stands in a sentence or a table."""
    found = []
    for block in blocks():
        if block.language == "console":
            lines = block.code.replace("\\\n", " ").splitlines()
            found += [Command(str(block), words) for line in lines if (words := _words(line))]
    for file in FILES:
        prose = _FENCE.sub(lambda block: "\n" * block.group().count("\n"), file.read_text())
        for span in _SPAN.finditer(prose):
            words = tuple(span.group(1).split())
            if words[0] in HEADS and len(words) > 1 and "…" not in span.group(1):
                line = prose[: span.start()].count("\n") + 1
                found.append(Command(f"{file.relative_to(ROOT)}:{line}", _words(span.group(1))))
    return found


def program(command: Command) -> tuple[str, ...]:
    """Return a command without variables, mpirun and its options: `python …` or `zerort …`, or as it is."""
    words = list(command.words)
    while _VARIABLE.match(words[0]):
        words.pop(0)
    if words[0] == "mpirun":
        words = words[next(at for at, word in enumerate(words) if word in ("python", "zerort")) :]
    return tuple(words)


def expect_it_runs(block: Block, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Run a block as a script of its own, at each number of ranks that it names; each must print the same."""
    outputs = []
    for ranks in block.ranks or (0,):
        place = folder / str(ranks)
        place.mkdir()
        outputs.append(_run(block, place, ranks, env or {}))
    assert len(set(outputs)) == 1, f"{block}\n" + "\n".join(outputs)


def complaints(programs: Sequence[Sequence[str]]) -> list[str]:
    """Let programs parse their words, all in one process, and return what they say against them, a line for each."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("parse_commands.py")],
        input=json.dumps(programs),
        env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def is_ours(words: Sequence[str]) -> bool:
    """Whether a program is one of this repository's that parses its words: not the reader's own script."""
    if words[0] == "python":
        return words[1:3] == ("-m", "peers") or (ROOT / words[1]).is_file()
    return words[0] == "zerort"


def needs_torch(words: Sequence[str]) -> bool:
    """Whether a program imports torch before it parses its words, by itself or by the module that it is."""
    files = [ROOT / word for word in words[:3] if word.endswith(".py")]
    imports = "\n".join(file.read_text() for file in files if file.is_file())
    return (
        words[1:3] == ("-m", "peers")
        or re.search("^(import|from) (zerort_)?torch|peers", imports, re.MULTILINE) is not None
    )


def _run(block: Block, folder: Path, ranks: int, env: Mapping[str, str]) -> str:
    script = folder / "block.py"
    script.write_text(block.code)
    if ranks:
        result = run_job(ranks, [script], timeout=300, cwd=folder, env=env)
        assert result.code == 0, f"{block}\n{result.output}"
        return str(result.output)
    done = subprocess.run(
        [sys.executable, script],
        env=without_launcher() | dict(env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"
    return done.stdout


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line, comments=True)
    return tuple(words[: words.index(">")] if ">" in words else words)  # where the output goes is the shell's affair


def _block(file: Path, found: re.Match[str]) -> Block:
    marks = dict(re.findall(r"(\w+): ([\w ]+)", found["mark"] or ""))
    assert marks.keys() <= {"ranks", "needs"}, (file, found["mark"])
    return Block(
        file=file,
        line=file.read_text()[: found.start("language")].count("\n") + 1,
        language=found["language"].strip(),
        code=found["code"],
        ranks=tuple(map(int, marks.get("ranks", "").split())),
        needs=frozenset(marks.get("needs", "").split()),
    )
