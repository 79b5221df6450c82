"""What a patch's source may not contain, found by reading it: a filter for honest mistakes, with the way to write it otherwise.

Python is parsed, never imported. A changed file may import what its base imported and what model code needs; it may not newly use clocks,
frames, files, processes or other modules' internals. Determined code can hide from any reader: the sandbox is the wall, and the later
stages trust nothing that the code says. In YAML, anchors, aliases, tags and duplicate keys are refused.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterable
from types import ModuleType

import yaml

from factory.git.scope import Change


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Packages that a changed file may import.
IMPORTS = _words("""
    abc bisect collections contextlib copy dataclasses enum functools __future__ heapq itertools json kernels logging math
    numbers numpy operator re statistics string textwrap torch trainer triton types typing warnings
""")
STANDARD = IMPORTS & sys.stdlib_module_names
# Modules that a file must not take from another that imports them: "from trainer.segment import os". A name may have "_" before it.
BORROWED = _words("""
    bltns builtins ctypes gc importlib inspect io os Path pathlib pickle posix shutil signal socket subprocess sys
    tempfile thread threading
""")
# Ways around what is read here: an attribute named as text, errors that are swallowed, text that is evaluated; and files.
OTHER_PARTS = _words("""
    contextlib.suppress dataclasses.make_dataclass logging.config logging.FileHandler logging.handlers numpy.ctypeslib
    numpy.fromfile numpy.load numpy.memmap numpy.random.seed numpy.save operator.attrgetter operator.methodcaller
    types.CodeType types.FunctionType types.new_class typing.ForwardRef typing.get_type_hints
""")
# Parts of torch that load code, start processes, read clocks or change settings of the whole process.
TORCH_PARTS = _words("""
    _C classes cuda.Event cuda.stream cuda.Stream default_generator distributed.rpc from_file hub jit library.define
    library.impl library.Library library.register_kernel load manual_seed multiprocessing ops.load_library overrides
    package profiler random save seed serialization set_default_device set_default_dtype
    set_float32_matmul_precision set_flush_denormal set_num_interop_threads set_num_threads set_rng_state
    use_deterministic_algorithms utils._python_dispatch utils.benchmark utils.cpp_extension utils.model_zoo
""")
PARTS_THAT_ARE_MODULES = _words("""
    numpy.random torch.autograd torch.backends torch.compiler torch.cuda torch.distributed torch.library torch.nn
    torch.nn.functional torch.nn.init torch.ops torch.optim torch.utils torch.utils.checkpoint triton.language
    triton.runtime
""")
# Built-in functions and variables.
NAMES = _words("""
    breakpoint __builtins__ compile delattr eval exec getattr globals id __import__ __loader__ locals open setattr
    __spec__ vars
""")
OWN_NAMES = _words("compile id vars")  # built-in functions whose names a file may use for something of its own
FACTS = _words("__doc__ __name__")
BY_NAME = _words("delattr getattr hasattr setattr")  # harmless where the attribute's name is written out
# Attributes that reach frames, clocks, memory, processes, or what a class does when torch or Python call it.
ATTRIBUTES = _words("""
    ag_frame __bases__ __builtins__ __class__ __closure__ __code__ cr_frame data_ptr __dict__ environ _exit f_back
    f_globals f_locals fork from_file __getattribute__ _getframe gi_frame __globals__ is_compiling kill monotonic __mro__
    perf_counter popen process_time __reduce__ __reduce_ex__ __setattr__ __subclasses__ system tb_frame
    __torch_dispatch__ __torch_function__ untyped_storage _version
