"""Bindings stay on their side: they use the engine through `zerort.engine.binding`, and look into nothing behind it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerort

ROOT = Path(__file__).parents[3] / "bindings"
FILES = sorted(ROOT.rglob("*.py"))
DOORS = {"zerort", "zerort.data", "zerort.engine.binding", "zerort.errors", "zerort.typing"}
HANDLES = {"rt", "binding", "runtime"}
"""What an object of the engine is called in a binding, with or without an underscore before it."""
NOUNS = {"device", "group", "rt", "gradients"}
"""Public attributes of such objects that are objects of their own, whose verbs may be called."""
INSIDE = {
    *("attachments", "bucket", "buckets", "context", "form", "lr_overrides", "mesh", "run", "section", "sections"),
    *("slots", "tiers", "whole", "world"),
}
"""Attributes that only the engine's own parts have, whatever the object is called."""


def private_names(folder: Path) -> set[str]:
    """Return the private attributes that the classes of a folder give themselves, and their private methods."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


PRIVATE = private_names(Path(zerort.__file__).parent / "engine")
PRIVATE -= {"_parameters", "_values", "_version"}  # torch has these, too


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Yield every module of zerort that a file imports, imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def chain_of(node: ast.Attribute) -> list[str]:
    """Return the names of ``a.b.c``; what stands before the first name, a call say, is left out."""
    names = [node.attr]
    inner: ast.expr = node.value
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        names.append(inner.id)
    return names[::-1]


def trespasses(tree: ast.Module) -> Iterator[str]:
    """Yield attribute chains that reach behind the public face of the engine."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and chain_of(node)[:-1] == ["self"]}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain = chain_of(node)
        if INSIDE & set(chain[1:]):
            yield ".".join(chain)
            continue
        if chain[-1] in PRIVATE - own and chain[:-1] not in (["self"], ["cls"]):
            yield ".".join(chain)
            continue
        at = next((at for at, name in enumerate(chain) if name.lstrip("_") in HANDLES), None)
        behind = [] if at is None else chain[at + 1 :]
        while behind and behind[0] in NOUNS:
            behind = behind[1:]
        if len(behind) > 1 or any(name.startswith("_") for name in behind):
            yield ".".join(chain)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_binding_uses_nothing_of_the_engine_but_its_door(path):
    tree = ast.parse(path.read_text())
    ours = {name for name in imports_of(tree) if name.split(".")[0] == "zerort"}
    assert ours <= DOORS
    assert not list(trespasses(tree))


@pytest.mark.parametrize(
    "line",
    [
        "rt.slots.buckets.available",
        "section.parameters.whole",
        "self._rt.context.check_open('x')",
        "unit.sections[0]",
        "unit._holders",
        "self.unit._unit.gathered()",
        "rt.units.values",
        "binding.rt.memory.parameter",
    ],
)
def test_a_line_that_looks_inside_is_found(line):
    assert list(trespasses(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "rt.device.on_stream(s)",
        "self._binding.rt.updates",
        "rt.group.broadcast(x)",
        "self._rt.rank",
        "weight.live._version",
    ],
)
def test_a_line_that_stays_outside_passes(line):
    assert not list(trespasses(ast.parse(line)))


def test_all_bindings_are_looked_at():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == {"zerort_numpy", "zerort_torch"}
    assert len(FILES) > 20
