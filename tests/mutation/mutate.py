"""Find every small change of a Python file that a test should notice.

    a < b            a <= b           each comparison, + and -, * and //, and/or, min/max, True/False
    n - 1            n - 2            0, 1 and 2 become one more or less
    if ready:        if not (ready):  as well as `while`, `not`, and what a function returns as bool
    self.wait()      pass             a call, an assignment to a field or an item, break and continue

The change is made in the text: all else stays where it was, comments and line numbers included. Nothing is changed that
only speaks (raise, assert, f-strings, `__repr__`, functions that return an error), only types (annotations,
TYPE_CHECKING) or decorates.
"""

import ast
import re
from dataclasses import dataclass

__all__ = ["Change", "changes"]

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
OPERATORS = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
"""By node: the operator as a pattern, and what it becomes."""

OTHER_NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
SAYS_NOTHING = ("repr", "strict")
"""Keywords without effect on a right program: what is shown, and a check of lengths."""
SPEAKS = re.compile(r"__repr__|__str__|details|describe")
"""Functions that only say something."""


@dataclass(frozen=True)
class Change:
    """A part of a file's text, from byte to byte, and what stands there instead."""

    begin: int
    end: int
    instead: str

    def apply(self, text):
        """Return the changed text."""
        whole = text.encode()
        return (whole[: self.begin] + self.instead.encode() + whole[self.end :]).decode()

    def line(self, text):
        """Return the number of the line that it begins in, from 1 on."""
        return text.encode()[: self.begin].count(b"\n") + 1

    def __str__(self):
        return " ".join(self.instead.split())


def changes(text):
    """Return all changes of a file, in the order of its text."""
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    return sorted(finder.found, key=lambda change: (change.begin, change.end, change.instead))


class _Finder(ast.NodeVisitor):
    """Walk through a file and note the changes."""

    def __init__(self, text):
        self.whole = text.encode()
        starts = [0, *(found.end() for found in re.finditer(rb"\n", self.whole))]
        self.at = lambda line, column: starts[line - 1] + column  # ast counts columns in bytes, too
        self.found = []
        self.returns_bool = False

    def begin(self, node):
        return self.at(node.lineno, node.col_offset)

    def end(self, node):
        return self.at(node.end_lineno, node.end_col_offset)

    def text(self, node):
        return self.whole[self.begin(node) : self.end(node)].decode()

    def note(self, node, instead):
        """Note that a node becomes something else, on as many lines."""
        missing = self.text(node).count("\n") - instead.count("\n")
        self.found.append(Change(self.begin(node), self.end(node), instead + "\n" * missing))

    def between(self, left, right, pattern, instead):
        """Note another operator between two nodes, where only it, parentheses and space are."""
        gap = self.whole[self.end(left) : self.begin(right)].decode()
        (found,) = re.finditer(pattern, re.sub(r"#.*", lambda comment: " " * len(comment[0].encode()), gap))
        begin = self.end(left) + found.start()
        self.found.append(Change(begin, begin + len(found[0]), instead))

    # -- what is left alone ----------------------------------------------------------------------------------------

    def visit(self, node):
        if not isinstance(node, LEFT_ALONE):
            super().visit(node)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node):
        for child in node.body:  # neither bases nor decorators
            self.visit(child)

    def visit_FunctionDef(self, node):
        returned = "" if node.returns is None else ast.unparse(node.returns)
        if SPEAKS.fullmatch(node.name) or returned.endswith("Error"):
            return
        outer, self.returns_bool = self.returns_bool, returned == "bool"
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)
        self.returns_bool = outer

    # -- what is changed -------------------------------------------------------------------------------------------

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, node.comparators, strict=False):
            self.between(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in OPERATORS and not any(map(_is_text, (node.left, node.right))):
            self.between(node.left, node.right, *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.note(node, "pass")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, rf"\b{word}\b", other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.note(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.note(node, str(not node.value))
        elif isinstance(node.value, int) and 0 <= node.value <= 2:
            self.note(node, str(node.value + 1))
            if node.value:
                self.note(node, str(node.value - 1))

    def visit_If(self, node):
        if "TYPE_CHECKING" in self.text(node.test):
            return
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):  # they have a change of this effect
            self.note(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_While(self, node):
        if not isinstance(node.test, (ast.Compare, ast.UnaryOp, ast.Constant)):
            self.note(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_Return(self, node):
        if self.returns_bool and node.value is not None and not isinstance(node.value, (ast.Constant, ast.Compare)):
            self.note(node.value, f"not ({self.text(node.value)})")
        self.generic_visit(node)

    def visit_Call(self, node):
        name = ast.unparse(node.func)
        if name.endswith(("Error", "warn")):
            return
        if name in OTHER_NAMES:
            self.note(node.func, OTHER_NAMES[name])
        for child in (node.func, *node.args, *(one.value for one in node.keywords if one.arg not in SAYS_NOTHING)):
            self.visit(child)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).endswith("warn"):
            self.note(node, "pass")
            self.visit(node.value)

    def visit_Assign(self, node):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if "__all__" in names:
            return
        if not names and not any(isinstance(target, ast.Tuple) for target in node.targets):
            self.note(node, "pass")
        self.visit(node.value)

    def visit_Break(self, node):
        self.note(node, "pass")

    def visit_Continue(self, node):
        self.note(node, "pass")


def _is_text(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
