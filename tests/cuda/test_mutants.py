"""The list of mutants is true: every line is there, once, and no synchronisation of the GPU path is missing from it."""

import mutants
import pytest

ZERORT = mutants.ROOT / "zerort"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.line[-40:])
def test_each_line_is_there_once_and_so_are_its_tests(mutant):
    text = (ZERORT / mutant.file).read_text()
    assert len(mutant.places(text)) == 1
    assert mutant.change(text) != text
    file, *names = mutant.tests
    known = (mutants.HERE / file).read_text() + (ZERORT / "testing" / "device_contract.py").read_text()
    assert names
    assert all(name in known for name in names)


def test_every_synchronisation_is_in_the_list():
    found, missing = 0, []
    for path in (path for pattern in mutants.FILES for path in ZERORT.glob(pattern)):
        file, text = str(path.relative_to(ZERORT)), path.read_text()
        listed = {place for mutant in mutants.MUTANTS if mutant.file == file for place in mutant.places(text)}
        excused = mutants.NOT_OF_THE_GPU.get(file, {})
        for number, line in enumerate(text.splitlines(), 1):
            if mutants.SYNCHRONISES.search(line):
                found += 1
                if number not in listed and line.strip() not in excused:
                    missing.append((file, line.strip()))
    assert found, "no file was looked through"
    assert not missing, f"add to tests/cuda/mutants_*.py: {missing}"


def test_every_excuse_is_for_a_line_that_is_there():
    for file, excused in mutants.NOT_OF_THE_GPU.items():
        lines = [line.strip() for line in (ZERORT / file).read_text().splitlines()]
        for line, why in excused.items():
            assert why
            assert lines.count(line) == 1, line
            assert mutants.SYNCHRONISES.search(line), line
