"""Compiles a file so that the conditions in some of its lines record their results. Used inside the sandbox and by the judge.

    scale = x * (width >= 100)      # a comparison whose result is used as a number

is compiled as ``x * __watch__("trainer/run.py", 0, "truth", width >= 100)``. The value stays the same. A condition is

- each comparison, each link of a chain of comparisons, and each operand of ``and``, ``or`` and ``not`` whose truth decides something;
- the test of an ``if``, a ``while``, a conditional expression, a filter of a comprehension, or a guard;
- a value that is a bool, as an operand of arithmetic, as an index, or as the argument of ``int`` and its kind;
- the choice of ``min`` and ``max`` between numbers: each argument must be chosen once.

A tensor's elementwise comparison is one condition: it was true if any element was true, and false if any was false. Inside code that torch.compile
traces, tensors have no values; such a condition counts as *data*. The tests of ``assert`` are not conditions: the run ends if one is false.

The sandbox and the judge compile the same lines, so both number the conditions in the same way. Other arithmetic (``width // 100``) is no condition:
the runs at the recipe's own size are for that.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

WATCH, CHOOSE = "__watch__", "__watch_choice__"
CHOICES = ("min", "max")
NUMBERS = ("int", "float", "bool", "complex", "abs", "sum")
PLAIN = (bool, int, float, str, bytes, list, tuple, dict, set, frozenset, type(None))
RESULTS: dict[str, set[tuple[int, str]]] = defaultdict(set)  # path → (number of a condition, result)
_TYPES: dict[str, Any] = {}  # torch's, where it is imported


@dataclass(frozen=True)
class Condition:
    """A condition in a watched line. Its number is its place in the list of ``compile_watched``.

    results: what must be recorded: 'true' and 'false', or '0', '1', … for the arguments of a choice; (): it cannot be watched. refuses: first line,
    column, last line and column of the ``raise`` that is all that this condition decides; None: it decides something else. maybe: it need not be a
    condition, so nothing recorded is no fault. branches: the first and last line of the statements between which it decides; (0, 0): none.
    """

    line: int
    last_line: int
    source: str
    results: tuple[str, ...] = ("true", "false")
    refuses: tuple[int, int, int, int] | None = None
    maybe: bool = False
    branches: tuple[int, int] = (0, 0)


def compile_watched(
    text: bytes | str, path: str, lines: Collection[int], filename: str
) -> tuple[CodeType, list[Condition]]:
    """Return the code of a module with calls around the conditions in ``lines``, and these conditions. Raises: SyntaxError, ValueError."""
    tree = ast.parse(text)
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    watcher = _Watcher(path, set(lines), whole)
    tree = ast.fix_missing_locations(watcher.visit(tree))
    return compile(tree, filename, "exec", dont_inherit=True), watcher.found


class _Watcher(ast.NodeTransformer):
    def __init__(self, path: str, lines: set[int], text: str) -> None:
        self.path, self.lines, self.text = path, lines, text
        self.found: list[Condition] = []
        self.refuses: tuple[int, int, int, int] | None = None
        self.branches = (0, 0)

    # -- marks ---------------------------------------------------------------------------------------------------
    def _add(self, node: Any, results: tuple[str, ...] = ("true", "false"), maybe: bool = False) -> int | None:
        """Return the number of a new condition; None: none of its lines is watched."""
        last = node.end_lineno or node.lineno
        if not self.lines & set(range(node.lineno, last + 1)):
            return None
        source = " ".join((ast.get_source_segment(self.text, node) or "").split())
        self.found.append(Condition(node.lineno, last, source[:120], results, self.refuses, maybe, self.branches))
        return len(self.found) - 1

    def _mark(self, node: ast.expr, kind: str = "truth") -> ast.expr:
        number = self._add(node, maybe=kind == "bool")
        if number is None:
            return node
        values: list[ast.expr] = [ast.Constant(self.path), ast.Constant(number), ast.Constant(kind), node]
        return self._call(WATCH, values, node)

    def _call(self, name: str, values: list[ast.expr], node: ast.expr) -> ast.expr:
        made = ast.Call(ast.Name(name, ast.Load()), values, [])
        for part in (made, made.func, *values[:3]):
            if not hasattr(part, "lineno"):
                ast.copy_location(part, node)
        return made

    def _truth(self, node: ast.expr) -> ast.expr:
        """Mark an expression whose truth decides something."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._truth(value) for value in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._truth(node.operand)
            return node
        if isinstance(node, ast.Compare):
            return self.visit_Compare(node)
        return node if isinstance(node, ast.Constant) else self._mark(self._visit_below(node))

    def _visit_below(self, node: ast.expr) -> ast.expr:
        """Visit what is below a test: its conditions decide more than whether the test's ``raise`` is executed."""
        refuses, self.refuses = self.refuses, None
        found: ast.expr = self.visit(node)
        self.refuses = refuses
        return found

    def _bool(self, node: ast.expr) -> ast.expr:
        """Mark an expression that is a condition only if its value is a bool."""
        node = self.visit(node)
        named = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.NamedExpr)
        watched = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == WATCH
        return self._mark(node, "bool") if named and not watched else node

    # -- conditions ----------------------------------------------------------------------------------------------
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        ends = [node.left, *node.comparators]
        splits = all(map(_is_plain, ends[1:-1]))
        if not splits:
            self._add(node, results=())  # a link after the first may never be computed
        ends = list(map(self._visit_below, ends))
        if len(ends) == 2 or not splits:
            node.left, *node.comparators = ends
            return self._mark(node)
        links: list[ast.expr] = []
        for left, op, right in zip(ends, node.ops, ends[1:]):
            link = ast.copy_location(ast.Compare(left, [op], [right]), left)
            link.end_lineno, link.end_col_offset = right.end_lineno, right.end_col_offset
            links.append(self._mark(link))
        return ast.copy_location(ast.BoolOp(ast.And(), links), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """As a value: the truth of the last operand decides nothing."""
        node.values = [*map(self._truth, node.values[:-1]), self.visit(node.values[-1])]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        node.operand = self._truth(node.operand) if isinstance(node.op, ast.Not) else self._bool(node.operand)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        (first, *more) = node.body
        if isinstance(first, ast.Raise) and not more and not node.orelse:
            last = first.end_lineno or first.lineno
            self.refuses = first.lineno, first.col_offset, last, first.end_col_offset or 0
        self._mark_test(node)
        self.refuses = None
        node.body = [self.visit(part) for part in node.body]
        node.orelse = [self.visit(part) for part in node.orelse]
        return node

    def _mark_test(self, node: ast.If | ast.While) -> None:
        self.branches = (node.body[0].lineno, node.end_lineno or node.lineno)
        node.test = self._truth(node.test)
        self.branches = (0, 0)

    def visit_While(self, node: ast.While) -> ast.stmt:
        self._mark_test(node)
        node.body = [self.visit(part) for part in node.body]
        node.orelse = [self.visit(part) for part in node.orelse]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        node.test = self._truth(node.test)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter, node.ifs = self.visit(node.iter), list(map(self._truth, node.ifs))
        return node

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        """A pattern has no value to record. If each pattern is a value and the last one a wildcard, the executed branches say enough."""
        *first, last = node.cases
        simple = all(isinstance(case.pattern, ast.MatchValue | ast.MatchSingleton) for case in first)
        wild = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        if not (simple and wild) or any(isinstance(case.body[0], ast.Pass) for case in node.cases):
            self._add(node, results=())
        node.subject = self.visit(node.subject)
        for case in node.cases:
            case.guard = self._truth(case.guard) if case.guard else None
            case.body = [self.visit(part) for part in case.body]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        node.test = self._visit_below_truth(node.test)
        return node

    def _visit_below_truth(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.BoolOp):
            node.values = list(map(self._visit_below_truth, node.values))
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._visit_below_truth(node.operand)
            return node
        if isinstance(node, ast.Compare):
            node.left, node.comparators = self.visit(node.left), list(map(self.visit, node.comparators))
            return node
        found: ast.expr = self.visit(node)
        return found

    # -- bools that are used as numbers ---------------------------------------------------------------------------
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        node.left, node.right = self._bool(node.left), self._bool(node.right)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        node.value = self._bool(node.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node.value = self.visit(node.value)
        node.slice = self._bool(node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        listed = node.args[0].elts if len(node.args) == 1 and isinstance(node.args[0], ast.List | ast.Tuple) else None
        values = listed or node.args
        starred = any(isinstance(value, ast.Starred) for value in values)
        if name in CHOICES and len(values) > 1 and not node.keywords and not starred:
            number = self._add(node, tuple(map(str, range(len(values)))), maybe=True)
            if number is not None:
                head: list[ast.expr] = [ast.Constant(self.path), ast.Constant(number), node.func]
                return self._call(CHOOSE, [*head, *map(self.visit, values)], node)
        if name in NUMBERS:
            node.args = list(map(self._bool, node.args))
            node.keywords = list(map(self.visit, node.keywords))
            return node
        self.generic_visit(node)
        return node

    # -- what is never computed as an expression ------------------------------------------------------------------
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]


def _is_plain(node: ast.expr) -> bool:
    """True for an expression that may be computed twice."""
    if isinstance(node, ast.Call):
        return (
            isinstance(node.func, ast.Name)
            and node.func.id in ("len", "abs")
            and not node.keywords
            and all(map(_is_plain, node.args))
        )
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    if isinstance(node, ast.Subscript):
        return _is_plain(node.value) and _is_plain(node.slice)
    if isinstance(node, ast.UnaryOp):
        return _is_plain(node.operand)
    return isinstance(node, ast.Name | ast.Constant) or (isinstance(node, ast.Attribute) and _is_plain(node.value))


# -- in the process of the watched code ------------------------------------------------------------------------------
def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never


def watch(path: str, number: int, kind: str, value: Any) -> Any:
    """Record the result of a condition and return its value. Code that torch.compile traces is recorded by ``note_traced_call``."""
    if not is_compiling():
        note_value(path, number, kind, value)
    return value


def watch_choice(path: str, number: int, choose: Any, *values: Any) -> Any:
    """Call ``min`` or ``max``, and record which of several numbers it returned."""
    if not is_compiling():
        note_choice(path, number, choose, values)
    return choose(*values)


def note_value(path: str, number: int, kind: str, value: Any) -> None:
    if kind == "bool":
        if type(value) is bool:
            RESULTS[path].add((number, "true" if value else "false"))
        return
    try:
        found = _find_results(value)
    except Exception:  # such as an array without one truth value: the condition itself says so
        found = {"data"}
    RESULTS[path].update((number, result) for result in found)


def _find_results(value: Any) -> set[str]:
    if isinstance(value, PLAIN):
        return {"true" if value else "false"}
    if "Tensor" in _TYPES and isinstance(value, _TYPES["Tensor"]):
        if type(value) not in (_TYPES["Tensor"], _TYPES["Parameter"]):
            return {"data"}
        if value.is_cuda and _TYPES["is_capturing"]():
            return {"data"}
        value = value.detach() != 0
        sides = {"true": bool(value.any()), "false": not bool(value.all())}
        return {side for side, was in sides.items() if was}
    if hasattr(value, "any") and hasattr(value, "all"):  # numpy's
        sides = {"true": bool(value.any()), "false": not bool(value.all())}
        return {side for side, was in sides.items() if was}
    return {"true" if value else "false"}


def note_choice(path: str, number: int, choose: Any, values: tuple[Any, ...]) -> None:
    if choose not in (min, max) or any(type(value) not in (int, float, bool) for value in values):
        return
    best = choose(values)
    chosen = [place for place, value in enumerate(values) if value == best]
    RESULTS[path].add((number, str(chosen[0]) if len(chosen) == 1 else "several"))


def note_traced_call(code: CodeType, named: Mapping[str, Any]) -> None:
    """Record the result of a condition in code that torch.compile traces. ``named``: its variables of the function that it begins to trace."""
    if code is watch.__code__:
        path, number, kind = (named[name].as_python_constant() for name in ("path", "number", "kind"))
        if named["value"].is_python_constant():
            note_value(path, number, kind, named["value"].as_python_constant())
        elif kind != "bool":
            RESULTS[path].add((number, "data"))
    elif code is watch_choice.__code__:
        values = named["values"]
        if values.is_python_constant() and named["choose"].is_python_constant():
            path, number, choose = (named[name].as_python_constant() for name in ("path", "number", "choose"))
            note_choice(path, number, choose, values.as_python_constant())


def know_compiler() -> None:
    """From now on, tensors are recorded, and code that torch.compile traces is told apart. Imports torch."""
    global is_compiling
    import torch

    is_compiling = torch.compiler.is_compiling
    _TYPES["Tensor"], _TYPES["Parameter"] = torch.Tensor, torch.nn.Parameter
    _TYPES["is_capturing"] = torch.cuda.is_current_stream_capturing


def install() -> None:
    """Make the functions known to all modules."""
    for name, function in ((WATCH, watch), (CHOOSE, watch_choice)):
        setattr(builtins, name, function)
