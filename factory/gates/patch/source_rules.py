"""Checks a patch's source for code that a patch may not contain. The checks find honest mistakes and advise how to write the code instead.

Python is parsed, never imported. A changed file may import the modules that its base imported and those that model code needs. It may not newly use
clocks, frames, files, processes or the internals of other modules. Code can be written to pass any such check. So the sandbox protects the machine,
and the later stages trust no report of the code. In YAML, anchors, aliases, tags and duplicate keys are refused. C++ has rules of its own
(``native_rules``).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections import Counter
from collections.abc import Iterable
from types import ModuleType

import yaml

from factory.gates.patch.native_rules import NATIVE_SUFFIXES, find_native_problems
from factory.gates.patch.source_names import (
    ALLOWED_IMPORTS,
    ALLOWED_SUBMODULES,
    ATTRIBUTE_FUNCTIONS,
    BROAD_EXCEPTIONS,
    FACTS,
    FORBIDDEN_ATTRIBUTES,
    FORBIDDEN_MODULES,
    FORBIDDEN_PARTS,
    FORBIDDEN_TORCH_PARTS,
    NAMES,
    REDEFINABLE_BUILTINS,
    STANDARD_MODULES,
)
from factory.git.scope import FileChange
from kernels.contract.message import Message

IMPORT_ADVICE = Message(
    "patch.advice_imports",
    "Import only these modules: {modules}",
    modules=sorted(ALLOWED_IMPORTS - {"__future__"}),
)
# Code of a finding → the advice how to write the code instead.
ADVICE = {
    "patch.imports": IMPORT_ADVICE,
    "patch.relative_import": IMPORT_ADVICE,
    "patch.imports_all": IMPORT_ADVICE,
    "patch.borrows": Message("patch.advice_borrows", "Import each module by its own name, not through another module"),
    "patch.catches_all": Message(
        "patch.advice_catches",
        "Catch only the expected exceptions, or raise the exception again at the end of the handler. Otherwise a failing kernel could fall back to "
        "the reference without a trace",
    ),
    "patch.changes": Message("patch.advice_changes", "Pass the value as an argument to the code that needs it"),
    "patch.hands_on": Message(
        "patch.advice_hands_on", "Use only a function or class of the module, as in torch.x, and not the module itself"
    ),
}
# Code of a finding, and the beginning of the name that the code uses → the advice.
ADVICE_BY_NAME = {
    ("patch.uses", "getattr"): Message(
        "patch.advice_getattr",
        "Write the attribute's name out, as in getattr(x, 'name'), or read the value from a dict",
    ),
    ("patch.uses", "setattr"): Message(
        "patch.advice_setattr",
        "Write the attribute's name out, as in setattr(x, 'name', value), and set it only on an object of the same file",
    ),
    ("patch.uses", "open"): Message(
        "patch.advice_open", "Read and write files only through the functions of trainer/contract"
    ),
    ("patch.uses", "contextlib.suppress"): Message(
        "patch.advice_suppress", "Catch the expected exceptions by name with 'except', and handle them"
    ),
    ("patch.uses", "torch.manual_seed"): Message(
        "patch.advice_seed", "Draw random numbers from a torch.Generator of your own: the recipe sets the global seeds"
    ),
    ("patch.reaches_for", "is_compiling"): Message(
        "patch.advice_compiling", "Compute the same result in compiled code and in eager code"
    ),
    ("patch.reaches_for", "data_ptr"): Message(
        "patch.advice_data_ptr", "Do not cache results by memory address: another tensor may get the same address later"
    ),
}


def find_source_problems(change: FileChange, base: bytes | None) -> list[Message]:
    """Return a message for each problem of one changed file. ``base``: the file before the patch; None: the file is new."""
    if change.content is None:
        return []
    text, before = (content.decode("utf-8", "replace") for content in (change.content, base or b""))
    if change.path.endswith(".py"):
        found = _python(text, before, in_kernels=change.path.startswith("kernels/"))
    elif change.path.endswith(NATIVE_SUFFIXES):
        found = find_native_problems(text, before)
    else:
        found = _yaml(text)
    return [Message("patch.source", "{path}: {problem}", path=change.path, problem=problem) for problem in found]


def _python(text: str, base: str, in_kernels: bool) -> Iterable[Message]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield Message("patch.not_python", "the file is not valid Python: {error}", error=error)
        return
    before: Counter[str] = Counter()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a base that is not Python excuses nothing
        before = Counter(what for _, what in _reaches(ast.parse(base), in_kernels))
    for line, what in _reaches(tree, in_kernels):
        if before[what] > 0:
            before[what] -= 1
        else:
            found = Message("patch.line", "line {line}: {problem}, which a patch may not do", line=line, problem=what)
            advice = _find_advice(what)
            yield Message("patch.advised", "{found}. {advice}", found=found, advice=advice) if advice else found


def _find_advice(found: Message) -> Message | None:
    """Return how to write the code instead, or None if the rules have no advice."""
    name = str(found.data.get("name", ""))
    by_name = (how for (code, begin), how in ADVICE_BY_NAME.items() if code == found.code and name.startswith(begin))
    return ADVICE.get(found.code) or next(by_name, None)


def _uses(name: str) -> Message:
    return Message("patch.uses", "the code uses {name}", name=name)


def _imports(name: str) -> Message:
    return Message("patch.imports", "the code imports {name}", name=name)


def _borrows(name: str) -> Message:
    return Message("patch.borrows", "the code reaches another module through {name}", name=name)


def _reaches_for(name: str) -> Message:
    return Message("patch.reaches_for", "the code uses .{name}", name=name)


def _changes(name: str) -> Message:
    return Message("patch.changes", "the code changes {name}, which belongs to another module", name=name)


def _reaches(tree: ast.Module, in_kernels: bool) -> Iterable[tuple[int, Message]]:
    """Yield (line, problem) for all code that a patch may not add. The same problem has the same message at every line of a file."""
    modules = _module_names(tree)
    nodes = [*ast.walk(tree), *_quoted(tree)]
    own = _own_names(nodes)
    spelt, named_on = _spelt(nodes), _named_on(nodes)
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((line, what) for what in _import(alias.name))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield (
                    line,
                    Message(
                        "patch.relative_import",
                        "the code imports with 'from {name}' (write an absolute import: 'from trainer.…')",
                        name=f"{'.' * node.level}{node.module or ''}",
                    ),
                )
            else:
                for alias in node.names:
                    yield from ((line, what) for what in _import(f"{node.module}.{alias.name}"))
            if any(alias.name == "*" for alias in node.names):
                yield line, Message("patch.imports_all", "the code imports all names of a module with '*'")
        elif isinstance(node, ast.Name):
            if node.id in NAMES and node not in spelt and node.id not in own:
                yield line, _uses(node.id)
            elif isinstance(node.ctx, ast.Load) and node not in named_on and _is_module(modules.get(node.id, "")):
                name = modules[node.id]
                yield line, Message("patch.hands_on", "the code uses the module {name} as a value", name=name)
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            whole = _whole(dotted, modules)
            if node.attr in FORBIDDEN_ATTRIBUTES and node not in spelt or node.attr.lstrip("_") in FORBIDDEN_MODULES:
                yield line, _reaches_for(node.attr)
            elif whole and _is_part(whole):
                yield line, _uses(whole)
            elif whole and _is_borrowed(whole):
                yield line, _borrows(whole)
            if isinstance(node.ctx, (ast.Store, ast.Del)) and whole:
                yield line, _changes(dotted)
        elif isinstance(node, ast.Subscript):
            if isinstance(node.ctx, (ast.Store, ast.Del)) and _whole(_dotted(node.value), modules):
                yield line, _changes(_dotted(node.value))
        elif isinstance(node, ast.MatchClass):
            for name in node.kwd_attrs:
                if name in FORBIDDEN_ATTRIBUTES or name.lstrip("_") in FORBIDDEN_MODULES:
                    yield line, _reaches_for(name)
        elif isinstance(node, ast.ExceptHandler):
            if _catches_all(node.type, in_kernels) and not isinstance(node.body[-1], ast.Raise):
                yield line, Message("patch.catches_all", "the code catches every exception")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in FORBIDDEN_ATTRIBUTES:
            yield (
                line,
                Message("patch.defines", "the code defines a function with the reserved name {name}", name=node.name),
            )
        elif isinstance(node, ast.ClassDef) and any(_is_tensor(base, modules) for base in node.bases):
            yield line, Message("patch.own_tensor", "the code defines its own tensor class")
        elif isinstance(node, ast.Call):
            if _dotted(node.func) == "type" and len(node.args) > 1:
                yield line, Message("patch.class_by_call", "the code makes a class by calling type()")
            yield from ((line, what) for what in _by_name(node, modules))


def _quoted(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of annotations that are written as text, because some libraries evaluate them."""
    found: list[ast.AST] = []
    pending = [
        annotation
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
    ]
    while pending:
        for node in ast.walk(pending.pop()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                with contextlib.suppress(
                    SyntaxError, ValueError, RecursionError, MemoryError
                ):  # text that does not parse is not evaluated
                    inner = ast.parse(node.value.strip(), mode="eval")
                    for part in ast.walk(inner):
                        ast.copy_location(part, node)
                    found += ast.walk(inner)
                    pending.append(inner)
    return found


def _own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of ``REDEFINABLE_BUILTINS`` to which the file itself assigns a value."""
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return given & REDEFINABLE_BUILTINS


def _spelt(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Return the nodes of ``getattr`` in calls with a literal attribute name, and of ``__class__`` in ``x.__class__.__name__``."""
    calls = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    found = {call.func for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)}
    found = {func for func in found if isinstance(func, ast.Name) and func.id in ATTRIBUTE_FUNCTIONS}
    names = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "__name__"}
    return {*found, *(value for value in names if isinstance(value, ast.Attribute) and value.attr == "__class__")}


