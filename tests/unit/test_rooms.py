"""The map is true: every package names its files in its docstring, and no file that is not there."""

import ast
import re
from pathlib import Path

import pytest

import zerort

ROOT = Path(zerort.__file__).parent
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py") if path.parent != ROOT)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_names_its_files_and_no_others(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    there = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    named = set(re.findall(r"(?<![\w/])[a-z_]+\.py\b", text))
    assert named == there
