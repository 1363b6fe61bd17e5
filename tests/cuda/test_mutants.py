"""The annotations are true: every synchronisation of the GPU path has one, and its test and its mutant are there."""

import ast
import shutil

import mutants
import pytest
import synchronisations


def test_every_synchronisation_is_annotated():
    assert sum(len(source.statements) for source in mutants.SOURCES) > 1000, "no file was looked through"
    missing = [line for one in mutants.SOURCES if not one.excused for line in one.unannotated()]
    assert not missing, "say `# gpu-wait: test` or `# not-gpu: reason`:\n" + "\n".join(missing)


def test_every_annotation_is_for_a_statement_that_is_there():
    assert not [fault for one in mutants.SOURCES for fault in one.faults]


def test_a_file_that_is_excused_as_a_whole_has_no_other_annotation():
    assert not [one.file for one in mutants.SOURCES if one.excused and one.annotated]


def test_none_came_or_went_unseen():
    assert mutants.counts() == mutants.COUNTS.read_text(), "if that is right: python tests/cuda/mutants.py --count"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda one: f"{one.file}:{one.line}")
def test_each_mutant_differs_and_has_its_test(mutant):
    whole = (mutants.ROOT / "zerort" / mutant.file).read_text()
    compile(mutant.text, mutant.file, "exec")
    assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(whole))
    assert len(mutants.places(mutant.test)) == 1, f"Expected one test file to have {mutant.test!r}"


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("event.wait()  # gpu-wait: it", "pass"),
        ("make(ticket).wait(3)  # gpu-wait: it", "make(ticket)"),
        ("device.order_after(copy(a))  # gpu-wait: it", "copy(a)"),
        ("whole = device.order_after(ticket)  # gpu-wait: it", "whole = ticket.result"),
        ("return ticket.wait()  # gpu-wait: it", "return ticket.result"),
        (
            "ticket = copy(\n        a, after=[b, c]  # gpu-wait: it\n    )",
            "ticket = copy(\n        a, after=()\n    )",
        ),
        (
            "# gpu-wait: it [b, c -> c]\n    # and why\n    ticket = copy(a, after=[b, c])",
            "ticket = copy(a, after=[c])",
        ),
        ("seen = look('…')  # gpu-wait: it [-> None]", "seen = None"),
        ("while not stop.wait(1):  # gpu-wait: it\n        pass", "while False"),
        ("last = event  # gpu-wait: it", "pass"),
    ],
)
def test_what_a_statement_is_without_its_synchronisation(statement, instead, tmp_path):
    (tmp_path / "one.py").write_text(f"def f():\n    {statement}\n")
    (source,) = synchronisations.read_tree(tmp_path)
    (mutant,) = source.mutants
    assert (mutant.test, mutant.becomes) == ("it", instead)
    assert mutant.text.count(instead) == 1
    compile(mutant.text, "one.py", "exec")
    assert not source.unannotated()
    assert not source.faults


@pytest.mark.parametrize(
    "statement",
    [
        *("ticket.wait()", "x = [t.wait() for t in all]", "ticket.on(stream)", "copy(a, after=b)", "wait()"),
        *("if ok and gate.wait(3):\n        pass", "with device.record(a):\n        pass", "f(lambda: order(a))"),
        *("try:\n        pass\n    except Error:\n        ticket.wait()", "async def g():\n        ticket.wait()"),
    ],
)
def test_a_synchronisation_without_annotation_is_found_wherever_it_moves(statement, tmp_path):
    place = tmp_path / "new" / "room" / "one.py"
    place.parent.mkdir(parents=True)
    place.write_text(f'"""ticket.wait()"""\n\n\ndef f():\n    {statement}\n    copy(a, after=())  # wait()\n')
    (source,) = synchronisations.read_tree(tmp_path)
    assert len(source.unannotated()) == 1


def test_an_annotation_of_nothing_is_a_fault(tmp_path):
    for text in (
        "x = 1  # not-gpu: why",
        "x = f(1)  # gpu-wait: it [2 -> 3]",
        "try:  # gpu-wait: it\n    x()\nfinally:\n    y()",
    ):
        (tmp_path / "one.py").write_text(f"import a\n\n{text}\n")
        (source,) = synchronisations.read_tree(tmp_path)
        assert len(source.faults) == 1, text


def test_a_folder_is_excused_except_for_files_with_annotations(tmp_path):
    room = tmp_path / "room"
    (room / "inner").mkdir(parents=True)
    (room / "__init__.py").write_text('"""A room."""\n\n# not-gpu: of the host\nimport a\n')
    (room / "inner" / "one.py").write_text("import a\n\na.wait()\n")
    (room / "two.py").write_text("import a\n\na.wait()\na.wait()  # gpu-wait: it\n")
    (tmp_path / "three.py").write_text("# not-gpu: why\nimport a\n\na.wait()\n")
    found = {one.file: one for one in synchronisations.read_tree(tmp_path)}
    assert sorted(found) == ["room/__init__.py", "room/two.py", "three.py"]
    assert found["room/__init__.py"].excused
    assert found["three.py"].excused
    assert found["room/two.py"].unannotated() == ["room/two.py:3: a.wait()"]


def test_mutants_follow_a_file_that_moves(tmp_path):
    for source in mutants.SOURCES:
        shutil.copy(source.path, tmp_path / source.file.replace("/", "_"))
    moved = [mutant for source in synchronisations.read_tree(tmp_path) for mutant in source.mutants]
    assert sorted(mutant.text for mutant in moved) == sorted(mutant.text for mutant in mutants.MUTANTS)