def _named_on(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Return the nodes that use a module only to name a part of it: before a dot, in "t = torch", or as the first argument of ``getattr``."""
    found: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            found.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_FUNCTIONS:
            found |= set(node.args[:1])
    return found


def _by_name(call: ast.Call, modules: dict[str, str]) -> Iterable[Message]:
    """Yield the problems of ``getattr(x, 'name')`` and similar calls. They are the problems of ``x.name``."""
    if not isinstance(call.func, ast.Name) or call.func.id not in ATTRIBUTE_FUNCTIONS or len(call.args) < 2:
        return
    of, name = call.args[0], call.args[1]
    if not isinstance(name, ast.Constant):
        return
    word = str(name.value)
    whole = _whole(_dotted(of), modules)
    if (
        word in FORBIDDEN_ATTRIBUTES
        or word.lstrip("_") in FORBIDDEN_MODULES
        or word.startswith("__")
        and word not in FACTS
    ):
        yield _reaches_for(word)
    elif whole and _is_part(f"{whole}.{word}"):
        yield _uses(f"{whole}.{word}")
    elif whole and call.func.id in ("setattr", "delattr"):
        yield _changes(f"{whole}.{word}")


def _import(name: str) -> Iterable[Message]:
    root, _, rest = name.partition(".")
    if root not in ALLOWED_IMPORTS:
        yield _imports(root)
    elif {part.lstrip("_") for part in rest.split(".")} & FORBIDDEN_MODULES or _is_borrowed(name):
        yield _borrows(name)
    elif any(_is_part(name[: -len(tail)] if tail else name) for tail in _tails(name)):
        yield _uses(name)


def _whole(dotted: str, modules: dict[str, str]) -> str:
    """Return a dotted name with its first part replaced by the module that it stands for; '' if it does not stand for a module."""
    root, dot, rest = dotted.partition(".")
    return modules[root] + dot + rest if root in modules else ""


def _is_module(name: str) -> bool:
    """True if a dotted name is that of a module, not of a function or class in a module. Only the name is looked at."""
    root, _, rest = name.partition(".")
    return root in ALLOWED_IMPORTS and (not rest or name in ALLOWED_SUBMODULES)


def _is_borrowed(name: str) -> bool:
    """True if the name leads through one module of the standard library into another, such as ``collections._sys``."""
    parts = name.split(".")
    if parts[0] not in STANDARD_MODULES:
        return False
    here: object = importlib.import_module(parts[0])
    for part in parts[1:]:
        here = getattr(here, part, None)
        if isinstance(here, ModuleType) and here.__name__.partition(".")[0].lstrip("_") != parts[0]:
            return True
    return False


def _tails(name: str) -> list[str]:
    """Return the rest after each prefix of a dotted name, longest prefix first: ``a.b`` → '', ``.b``."""
    parts = name.split(".")
    return ["".join(f".{part}" for part in parts[n:]) for n in range(len(parts), 0, -1)]


def _is_part(name: str) -> bool:
    return name in FORBIDDEN_PARTS or (
        name.startswith("torch.") and name.removeprefix("torch.") in FORBIDDEN_TORCH_PARTS
    )


def _catches_all(caught: ast.expr | None, in_kernels: bool) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    every = BROAD_EXCEPTIONS if in_kernels else BROAD_EXCEPTIONS - {"RuntimeError"}
    return any(kind is None or _dotted(kind).rpartition(".")[2] in every for kind in kinds)


def _is_tensor(base: ast.expr, modules: dict[str, str]) -> bool:
    root, dot, rest = _dotted(base).partition(".")
    return (modules.get(root, root) + dot + rest).rpartition(".")[2] in ("Tensor", "Parameter", "Buffer")


def _module_names(tree: ast.Module) -> dict[str, str]:
    """Return name in this file → the module that it stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {root: root}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):  # "t = torch" is torch by another name
        if isinstance(node, ast.Assign) and (dotted := _dotted(node.value)) and dotted.partition(".")[0] in found:
            root, dot, rest = dotted.partition(".")
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {name: found[root] + dot + rest for name in names if name not in found}
    return found


