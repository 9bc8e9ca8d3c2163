"""The changes of a Python source that a mutation run makes, one at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from change import Change, splice

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
# Only people read the results of _WORDS. _TYPES are for the type checker.
_WORDS = {"__repr__", "__str__", "_describe"}
_TYPES = {"cast", "TypeVar", "NewType", "overload"}
_LOGGING = {"warn", "warning", "debug", "info", "log", "exception"}


def python_changes(file: str, source: str) -> list[Change]:
    finder = _ChangeFinder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


class _ChangeFinder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.source = source
        self.lines = source.encode().splitlines(keepends=True)
        self.found: list[Change] = []
        self._statement = 0
        self._function: list[str] = []

    # ---- writing a change down ----

    def _text(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        return splice(self.lines, start, end, None)

    def _add(self, start: tuple[int, int], end: tuple[int, int], new: str, kind: str) -> None:
        old = self._text(start, end)
        # The lines after the change keep their numbers. The recording knows lines by their numbers.
        lost = old.count("\n") - new.count("\n")
        if lost:
            new = f"({new}{chr(10) * lost})"
        self.found.append(
            Change(
                self.file, start, end, old, new, kind, self._statement, ".".join(self._function), bool(self._function)
            )
        )

    def _replace(self, node: ast.AST, new: str, kind: str) -> None:
        self._add(_start(node), _end(node), new, kind)

    def _operator(self, left: ast.AST, right: ast.AST, old: str, new: str, kind: str) -> None:
        between = self._text(_end(left), _start(right))
        if "#" in between:
            return
        pattern = rf"\b{old}\b" if old.isalpha() else r"\s+".join(map(re.escape, old.split()))
        found = re.search(pattern, between)
        if not found:
            return
        line, column = _end(left)
        before = between[: found.start()]
        if "\n" in before:
            start = (line + before.count("\n"), len(before.rsplit("\n", 1)[1].encode()))
        else:
            start = (line, column + len(before.encode()))
        self._add(start, (start[0], start[1] + len(found.group().encode())), new, kind)

    # ---- statements ----

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node.lineno
            super().visit(node)
            self._statement = outer
        else:
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _WORDS or any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._function.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._function.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        # A class's own lines run when the class is created, so the class is not part of a function's name.
        for statement in node.body:
            self.visit(statement)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            if self._function and isinstance(node.target, (ast.Attribute, ast.Subscript)):
                self._drop_assignment(node)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any(name.startswith("__") for name in names):
            return
        if self._function and all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._drop_assignment(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop_assignment(node)
        old, new = _ARITHMETIC.get(type(node.op), ("", ""))
        if old:
            self._operator(node.target, node.value, f"{old}=", f"{new}=", "arithmetic")
        self.generic_visit(node)

    def _drop_assignment(self, node: ast.AST) -> None:
        # In __init__ the attribute would be missing, and any use would show that.
        if self._function[-1:] != ["__init__"]:
            self._replace(node, "None", "assignment dropped")

    def visit_Delete(self, node: ast.Delete) -> None:
        if self._function:
            self._replace(node, "None", "del dropped")

    def visit_Raise(self, node: ast.Raise) -> None:
        if "NotImplementedError" not in ast.unparse(node):
            self._replace(node, "None", "raise dropped")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in _LOGGING:
                return
            self._replace(node, "None", "call dropped")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if test == "TYPE_CHECKING" or "sys.platform" in test or "sys.version_info" in test:
            for statement in node.orelse:
                self.visit(statement)
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
            self._replace(test, f"(not ({self._text(_start(test), _end(test))}))", "condition negated")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        if not isinstance(node.value, ast.Constant):
            self._replace(node.value, "None", "returns None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue", "break")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break", "continue")

    # ---- expressions ----

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old, news = _COMPARISONS[type(operator)]
            for new in news:
                self._operator(left, right, old, new, "comparison")
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values[:-1], node.values[1:], strict=True):
            self._operator(left, right, old, new, "and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            line, column = _start(node)
            self._add((line, column), (line, column + len("not ")), "", "not dropped")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        old, new = _ARITHMETIC.get(type(node.op), ("", ""))
        text = any(
            isinstance(side, (ast.JoinedStr, ast.Constant)) and not _number(side) for side in (node.left, node.right)
        )
        # Outside of functions, `|` joins types.
        if old and not text and not (old == "|" and not self._function):
            self._operator(node.left, node.right, old, new, "arithmetic")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _TYPES or name in _LOGGING:
            return
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1), "constant")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _start(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def with_counters(source: str, path: str) -> ast.Module:
    """Return the module's code with counters. Before each statement it records in `__ran__` that its line ran."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                setattr(node, field, list(_counted(body)))
    return ast.fix_missing_locations(tree)


def _counted(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for place, statement in enumerate(body):
        docstring = place == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not docstring and not future:
            counter = ast.Subscript(ast.Name("__ran__", ast.Load()), ast.Constant(statement.lineno), ast.Store())
            yield ast.copy_location(ast.Assign([counter], ast.Constant(1)), statement)
        yield statement