""")
CATCH_ALL = {"Exception", "BaseException", "RuntimeError"}  # what torch and triton raise when a kernel fails
# What to write otherwise, by how the finding begins.
ADVICE = {
    "imports ": "use what model code needs: " + ", ".join(sorted(IMPORTS - {"__future__"})),
    "borrows ": "a module's own imports are not a part of it: import what is needed by its own name",
    "uses getattr": "write the attribute's name out, as in getattr(x, 'name'), or take the value from a dict",
    "uses setattr": "write the attribute's name out, as in setattr(x, 'name', value), on an object of this file's own",
    "uses open": "files are read and written by trainer/contract",
    "catches ": "name the exceptions that are expected, or raise again at the end of the handler; a failing kernel could "
    "fall back to the reference unseen",
    "changes ": "pass the value to what needs it",
    "hands on ": "name what is used of it, as in torch.x",
    "uses contextlib.suppress": "name what is expected in 'except', and say what follows",
    "uses torch.manual_seed": "seeds belong to the recipe; draw with a torch.Generator of your own",
    "reaches for .is_compiling": "compiled and eager code must compute the same",
    "reaches for .data_ptr": "a cache by address holds what another tensor left there",
}


def problems(change: Change, base: bytes | None) -> list[str]:
    """The problems of one changed file, a sentence each. ``base``: the file before the patch; None: it is new."""
    if change.content is None:
        return []
    text = change.content.decode("utf-8", "replace")
    if change.path.endswith(".py"):
        found = _python(text, (base or b"").decode("utf-8", "replace"), in_kernels=change.path.startswith("kernels/"))
        return [f"{change.path}: {problem}" for problem in found]
    return [f"{change.path}: {problem}" for problem in _yaml(text)]


def _python(text: str, base: str, in_kernels: bool) -> Iterable[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield f"is not Python: {error}"
        return
    before: Counter[str] = Counter()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # a base that does not parse excuses nothing
        before = Counter(what for _, what in _reaches(ast.parse(base), in_kernels))
    for line, what in _reaches(tree, in_kernels):
        if before[what] > 0:
            before[what] -= 1
        else:
            yield f"line {line}: {what}" + next(
                (f"; {how}" for begin, how in ADVICE.items() if what.startswith(begin)), ""
            )


def _reaches(tree: ast.Module, in_kernels: bool) -> Iterable[tuple[int, str]]:
    """(line, what) for everything that a patch may not newly do; ``what`` is the same wherever in a file it is."""
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
                    f"imports by a relative name: write 'from {'.' * node.level}{node.module or ''}' as 'from trainer.…'",
                )
            else:
                for alias in node.names:
                    yield from ((line, what) for what in _import(f"{node.module}.{alias.name}"))
            if any(alias.name == "*" for alias in node.names):
                yield line, "imports everything of a module"
        elif isinstance(node, ast.Name):
            if node.id in NAMES and node not in spelt and node.id not in own:
                yield line, f"uses {node.id}"
            elif isinstance(node.ctx, ast.Load) and node not in named_on and _is_module(modules.get(node.id, "")):
                yield line, f"hands on the module {modules[node.id]} as a value"
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            whole = _whole(dotted, modules)
            if node.attr in ATTRIBUTES and node not in spelt or node.attr.lstrip("_") in BORROWED:
                yield line, f"reaches for .{node.attr}"
            elif whole and _is_part(whole):
                yield line, f"uses {whole}"
            elif whole and _is_borrowed(whole):
                yield line, f"borrows {whole}"
            if isinstance(node.ctx, (ast.Store, ast.Del)) and whole:
                yield line, f"changes {dotted} of another module"
        elif isinstance(node, ast.Subscript):
            if isinstance(node.ctx, (ast.Store, ast.Del)) and _whole(_dotted(node.value), modules):
                yield line, f"changes {_dotted(node.value)} of another module"
        elif isinstance(node, ast.MatchClass):
            for name in node.kwd_attrs:
                if name in ATTRIBUTES or name.lstrip("_") in BORROWED:
                    yield line, f"reaches for .{name}"
        elif isinstance(node, ast.ExceptHandler):
            if _catches_all(node.type, in_kernels) and not isinstance(node.body[-1], ast.Raise):
                yield line, "catches every exception"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in ATTRIBUTES:
            yield line, f"defines {node.name}"
        elif isinstance(node, ast.ClassDef) and any(_is_tensor(base, modules) for base in node.bases):
            yield line, "makes a kind of tensor of its own"
        elif isinstance(node, ast.Call):
            if _dotted(node.func) == "type" and len(node.args) > 1:
                yield line, "makes a class by a call"
            yield from ((line, what) for what in _by_name(node, modules))


def _quoted(tree: ast.Module) -> list[ast.AST]:
    """The nodes of annotations that are written as text, which some libraries evaluate."""
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
                ):  # then nobody evaluates it
                    inner = ast.parse(node.value.strip(), mode="eval")
                    for part in ast.walk(inner):
                        ast.copy_location(part, node)
                    found += ast.walk(inner)
                    pending.append(inner)
    return found


def _own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Those of ``OWN_NAMES`` that the file itself gives a value."""
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return given & OWN_NAMES