def _dotted(node: ast.expr) -> str:
    words: list[str] = []
    while isinstance(
        node, ast.Attribute
    ):  # a loop, because a patch may chain more attributes than Python's recursion limit
        words.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(words)]) if isinstance(node, ast.Name) else ""


def _yaml(text: str) -> Iterable[Message]:
    try:
        for token in yaml.scan(text):
            if isinstance(token, (yaml.AnchorToken, yaml.AliasToken, yaml.TagToken)):
                yield Message(
                    "patch.yaml_tag",
                    "line {line}: a policy may not have anchors, aliases or tags",
                    line=token.start_mark.line + 1,
                )
                return
        keys = _repeated(yaml.compose(text))
        if keys:
            yield Message("patch.key_twice", "the key {key!r} is given twice", key=keys[0])
        elif not isinstance(yaml.safe_load(text), dict):
            yield Message("patch.no_keys", "the file must consist of lines of the form 'key: value'")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield Message("patch.not_yaml", "the file is not valid YAML: {error}", error=error)


def _repeated(node: yaml.Node | None) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        return [k for k, n in Counter(keys).items() if n > 1] + [r for _, value in node.value for r in _repeated(value)]
    if isinstance(node, yaml.SequenceNode):
        return [r for value in node.value for r in _repeated(value)]
    return []
