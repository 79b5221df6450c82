"""Second stage of the patch gate: read the patch without running it.

Python is parsed, never imported. A changed file may import what its base already imported and what model code needs; it may
not newly reach for clocks, frames, files, processes or other modules' insides. A determined liar can hide from any
reading; the stages behind this one trust nothing that the code says. YAML is parsed with anchors refused.
"""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterable

import yaml

from factory.git.scope import Change

IMPORTS = {
    "__future__",
    "torch",
    "triton",
    "math",
    "typing",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "enum",
}
IMPORTS |= {"kernels", "trainer", "numpy", "contextlib", "operator", "abc"}
# Modules that a file must not borrow from another that imports them: "from trainer.segment import os".
BORROWED = {
    "sys",
    "os",
    "subprocess",
    "ctypes",
    "gc",
    "inspect",
    "builtins",
    "threading",
    "socket",
    "importlib",
    "pickle",
    "pathlib",
    "Path",
    "shutil",
    "tempfile",
    "io",
}
# Ways around what is read here: by an attribute's name as text, by swallowing errors, by text that is evaluated.
OTHER_PARTS = {
    "operator.attrgetter",
    "operator.methodcaller",
    "contextlib.suppress",
    "typing.get_type_hints",
    "typing.ForwardRef",
}
OTHER_PARTS |= {"numpy.load", "numpy.save", "numpy.memmap", "numpy.fromfile", "numpy.ctypeslib", "numpy.random.seed"}
# Parts of torch that load code, start processes, read clocks or change everybody's settings.
TORCH_PARTS = {
    "hub",
    "load",
    "multiprocessing",
    "utils.cpp_extension",
    "package",
    "jit",
    "classes",
    "library.Library",
    "library.impl",
    "library.define",
    "library.register_kernel",
    "profiler",
    "cuda.Event",
}
TORCH_PARTS |= {
    "ops.load_library",
    "serialization",
    "utils.benchmark",
    "manual_seed",
    "set_num_threads",
    "set_rng_state",
}
TORCH_PARTS |= {
    "set_num_interop_threads",
    "set_default_dtype",
    "seed",
    "overrides",
    "utils._python_dispatch",
    "cuda.Stream",
    "cuda.stream",
    "set_float32_matmul_precision",
    "set_default_device",
    "use_deterministic_algorithms",
    "set_flush_denormal",
    "default_generator",
    "random",
    "save",
    "from_file",
    "distributed.rpc",
    "_C",
}
NAMES = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "open",
    "breakpoint",
    "globals",
    "locals",
    "vars",
    "setattr",
    "delattr",
}
NAMES |= {"getattr", "memoryview", "id", "__builtins__", "__loader__", "__spec__"}
ATTRIBUTES = {
    "__globals__",
    "__builtins__",
    "__subclasses__",
    "__code__",
    "__closure__",
    "__dict__",
    "__bases__",
    "__mro__",
    "__class__",
}
ATTRIBUTES |= {
    "f_back",
    "f_locals",
    "f_globals",
    "gi_frame",
    "tb_frame",
    "__getattribute__",
    "__setattr__",
    "_getframe",
    "_version",
}
ATTRIBUTES |= {
    "data_ptr",
    "perf_counter",
    "monotonic",
    "process_time",
    "system",
    "popen",
    "fork",
    "_exit",
    "cr_frame",
    "ag_frame",
    "kill",
    "environ",
}
ATTRIBUTES |= {
    "__torch_function__",
    "__torch_dispatch__",
    "__reduce__",
    "__reduce_ex__",
    "is_compiling",
    "untyped_storage",
}


CATCH_ALL = {"Exception", "BaseException", "RuntimeError"}  # what torch and triton raise when a kernel fails


def problems(change: Change, base: bytes | None) -> list[str]:
    """What a reader objects to in one changed file, given what it was before (None: it is new)."""
    if change.content is None:
        return []
    text = change.content.decode("utf-8", "replace")
    if change.path.endswith(".py"):
        return [f"{change.path}: {problem}" for problem in _python(text, (base or b"").decode("utf-8", "replace"))]
    return [f"{change.path}: {problem}" for problem in _yaml(text)]


