"""`make mutants-core` can be trusted: its changes are valid, other programs, and some that must be caught are."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mutation"))

import core
from mutate import Change, changes

EVERY = """
class Book:
    pages: int = 5

    def __repr__(self):
        return "Book" if self.pages > 1 else "Leaf"

    @property
    def ready(self) -> bool:
        return self.done(1) or not self.late

    def turn(self, by: int = 1):
        if self.ready:
            raise ValueError(f"Expected {by + 1}, got {by - 1}.")
        for page in range(0, self.pages):
            if page in self.read:
                continue
            self.at = (max(page, by)
                       * 7)  # é, and * in a comment
        self.log("turned")
        self.steps += by
"""


def test_each_kind_of_change_is_found_and_messages_are_left_alone():
    lines = EVERY.splitlines()
    found = []
    for change in changes(EVERY):
        number = change.line(EVERY) - 1
        found.append((lines[number].strip(), change.apply(EVERY).splitlines()[number].strip()))
    assert found == [
        ("return self.done(1) or not self.late", "return not (self.done(1) or not self.late)"),
        ("return self.done(1) or not self.late", "return self.done(0) or not self.late"),
        ("return self.done(1) or not self.late", "return self.done(2) or not self.late"),
        ("return self.done(1) or not self.late", "return self.done(1) and not self.late"),
        ("return self.done(1) or not self.late", "return self.done(1) or (self.late)"),
        ("def turn(self, by: int = 1):", "def turn(self, by: int = 0):"),
        ("def turn(self, by: int = 1):", "def turn(self, by: int = 2):"),
        ("if self.ready:", "if not (self.ready):"),
        ("for page in range(0, self.pages):", "for page in range(1, self.pages):"),
        ("if page in self.read:", "if page not in self.read:"),
        ("continue", "pass"),
        ("self.at = (max(page, by)", "pass"),
        ("self.at = (max(page, by)", "self.at = (min(page, by)"),
        ("* 7)  # é, and * in a comment", "// 7)  # é, and * in a comment"),
        ('self.log("turned")', "pass"),
        ("self.steps += by", "pass"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("room", core.STAGES)
def test_changes_are_valid_other_programs_with_all_lines_where_they_were(room):
    chosen = core.choose(40, seed=0, only=f"{room}/")
    assert len(chosen) == 40
    for mutant in chosen:
        changed = mutant.change.apply(mutant.text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(mutant.text)), mutant
        assert changed.count("\n") == mutant.text.count("\n"), mutant


def test_a_seed_is_one_choice_in_which_rooms_take_turns():
    chosen = core.choose(28, seed=1)
    assert [mutant.room for mutant in chosen] == [*core.STAGES] * 4
    assert chosen == core.choose(28, seed=1)
    assert chosen != core.choose(28, seed=2)
    assert [one for one in chosen if one.room == "comm"] == core.choose(4, seed=1, only="comm/")


def test_every_room_has_tests_and_all_of_them_are_there():
    rooms = {path.name for path in (core.ROOT / "zerort").iterdir() if path.is_dir()}
    assert rooms >= set(core.STAGES)
    for stage in (stage for stages in core.STAGES.values() for stage in stages):
        for word in stage.split():
            assert word.isdigit() or [*core.TESTS.glob(word)], stage


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    return core.Trial(tmp_path_factory.mktemp("copy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "instead", "tests"),
    [
        ("layout/placement.py", "if collective is not None:", "layout/test_placement"),
        ("checkpoint/reader.py", "- address_of(self.out)) % PAGE_NBYTES != 0", "checkpoint/test_reader"),
        ("comm/guard/folded.py", "return is_ours(filename) and is_binding(filename)", "comm/test_folded"),
    ],
)
def test_a_mutant_is_caught_and_the_copy_is_whole_again(trial, file, instead, tests):
    room = file.split("/")[0]
    (mutant,) = [one for one in core.all_mutants(room) if one.file == file and str(one).endswith(instead)]
    stage = f"unit/{tests}.py"
    trial.limits[stage] = 120.0
    assert trial.fate(mutant, [stage]).startswith(f"caught: FAILED tests/unit/{tests}.py::")
    assert (trial.directory / "zerort" / file).read_text() == mutant.text


@pytest.mark.slow
def test_what_no_test_notices_survives_and_what_hangs_is_caught(trial):
    file = "layout/placement.py"
    text = (core.ROOT / "zerort" / file).read_text()
    stage = "unit/layout/test_placement.py"
    trial.limits[stage] = 120.0
    end = len(text.encode())
    assert trial.fate(core.Mutant(file, Change(end, end, "# a comment\n"), text), [stage]) == "SURVIVED"
    trial.limits[stage] = 5.0
    endless = Change(end, end, "\nwhile True:\n    pass\n")
    assert trial.fate(core.Mutant(file, endless, text), [stage]) == f"caught, it hangs: {stage}"
