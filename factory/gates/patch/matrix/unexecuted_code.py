"""Finds the parts of a patch that no run executed, instruction by instruction, and its conditions that had one result in all runs.

The judge compiles the changed file but never runs it. It looks up each instruction of the changed lines in the record of the runs (``ExecutedCode``).
Some code needs no execution: a ``raise`` and the message of an ``assert`` that only put words together, imports for type checkers, and the copies of
a ``finally`` body that the compiler makes.

    x = a if fast else b        # 'b' is reported if ``fast`` was true in every run
    x *= width >= 100           # the comparison is reported unless it was true in a run, and false in another

Lines that the patch removes are judged in the same way, by the runs of the baseline: what no run of the old code executed can be removed unseen. A
removed ``assert`` or ``raise`` is reported, unless the new code refuses the same condition.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from factory.gates.patch.execution_recorder import ExecutedCode, iterate_code_objects, make_code_object_name
from factory.gates.patch.native_rules import NATIVE_SUFFIXES
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.watch_conditions import Condition, compile_watched
from factory.gates.stage_interface import PatchCase
from kernels.contract.message import Message

# Instructions that the compiler adds and that stand for no part of the source.
SILENT = {
    "RESUME", "CACHE", "NOP", "COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR", "EXTENDED_ARG", "POP_TOP", "PRECALL", "PUSH_NULL",
    "PUSH_EXC_INFO", "WITH_EXCEPT_START", "RERAISE", "POP_EXCEPT", "COPY", "SWAP", "LOAD_ASSERTION_ERROR", "RAISE_VARARGS", "KW_NAMES",
    "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "END_FOR", "END_SEND", "CLEANUP_THROW",
    "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE",
}  # fmt: skip
Span = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class UnexecutedPart:
    """A part of one changed line that no run executed, or a condition without one of its results. ``line`` counts from 1.

    result: the result that the condition never had; '': the part was not executed; 'unwatched': the condition cannot be watched. removed: ``line`` is
    a line of the old file, which the patch removes or changes.
    """

    path: str
    line: int
    source: str
    result: str = ""
    removed: bool = False

    @property
    def required_device(self) -> str:
        """The only device that can execute the part; '': any device. Triton kernels are in files named ``triton.py``, CUDA C++ in .cu and .cuh."""
        return "cuda" if self.path.endswith(("triton.py", ".cu", ".cuh")) else ""

    @property
    def message(self) -> Message:
        about = {"path": self.path, "line": self.line, "source": self.source}
        found = Message("patch.part", "{path}:{line}: {source}", **about)
        if self.result == "unwatched":
            found = Message(
                "patch.condition_unwatched",
                "{path}:{line}: the results of {source!r} cannot be recorded. Write single comparisons, in place of a match statement or a chain "
                "around a call.",
                **about,
            )
        elif self.result in ("true", "false"):
            found = Message(
                "patch.condition_one_sided",
                "{path}:{line}: {source!r} was never {result}",
                **about, result=self.result,
            )  # fmt: skip
        elif self.result:
            found = Message(
                "patch.choice_one_sided",
                "{path}:{line}: {source!r} never returned its argument {number} alone",
                **about, number=int(self.result) + 1,
            )  # fmt: skip
        if self.removed:
            return Message("patch.removed_part", "in the old file, which the patch changes: {part}", part=found)
        return found

    def __str__(self) -> str:
        return self.message


def find_unexecuted_parts(path: str, base: str, text: str, executed: ExecutedCode) -> list[UnexecutedPart]:
    """Return the changed parts of a Python file that were not executed, at most one per line, in order of lines, and the conditions without one of
    their results. Raises: SyntaxError."""
    tree = ast.parse(text)
    return _find_parts(path, text, tree, find_changed_lines(base, text), set(find_exempt_spans(tree)), executed)


def find_unexecuted_removals(path: str, base: str, text: str, executed: ExecutedCode) -> list[UnexecutedPart]:
    """Return the parts of the old file ``base`` that are removed or changed in ``text``, and that the runs of the old code did not execute.

    ``text`` is '' for a removed file. Raises: SyntaxError.
    """
    tree, lines = ast.parse(base), find_changed_lines(text, base)
    kept = Counter(key for key, _ in _find_refusals(ast.parse(text)))
    exempt, gone = set(find_exempt_spans(tree)), []
    for key, node in _find_refusals(tree):
        kept[key] -= 1
        if kept[key] < 0:
            inside = _span(node)
            exempt = {span for span in exempt if not (inside[0] <= span[0] and span[1] <= inside[1])}
            if isinstance(node, ast.Assert) and node.lineno in lines:
                gone.append(UnexecutedPart(path, node.lineno, base.splitlines()[node.lineno - 1].strip()[:120]))
    said = {part.line for part in gone}
    found = _find_parts(path, base, tree, lines, exempt, executed)
    return [replace(part, removed=True) for part in [*gone, *(part for part in found if part.line not in said)]]


def _find_refusals(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each ``assert`` and ``raise`` with the condition that it refuses, as text."""
    guarded: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            for branch, body in (("if", node.body), ("else", node.orelse)):
                for part in body:
                    if isinstance(part, ast.Raise):
                        guarded.add(part)
                        yield f"{branch} {ast.dump(node.test)}", part
        elif isinstance(node, ast.Assert):
            yield f"assert {ast.dump(node.test)}", node
        elif isinstance(node, ast.Raise) and node not in guarded:
            named = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield f"raise {ast.dump(named) if named else ''}", node