def _python(text: str, base: str) -> Iterable[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield f"is not Python: {error}"
        return
    before: Counter[str] = Counter()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a base that does not parse excuses nothing
        before = Counter(what for _, what in _reaches(ast.parse(base)))
    for line, what in _reaches(tree):
        if before[what] > 0:
            before[what] -= 1
        else:
            yield f"line {line}: {what}"


def _reaches(tree: ast.Module) -> Iterable[tuple[int, str]]:
    """(line, what) for everything a patch must not newly do. ``what`` names it the same wherever it stands."""
    modules = _module_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((line, what) for what in _import(alias.name))
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                for alias in node.names:
                    yield from ((line, what) for what in _import(f"{node.module}.{alias.name}"))
            if any(alias.name == "*" for alias in node.names):
                yield line, "imports everything of a module"
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield line, f"uses {node.id}"
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES or node.attr in BORROWED:
                yield line, f"reaches for .{node.attr}"
            dotted = _dotted(node)
            if dotted and dotted.partition(".")[0] in modules:
                whole = modules[dotted.partition(".")[0]] + dotted[len(dotted.partition(".")[0]) :]
                if _is_part(whole):
                    yield line, f"uses {whole}"
            if isinstance(node.ctx, (ast.Store, ast.Del)) and dotted and dotted.partition(".")[0] in modules:
                yield line, f"changes {dotted} of another module"
        elif isinstance(node, ast.ExceptHandler) and _catches_all(node.type):
            yield line, "catches every exception: a failing kernel could fall back to the reference unseen"
        elif isinstance(node, ast.FunctionDef) and node.name in ATTRIBUTES:
            yield line, f"defines {node.name}"
        elif isinstance(node, ast.ClassDef) and any(_is_tensor(base, modules) for base in node.bases):
            yield line, "makes a kind of tensor of its own"
        elif isinstance(node, ast.Call) and _dotted(node.func) == "type" and len(node.args) > 1:
            yield line, "makes a class by a call"
        elif isinstance(node, ast.Global):
            yield line, "keeps state in globals between calls"


def _import(name: str) -> Iterable[str]:
    root, _, rest = name.partition(".")
    if root not in IMPORTS:
        yield f"imports {root}"
    elif set(rest.split(".")) & BORROWED:
        yield f"borrows {name}"
    elif any(_is_part(name[: -len(tail)] if tail else name) for tail in _tails(name)):
        yield f"uses {name}"


def _tails(name: str) -> list[str]:
    """What follows each prefix of a dotted name, longest prefix first."""
    parts = name.split(".")
    return ["".join(f".{part}" for part in parts[n:]) for n in range(len(parts), 0, -1)]


def _is_part(name: str) -> bool:
    return name in OTHER_PARTS or (name.startswith("torch.") and name.removeprefix("torch.") in TORCH_PARTS)


def _catches_all(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or _dotted(kind).rpartition(".")[2] in CATCH_ALL for kind in kinds)


def _is_tensor(base: ast.expr, modules: dict[str, str]) -> bool:
    root, dot, rest = _dotted(base).partition(".")
    return (modules.get(root, root) + dot + rest).rpartition(".")[2] in ("Tensor", "Parameter", "Buffer")


def _module_names(tree: ast.Module) -> dict[str, str]:
    """name in this file → module it stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.partition(".")[0]: alias.name
                if alias.asname
                else alias.name.partition(".")[0]
                for alias in node.names
            }
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
    while isinstance(node, ast.Attribute):  # a patch may chain more of them than Python recurses
        words.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(words)]) if isinstance(node, ast.Name) else ""


def _yaml(text: str) -> Iterable[str]:
    try:
        for token in yaml.scan(text):
            if isinstance(token, (yaml.AnchorToken, yaml.AliasToken, yaml.TagToken)):
                yield f"line {token.start_mark.line + 1}: anchors, aliases and tags have no place in a policy"
                return
        keys = _repeated(yaml.compose(text))
        if keys:
            yield f"the key {keys[0]!r} stands twice"
        elif not isinstance(yaml.safe_load(text), dict):
            yield "expected 'key: value' lines"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield f"is not YAML: {error}"


def _repeated(node: yaml.Node | None) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        return [k for k, n in Counter(keys).items() if n > 1] + [r for _, value in node.value for r in _repeated(value)]
    if isinstance(node, yaml.SequenceNode):
        return [r for value in node.value for r in _repeated(value)]
    return []
