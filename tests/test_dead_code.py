"""Every public name is used by product code, not only by tests.

A function, class or constant of a module is used when its module names it outside its own definition, when another file
imports it, or names it as an attribute of the imported module. What a package re-exports is used when its own name for it
is. A method is used when any file names such an attribute. A string that is a dotted name (``"package.module:name"``) is a
use of its last part; one that is a plain name is a use within its folder (nodes of a graph, kernels of an op).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JUDGED = ("agents", "factory", "kernels", "models", "trainer")
DOTTED = re.compile(r"\w+([.:]\w+)*")
# A decorator that hands a function to its caller: typer, pydantic, torch, SQLAlchemy.
REGISTERING = {
    "command",
    "register_command",
    "callback",
    "model_validator",
    "register_fake",
    "register_flop_formula",
    "listens_for",
}
# Methods that a library calls by name, and what of it.
CALLED_BY_LIBRARIES = {
    "forward": "torch.nn.Module, torch.autograd.Function",
    "backward": "torch.autograd.Function",
    "setup_context": "torch.autograd.Function",
    "do_GET": "http.server",
    "do_POST": "http.server",
    "log_message": "http.server",
    "readable": "io.RawIOBase",
    "process_bind_param": "sqlalchemy.TypeDecorator",
}
VISITS = "visit_"  # ast.NodeVisitor calls methods whose names begin so
# name: why it stays though nothing but tests names it
ALLOWED = {
    "install": "the execution recorder loads watch_conditions.py by its path, because torch.compile needs a module of its own",
    "know_compiler": "as install",
    "note_traced_call": "as install",
    "OP": "kernels.contract.registry imports the folder of each op by name",
    "cut_piece": "says which positions a piece of a document has; document_stream computes the same for whole arrays",
    "ignore_compile_internals": "torch.compile asks each dispatch mode for it",
    "multi_token_logits": "the logits that a server drafts with; training has only their loss, and tests compare them with transformers",
}


@dataclass
class File:
    """A module: its top-level definitions (name → node), its methods, and the names that it uses."""

    path: Path
    name: str
    top: dict[str, list[ast.stmt]] = field(default_factory=dict)
    methods: list[ast.FunctionDef] = field(default_factory=list)
    names: list[ast.Name] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)  # names, dotted or not
    imported: set[tuple[str, str]] = field(default_factory=set)  # (module, name)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def names_itself(self, name: str) -> bool:
        """True if a name is used in its own module, outside its own definition."""
        inside = lambda node: any(d.lineno <= node.lineno <= (d.end_lineno or 0) for d in self.top[name])
        return any(node.id == name and not inside(node) for node in self.names)


@cache
def files() -> tuple[File, ...]:
    found = []
    for path in sorted(path for folder in (*JUDGED, "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        file = File(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        tree = ast.parse(path.read_text())
        for node in tree.body:
            for name in defined(node):
                file.top.setdefault(name, []).append(node)
            if isinstance(node, ast.ClassDef):
                file.methods += [m for m in node.body if isinstance(m, ast.FunctionDef) and not registered(m)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                file.names.append(node)
            elif isinstance(node, ast.Attribute):
                file.attributes.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                file.imported |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                file.imported |= {tuple(alias.name.rpartition(".")[::2]) for alias in node.names}  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
                file.strings.add(node.value)
        found.append(file)
    return tuple(found)


def defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not registered(node):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def registered(node: ast.FunctionDef | ast.ClassDef) -> bool:
    words = {word for decorator in node.decorator_list for word in re.findall(r"\w+", ast.unparse(decorator))}
    return bool(words & REGISTERING)


@cache
def dead() -> list[tuple[str, str]]:
    """Public names that no production code uses, with the place of each."""
    found = []
    attributes = {name for file in files() for name in file.attributes}
    strings = {re.split("[.:]", name)[-1] for file in files() for name in file.strings if not name.isidentifier()}
    by_folder: dict[Path, set[str]] = {}
    for file in files():
        by_folder.setdefault(file.path.parent, set()).update(file.strings)
    templates = "\n".join(path.read_text() for folder in JUDGED for path in (ROOT / folder).rglob("*.jinja"))
    imported = {pair for file in files() if not file.is_package for pair in file.imported}
    for file in (file for file in files() if file.is_package):  # what it re-exports is used if its own name for it is
        used_here = {node.id for node in file.names}
        imported |= {(m, n) for m, n in file.imported if n in used_here or (file.name, n) in imported}
    as_modules: dict[tuple[str, str], set[str]] = {}  # (package, module) → attributes in the files that import it
    for file in files():
        for pair in file.imported:
            as_modules.setdefault(pair, set()).update(file.attributes)
    for file in (file for file in files() if file.path.relative_to(ROOT).parts[0] in JUDGED):
        where = file.path.relative_to(ROOT)
        if "migrations" in where.parts:  # alembic calls what they define
            continue
        module = tuple(file.name.rpartition(".")[::2])
        for name, nodes in file.top.items():
            used = file.names_itself(name) or (file.name, name) in imported or name in as_modules.get(module, ())  # type: ignore[call-overload]
            if not (used or name.startswith("_") or name in strings | by_folder[file.path.parent]):
                found.append((name, f"{where}:{nodes[0].lineno}"))
        for method in file.methods:
            used = method.name in attributes | strings | by_folder[file.path.parent] | CALLED_BY_LIBRARIES.keys()
            if not (used or method.name.startswith(("_", VISITS)) or re.search(rf"\b{method.name}\b", templates)):
                found.append((method.name, f"{where}:{method.lineno}"))
    return found


def test_nothing_public_is_used_by_tests_alone() -> None:
    found = [f"{where} {name}" for name, where in dead() if name not in ALLOWED]
    assert not found, "remove it, or say in ALLOWED why it stays:\n" + "\n".join(found)


def test_each_allowed_name_is_still_used_by_tests_alone() -> None:
    assert set(ALLOWED) <= {name for name, _ in dead()}