def _find_parts(
    path: str, text: str, tree: ast.Module, new: set[int], exempt: Collection[Span], executed: ExecutedCode
) -> list[UnexecutedPart]:
    lines = text.splitlines()
    found: dict[int, UnexecutedPart] = {}
    tests = {_span(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)}
    traced = {((a, b), (c, d)) for a, b, c, d in executed.traced.get(path, ())}
    code_of_file, conditions = compile_watched(text, path, new, path)
    new = set(new)
    for first, last in executed.launched.get(path, ()):
        new -= set(range(first, last + 1))
    ran = executed.lines.get(path, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Break | ast.Continue) and node.lineno in new - ran:
            found[node.lineno] = UnexecutedPart(path, node.lineno, lines[node.lineno - 1].strip()[:120])
    for code in iterate_code_objects(code_of_file):
        own = make_code_object_name(code)
        noted = {at for name, at in executed.instructions.get(path, ()) if name == own}
        instructions = list(dis.get_instructions(code))
        # The compiler makes several copies of some code, such as a loop's test or a finally body.
        at_places = {i.positions for i in instructions if i.offset in noted}
        for i in instructions:
            where = i.positions
            if i.offset in noted or i.opname in SILENT or where in at_places:
                continue
            if where is None or where.lineno is None or where.lineno not in new or where.lineno in found:
                continue
            begin = (where.lineno, where.col_offset or 0)
            end = (where.end_lineno or where.lineno, where.end_col_offset or 0)
            if (begin, end) in traced:
                continue
            if i.opname in ("LOAD_CONST", "RETURN_VALUE", "RETURN_CONST") and begin[1] == end[1]:
                continue  # the None that a function without return returns
            if any(first <= begin and end <= last for first, last in exempt):
                continue
            if i.opname == "CALL" and (begin, end) in tests:
                continue  # the call of AssertionError; a call in the test itself has more instructions
            line = lines[begin[0] - 1]
            inside = line.encode()[begin[1] : end[1] if end[0] == begin[0] else None].decode(errors="replace")
            found[where.lineno] = UnexecutedPart(path, where.lineno, inside.strip()[:120] or line.strip()[:120])
    results = executed.conditions.get(path, set())
    one_sided = [
        UnexecutedPart(path, condition.line, condition.source, result)
        for number, condition in enumerate(conditions)
        if not any(condition.line <= line <= condition.last_line for line in found)  # reported as not executed
        if not any(condition.branches[0] <= line <= condition.branches[1] for line in found)
        and new & set(range(condition.line, condition.last_line + 1))
        for result in _find_missing_results(condition, {result for at, result in results if at == number}, exempt)
    ]
    return sorted([*found.values(), *one_sided], key=lambda part: part.line)


def _find_missing_results(condition: Condition, recorded: set[str], exempt: Collection[Span]) -> list[str]:
    """Return the results that a condition never had, or ['unwatched']."""
    if condition.refuses is not None:
        a, b, c, d = condition.refuses
        if any(first <= (a, b) and (c, d) <= last for first, last in exempt):
            return []  # it only decides whether the run ends
    if not condition.results:
        return ["unwatched"]
    if recorded == {"data"} or (condition.maybe and not recorded):
        return []
    return [result for result in condition.results if result not in recorded]


