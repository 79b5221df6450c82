"""What a patch's source may not contain, found by reading it.

Python is parsed, never imported. A changed file may import what its base imported and what model code needs; it may not newly use clocks,
frames, files, processes or other modules' internals. Determined code can hide from any reader; the later stages trust nothing that
the code says. In YAML, anchors, aliases, tags and duplicate keys are refused.
"""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterable

import yaml

from factory.git.scope import Change


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Packages that a changed file may import.
IMPORTS = _words("""
    abc collections contextlib dataclasses enum functools __future__ itertools kernels math numpy operator torch
    trainer triton typing
""")
# Modules that a file must not take from another that imports them: "from trainer.segment import os".
BORROWED = _words("""
    builtins ctypes gc importlib inspect io os Path pathlib pickle shutil socket subprocess sys tempfile threading
""")
# Ways around what is read here: an attribute named as text, errors that are swallowed, text that is evaluated; and files.
OTHER_PARTS = _words("""
    contextlib.suppress numpy.ctypeslib numpy.fromfile numpy.load numpy.memmap numpy.random.seed numpy.save
    operator.attrgetter operator.methodcaller typing.ForwardRef typing.get_type_hints
""")
# Parts of torch that load code, start processes, read clocks or change settings of the whole process.
TORCH_PARTS = _words("""
    _C classes cuda.Event cuda.stream cuda.Stream default_generator distributed.rpc from_file hub jit library.define
    library.impl library.Library library.register_kernel load manual_seed multiprocessing ops.load_library overrides
    package profiler random save seed serialization set_default_device set_default_dtype
    set_float32_matmul_precision set_flush_denormal set_num_interop_threads set_num_threads set_rng_state
    use_deterministic_algorithms utils._python_dispatch utils.benchmark utils.cpp_extension
""")
# Built-in functions and variables.
NAMES = _words("""
    breakpoint __builtins__ compile delattr eval exec getattr globals id __import__ __loader__ locals memoryview
    open setattr __spec__ vars
""")
# Attributes that reach frames, clocks, memory, processes, or what a class does when torch or Python call it.
ATTRIBUTES = _words("""
    ag_frame __bases__ __builtins__ __class__ __closure__ __code__ cr_frame data_ptr __dict__ environ _exit f_back
    f_globals f_locals fork __getattribute__ _getframe gi_frame __globals__ is_compiling kill monotonic __mro__
    perf_counter popen process_time __reduce__ __reduce_ex__ __setattr__ __subclasses__ system tb_frame
    __torch_dispatch__ __torch_function__ untyped_storage _version
""")
CATCH_ALL = {"Exception", "BaseException", "RuntimeError"}  # what torch and triton raise when a kernel fails


def problems(change: Change, base: bytes | None) -> list[str]:
    """The problems of one changed file, a sentence each. ``base``: the file before the patch; None: it is new."""
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
    """(line, what) for everything that a patch may not newly do; ``what`` is the same wherever in a file it is."""
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
    while isinstance(node, ast.Attribute):  # a patch may chain more of them than Python recurses
        words.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(words)]) if isinstance(node, ast.Name) else ""


def _yaml(text: str) -> Iterable[str]:
    try:
        for token in yaml.scan(text):
            if isinstance(token, (yaml.AnchorToken, yaml.AliasToken, yaml.TagToken)):
                yield f"line {token.start_mark.line + 1}: anchors, aliases and tags are not allowed in a policy"
                return
        keys = _repeated(yaml.compose(text))
        if keys:
            yield f"the key {keys[0]!r} is given twice"
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
