"""Where a module can be changed, and into what: each mutant replaces one span of the source, the rest of the text stays."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What such a call is given decides no result: it makes types, or keeps what is worked out.
# In any order they mean the same.
SYMMETRIC = {"max", "min", "maximum", "minimum", "array_equal", "isclose", "gcd", "commonpath"}
UNJUDGED = {"TypeVar", "NewType", "ParamSpec", "Literal", "lru_cache", "cast", "Field"}


@dataclass(frozen=True)
class Mutant:
    path: str  # of the module, from the root
    line: int
    inside: str  # 'Stream.piece_at'; empty: the module itself
    kind: str
    span: tuple[int, int]  # characters of the source
    before: str
    after: str

    @property
    def change(self) -> str:
        short = lambda text: " ".join(text.split())[:90]
        return f"{short(self.before)} → {short(self.after)}"

    def applied(self, source: str) -> str:
        return source[: self.span[0]] + self.after + source[self.span[1] :]


def equivalents(path: Path = EQUIVALENT) -> set[tuple[str, str, str]]:
    """(file, inside, change) of the mutants that change nothing that can be seen."""
    return {(row["file"], row["inside"], row["change"]) for row in yaml.safe_load(path.read_text()) or () if row["why"]}


def mutants(path: str, source: str) -> list[Mutant]:
    """All of one module, in the order of the text; those that do not compile left out."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:  # ast counts bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node, inside, kind, after in _changes(ast.parse(source), ""):
        span = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
        mutant = Mutant(path, node.lineno, inside, kind, span, source[slice(*span)], after)
        if mutant.before != after and _compiles(mutant.applied(source)):
            found.append(mutant)
    return sorted(found, key=lambda m: (m.span, m.kind, m.after))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _changes(node: ast.AST, inside: str) -> Iterator[tuple[Any, str, str, str]]:
    """(node, where, kind of change, text in its place) of a node and of all in it that decides something."""
    if isinstance(
        node, ast.JoinedStr | ast.Raise
    ):  # words; that something is raised at all, its statement's mutant shows
        return
    if isinstance(node, ast.Call) and _name(node.func) in UNJUDGED:
        return
    if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
        return
    yield from ((node, inside, kind, after) for kind, after in _of_one(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = f"{inside}.{node.name}".lstrip(".")
        given = getattr(node, "args", None)
        children = [*(given.defaults + [d for d in given.kw_defaults if d] if given else ()), *node.body]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    elif isinstance(node, ast.Subscript) and _name(node.value) in UNJUDGED:
        children = []
    elif isinstance(node, ast.Assert):
        children = [node.test]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        if isinstance(child, ast.stmt) and not isinstance(child, ast.Expr):
            yield from ((child, inside, kind, after) for kind, after in _dropped(child))
        elif isinstance(child, ast.Expr):
            if isinstance(child.value, ast.Constant):  # a docstring
                continue
            yield child, inside, "dropped statement", "pass"
        yield from _changes(child, inside)


def _dropped(node: ast.stmt) -> Iterator[tuple[str, str]]:
    stored = isinstance(node, ast.Assign) and not any(isinstance(t, ast.Name | ast.Tuple) for t in node.targets)
    if stored or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
        yield "dropped statement", "pass"
    elif isinstance(node, ast.Continue | ast.Break):
        yield "loop", "break" if isinstance(node, ast.Continue) else "continue"


def _of_one(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What may stand in place of this one node, with the name of the operator."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", _text(node, ops=[COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "comparison", _text(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_type(node):
        yield "arithmetic", _text(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "boolean", _text(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield "boolean", f"({ast.unparse(rest[0])})" if len(rest) == 1 else _text(node, values=rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "boolean" if isinstance(node.op, ast.Not) else "arithmetic", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield "boolean", _text(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _constants(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int | float):
        yield "constant", str(value + 1)
        yield "constant", f"({value - 1})" if value < 1 else str(value - 1)
    elif isinstance(value, str) and len(value) <= 40 and " " not in value.strip():  # longer ones are words for people
        yield "constant", repr(value + "?")


def _calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    if (name := _name(node.func)) in FUNCTIONS and isinstance(node.func, ast.Name):
        yield "function", _text(node, func=ast.Name(FUNCTIONS[name]))
    plain = [a for a in node.args if not isinstance(a, ast.Starred)]
    if len(plain) == len(node.args) >= 2 and name not in SYMMETRIC:
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield "swapped arguments", _text(node, args=[second, first, *rest])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg:
            yield "dropped argument", _text(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def _text(node: ast.AST, **changed: Any) -> str:
    """The node with some of its parts replaced, as an expression in brackets."""
    fields = {name: getattr(node, name) for name in node._fields}
    text = ast.unparse(ast.fix_missing_locations(type(node)(**(fields | changed))))
    return text if isinstance(node, ast.Call) else f"({text})"


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_type(node: ast.BinOp) -> bool:
    """Is it a union of types, as in ``int | None``?"""
    sides = (node.left, node.right)
    return isinstance(node.op, ast.BitOr) and any(
        isinstance(s, ast.Constant) and s.value is None or _name(s) in {"int", "str", "bytes", "float", "dict", "list"}
        for s in sides
    )