def find_watched_lines(case: PatchCase[PatchPolicy], old: bool = False) -> dict[str, list[int]]:
    """Return path → numbers of the changed lines of the patch's Python files. ``old``: of the lines of the old files that the patch removes or
    changes."""
    found = {}
    for path, base, text in iterate_python_changes(case):
        lines = find_changed_lines(text, base) if old else find_changed_lines(base, text)
        if lines:
            found[path] = sorted(lines)
    return found


def iterate_python_changes(case: PatchCase[PatchPolicy]) -> Iterator[tuple[str, str, str]]:
    """Yield path, old text and new text of each changed Python file. A text is '' if there is no file."""
    for change in case.changes:
        if change.path.endswith(".py"):
            texts = case.read_base_file(change.path), change.content
            base, text = ((content or b"").decode("utf-8", "replace") for content in texts)
            yield change.path, base, text


def find_unexecuted_native_files(
    paths: Iterable[str], checked_ops: Collection[str], executed: ExecutedCode
) -> list[UnexecutedPart]:
    """Return the changed C++ files that no run executed, each as a whole, because nothing records the lines of C++.

    A file of ``kernels/<op>/`` counts as executed if the op checks called the op, and a run loaded a library of its folder. A header that all ops
    share (``kernels/native/``) counts as executed if a run loaded any library.
    """
    found = []
    for path in paths:
        if path.endswith(NATIVE_SUFFIXES):
            folder = path.split("/")[1]
            own = {name for name in executed.native if name == folder or name.startswith(f"{folder}.")}
            if not (executed.native if folder == "native" else own and folder in checked_ops):
                found.append(UnexecutedPart(path, 1, "the whole file"))
    return found


def find_changed_lines(base: str, text: str) -> set[int]:
    """Return the numbers of the lines of ``text``, from 1, that ``base`` does not have at that place."""
    old, new = base.splitlines(), text.splitlines()
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    same = {number + 1 for block in blocks for number in range(block.b, block.b + block.size)}
    return set(range(1, len(new) + 1)) - same


def find_exempt_spans(tree: ast.Module) -> Iterator[Span]:
    """Yield the spans of code that needs no execution: ``raise`` and ``assert`` messages that only put words together, imports for type checkers."""
    classes = find_trusted_exception_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and _raises_words(node.exc, classes) and _only_words(node.cause):
            yield _span(node)
        elif isinstance(node, ast.Assert) and node.msg is not None and _only_words(node.msg):
            yield _span(node.msg)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in classes and _named(node.test, "TYPE_CHECKING"):
            yield from (_span(part) for part in node.body if isinstance(part, ast.Import | ast.ImportFrom))


def find_trusted_exception_names(tree: ast.Module) -> set[str]:
    """Return the names of builtin exceptions, of exceptions from approved modules, and from ``typing``, except names that the file binds again."""
    builtin = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    approved = ("typing", "trainer.contract.", "kernels.contract.")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    trusted = [
        n for n in imports if isinstance(n, ast.ImportFrom) and n in tree.body and (n.module or "").startswith(approved)
    ]
    named = lambda nodes: {alias.asname or alias.name for node in nodes for alias in node.names}
    bound = named(node for node in imports if node not in trusted)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
    known = {
        alias.asname or alias.name
        for node in trusted
        for alias in node.names
        if node.module == "typing" or _is_exception(node.module or "", alias.name)
    }
    return (builtin | known) - bound


def _is_exception(module: str, name: str) -> bool:
    """True if this name of an approved module is an exception. Any other callable could do more than put words together."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, BaseException)


def _named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _raises_words(node: ast.expr | None, classes: set[str]) -> bool:
    """True for an exception's name, and for a call of an exception whose arguments only put words together: a code, a template, named data."""
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in classes
        data = all(word.arg is not None and _only_words(word.value) for word in node.keywords)
        return named and data and all(map(_only_words, node.args))
    return _only_words(node)


def _only_words(node: ast.expr | None) -> bool:
    """True for names, attributes, constants, and f-strings of these; also for None."""
    if isinstance(node, ast.JoinedStr):
        return all(map(_only_words, node.values))
    if isinstance(node, ast.FormattedValue):
        return _only_words(node.value)
    if isinstance(node, ast.Attribute):
        return _only_words(node.value)
    return node is None or isinstance(node, ast.Constant | ast.Name)


def _span(node: ast.stmt | ast.expr) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
