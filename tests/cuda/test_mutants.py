"""The list of mutants is true: every line is there, once, and no synchronisation of the GPU path is missing from it."""

import mutants
import pytest

ZERORT = mutants.ROOT / "zerort"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.line[:40])
def test_each_line_is_there_once_and_so_are_its_tests(mutant):
    lines = [line.strip() for line in (ZERORT / mutant.file).read_text().splitlines()]
    assert lines.count(mutant.line) == 1
    assert mutant.instead not in lines or mutant.instead == "pass"
    file, *names = mutant.tests
    known = (mutants.HERE / file).read_text() + (ZERORT / "testing" / "device_contract.py").read_text()
    assert names
    assert all(name in known for name in names)


def test_every_synchronisation_is_in_the_list():
    listed = {(mutant.file, mutant.line) for mutant in mutants.MUTANTS}
    found = {
        (str(path.relative_to(ZERORT)), line.strip())
        for pattern in mutants.FILES
        for path in ZERORT.glob(pattern)
        for line in path.read_text().splitlines()
        if mutants.SYNCHRONISES.search(line)
    }
    assert found, "no file was looked through"
    assert found <= listed, f"add to tests/cuda/mutants.py: {sorted(found - listed)}"