def _spelt(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """The ``getattr`` of calls whose attribute's name is written out, and the ``__class__`` whose name alone is read."""
    calls = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    found = {call.func for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)}
    found = {func for func in found if isinstance(func, ast.Name) and func.id in BY_NAME}
    names = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "__name__"}
    return {*found, *(value for value in names if isinstance(value, ast.Attribute) and value.attr == "__class__")}


def _named_on(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """What stands before a dot, is only given another name ("t = torch"), or is asked for an attribute by name."""
    found: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            found.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            found |= set(node.args[:1])
    return found


def _by_name(call: ast.Call, modules: dict[str, str]) -> Iterable[str]:
    """What is wrong with ``getattr(x, 'name')`` and its like: what would be wrong with ``x.name``."""
    if not isinstance(call.func, ast.Name) or call.func.id not in BY_NAME or len(call.args) < 2:
        return
    of, name = call.args[0], call.args[1]
    if not isinstance(name, ast.Constant):
        return
    word = str(name.value)
    whole = _whole(_dotted(of), modules)
    if word in ATTRIBUTES or word.lstrip("_") in BORROWED or word.startswith("__") and word not in FACTS:
        yield f"reaches for .{word}"
    elif whole and _is_part(f"{whole}.{word}"):
        yield f"uses {whole}.{word}"
    elif whole and call.func.id in ("setattr", "delattr"):
        yield f"changes {whole}.{word} of another module"


def _import(name: str) -> Iterable[str]:
    root, _, rest = name.partition(".")
    if root not in IMPORTS:
        yield f"imports {root}"
    elif {part.lstrip("_") for part in rest.split(".")} & BORROWED or _is_borrowed(name):
        yield f"borrows {name}"
    elif any(_is_part(name[: -len(tail)] if tail else name) for tail in _tails(name)):
        yield f"uses {name}"


def _whole(dotted: str, modules: dict[str, str]) -> str:
    """A dotted name with its first part as the module that it stands for; '': it stands for none."""
    root, dot, rest = dotted.partition(".")
    return modules[root] + dot + rest if root in modules else ""


def _is_module(name: str) -> bool:
    """Does a dotted name, as far as names tell, stand for a module, and for no function or class in it?"""
    root, _, rest = name.partition(".")
    return root in IMPORTS and (not rest or name in PARTS_THAT_ARE_MODULES)


def _is_borrowed(name: str) -> bool:
    """Does the name lead through a module of the standard library into another, as ``collections._sys`` does?"""
    parts = name.split(".")
    if parts[0] not in STANDARD:
        return False
    here: object = importlib.import_module(parts[0])
    for part in parts[1:]:
        here = getattr(here, part, None)
        if isinstance(here, ModuleType) and here.__name__.partition(".")[0].lstrip("_") != parts[0]:
            return True
    return False


def _tails(name: str) -> list[str]:
    """What follows each prefix of a dotted name, longest prefix first."""
    parts = name.split(".")
    return ["".join(f".{part}" for part in parts[n:]) for n in range(len(parts), 0, -1)]


def _is_part(name: str) -> bool:
    return name in OTHER_PARTS or (name.startswith("torch.") and name.removeprefix("torch.") in TORCH_PARTS)


def _catches_all(caught: ast.expr | None, in_kernels: bool) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    every = CATCH_ALL if in_kernels else CATCH_ALL - {"RuntimeError"}
    return any(kind is None or _dotted(kind).rpartition(".")[2] in every for kind in kinds)


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
