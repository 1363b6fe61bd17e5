"""README and docs hold where they are read: blocks run as they stand, commands parse, names and files are there."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import zerort as zr
from zerort.testing.threads import run_threads

sys.path.insert(0, str(Path(__file__).parent))
import doc_blocks

BLOCKS = doc_blocks.blocks()
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = doc_blocks.commands()
TEXT = {file.relative_to(doc_blocks.ROOT): file.read_text() for file in doc_blocks.FILES}


def test_every_block_says_what_it_is() -> None:
    assert len(PYTHON) >= 6
    for block in BLOCKS:
        assert block.language in doc_blocks.LANGUAGES, (
            f"{block}: expected one of {doc_blocks.LANGUAGES} behind the fence"
        )
        assert block.needs <= set(doc_blocks.NEEDS), f"{block}: expected some of {doc_blocks.NEEDS}, got {block.needs}"


@pytest.mark.parametrize("block", [block for block in PYTHON if not block.needs], ids=str)
def test_a_block_runs_as_it_stands(block: doc_blocks.Block, tmp_path: Path) -> None:
    doc_blocks.expect_it_runs(block, tmp_path)


@pytest.mark.parametrize("block", [block for block in PYTHON if block.needs], ids=str)
def test_a_block_that_needs_more_is_whole_at_least(block: doc_blocks.Block) -> None:
    compile(block.code, str(block), "exec")
    if block.needs == {"torch"}:
        assert "import torch" in block.code  # run by test_docs_torch.py


def test_every_command_is_of_a_kind_that_is_known() -> None:
    assert len(COMMANDS) > 30
    heads = {doc_blocks.program(command)[0] for command in COMMANDS}
    assert heads <= set(doc_blocks.HEADS), heads


def test_programs_take_the_words_that_they_are_given() -> None:
    ours = {words for words in map(doc_blocks.program, COMMANDS) if doc_blocks.is_ours(words)}
    here = sorted(words for words in ours if not doc_blocks.needs_torch(words))
    assert len(here) > 15
    wrong = [
        ("zerort", "bench", "collectives", "--rank", "x"),
        ("zerort", "bench", "nothing"),
        ("python", "examples/train.py", "--plan", "zero9"),
        ("python", "examples/nowhere.py"),
    ]
    found = doc_blocks.complaints([*here, *wrong])
    assert [line.split(":")[0] for line in found] == [" ".join(words) for words in wrong], "\n".join(found)


def test_make_knows_its_targets() -> None:
    rules = set(re.findall(r"^([a-z-]+):.*##", (doc_blocks.ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [doc_blocks.program(command) for command in COMMANDS]
    targets = {word for words in asked if words[0] == "make" for word in words[1:] if "=" not in word}
    assert targets
    assert targets <= rules, targets - rules


def test_pip_is_asked_for_what_it_can_find() -> None:
    settings = (doc_blocks.ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", settings.split("[project.optional-dependencies]")[1], re.MULTILINE))
    asked = {word for command in COMMANDS if command.words[0] == "pip" for word in command.words[2:]}
    assert ".[mpich]" in asked
    for word in asked:
        assert not re.match("zerort", word), f"{word}: zerort is on no registry"
        if found := re.fullmatch(r"\.\[(.*)\]", word):
            assert set(found[1].split(",")) <= extras, word


def test_no_program_asks_a_registry_for_zerort() -> None:
    shown = [path for folder in ("zerort", "bindings", "examples", "benchmarks") for path in _sources(folder)]
    assert len(shown) > 200
    for path in shown:
        assert not re.search(r"pip install\s+(?:-\S+\s+)*'?zerort", path.read_text()), path


def test_every_file_that_is_named_is_there() -> None:
    named = re.compile(r"(?<![\w./-])(?:zerort|bindings|tests|docs|examples|benchmarks)/[\w./*-]*[\w/*]")
    for file, text in TEXT.items():
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        beside = [file.parent / link for link in links]
        for path in [*beside, *map(Path, named.findall(text))]:
            assert any(doc_blocks.ROOT.glob(str(path))), f"{file} names {path}"


def test_the_plot_is_drawn_from_the_published_figures() -> None:
    drawn = runpy.run_path(str(doc_blocks.ROOT / "benchmarks/plot_results.py"))["draw"]
    results = json.loads((doc_blocks.ROOT / "benchmarks/results/published.json").read_text())
    assert (doc_blocks.ROOT / "docs/pictures/results.svg").read_text() == drawn(results)


def test_every_decision_is_indexed_and_every_citation_leads_to_one() -> None:
    folder = doc_blocks.ROOT / "docs/decisions"
    files = {path.name[:4]: path for path in folder.glob("[0-9]*.md")}
    assert len(files) >= 84
    index = (folder / "README.md").read_text()
    for number, path in files.items():
        lines = path.read_text().splitlines()
        title = lines[0].removeprefix(f"# {number}. ")
        assert f"- [{number}]({path.name}) {title}" in index, path
        assert lines[2].startswith(("- Status: accepted", "- Status: superseded by ")), path
        assert lines[3].startswith("- Area: "), path
    texts = [path.read_text() for place in ("zerort", "bindings") for path in _sources(place)]
    cited = [found for text in texts for found in re.findall(r"\bdecisions? (\d+(?:, \d+)*)", text)]
    assert len(cited) >= 25
    for numbers in cited:
        assert set(numbers.split(", ")) <= files.keys(), numbers


def test_every_name_of_the_api_that_is_named_is_there() -> None:
    name = re.compile(r"(?<![/.-])\b(zr|rt|group)\.(\w+)")
    named = [(file, *pair) for file, text in TEXT.items() for pair in name.findall(text)]
    assert len(named) > 60

    def body(group: zr.Group) -> None:
        with zr.open(group=group) as rt:
            for file, place, name in named:
                assert hasattr({"zr": zr, "rt": rt, "group": group}[place], name), f"{file} names {place}.{name}"

    run_threads(1, body)


def _sources(folder: str) -> list[Path]:
    return [path for kind in ("*.py", "*.md", "*.cpp", "*.h") for path in (doc_blocks.ROOT / folder).rglob(kind)]
