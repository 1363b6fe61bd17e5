"""No module of the package imports itself by way of others, TYPE_CHECKING and imports inside functions counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import zerort

PACKAGE = Path(zerort.__file__).parent


def modules_of(package: Path) -> dict[str, ast.Module]:
    """Return the parsed source of every module of a package, by full name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imports_of(module: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the known modules that a module names in imports, wherever these stand."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:  # of a package either a module of it, or what it exports itself
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def cycles_in(modules: Mapping[str, ast.Module]) -> set[frozenset[str]]:
    """Return the groups of modules that reach each other by imports."""
    edges = {name: set(imports_of(module, modules)) - {name} for name, module in modules.items()}
    reach = {name: set(found) for name, found in edges.items()}
    for via in reach:  # Warshall's closure
        for found in reach.values():
            if via in found:
                found |= reach[via]
    groups = ({other for other in found if name in reach[other]} for name, found in reach.items() if name in found)
    return {frozenset(group) for group in groups}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Only the known cycles are left, and all of these are still there."""
    assert cycles_in(modules_of(PACKAGE)) == set()


def test_a_cycle_is_found_wherever_its_imports_stand(tmp_path: Path) -> None:
    """One import under TYPE_CHECKING, one inside a function, and one of a package's own name close a cycle."""
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("from planted.a import a\n")
    (package / "a.py").write_text("if TYPE_CHECKING:\n    from planted.b import b\n")
    (package / "b.py").write_text("def b():\n    from planted import c\n")
    (package / "c.py").write_text("import planted.a\n")
    (package / "d.py").write_text("from planted.a import a\nfrom planted import name\n")
    assert cycles_in(modules_of(package)) == {frozenset({"planted.a", "planted.b", "planted.c"})}
