"""The folder tree is the security model: imports only point down, there is no circle, and folders for bare images import few libraries."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

from factory.git.scope import AgentsPolicy
from tests.support.paths import ROOT

MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "trainer": {"trainer", "models", "kernels"},
    "agents": {"agents", "trainer", "models", "kernels"},
    "factory": {"factory", "agents", "trainer", "models", "kernels"},
}
BARE_IMAGE = {"torch", "triton", "numpy", "pyarrow", "safetensors", "tokenizers", "yaml", "pydantic"}


def modules(folder: str) -> dict[str, Path]:
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# A statement that imports, and its indent; ruff has it begin a line. Scripts in strings count, too. To parse whole files takes twenty times as long.
IMPORT = re.compile(r"^([ \t]*)((?:from[ \t]+\S+[ \t]+)?import[ \t]+(?:\((?:[^)#]|#[^\n]*)*\)|[^\n]*))", re.MULTILINE)


@functools.cache
def statement(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # a sentence of a docstring
        return []


@functools.cache
def importing(path: Path, top_level_only: bool = False) -> list[ast.stmt]:
    found = IMPORT.findall(path.read_text())
    return [node for indent, text in found if not (indent and top_level_only) for node in statement(text)]


@functools.cache
def imports(path: Path, top_level_only: bool = False) -> set[str]:
    found: set[str] = set()
    for node in importing(path, top_level_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down(folder: str) -> None:
    for name, path in modules(folder).items():
        for imported in imports(path):
            top = imported.partition(".")[0]
            assert top not in MAY_IMPORT or top in MAY_IMPORT[folder], f"{name} imports {imported}"
            assert top not in ("tests", "benchmarks"), f"{name} imports {imported}"


@pytest.mark.parametrize("folder", ["kernels", "models", "trainer", "agents"])
def test_bare_image_folders_stay_light(folder: str) -> None:
    for name, path in modules(folder).items():
        foreign = (
            {i.partition(".")[0] for i in imports(path, top_level_only=True)}
            - set(MAY_IMPORT)
            - BARE_IMAGE
            - set(sys.stdlib_module_names)
            - {""}
        )
        assert foreign <= ({"rich"} if folder == "agents" else set()), f"{name} imports {foreign}"


def graph_of(every: dict[str, Path]) -> dict[str, set[str]]:
    """module → our modules that it imports, also inside functions. An import of a name from a package is not an import of the package."""
    graph = {}
    for name, path in every.items():
        found = {i for i in imports(path) if i in every and i != name}
        packages = {i for i in found if any(other.startswith(f"{i}.") for other in found)}
        only_names = {i for i in packages if not names_beside_modules(path, i, every)}
        graph[name] = found - only_names
    return graph


def names_beside_modules(path: Path, package: str, every: dict[str, Path]) -> bool:
    """True if the file imports a name of the package itself, not only modules in it."""
    for node in importing(path):
        if isinstance(node, ast.Import) and any(alias.name == package for alias in node.names):
            return True
        taken = node.names if isinstance(node, ast.ImportFrom) and node.module == package else []
        if any(f"{package}.{alias.name}" not in every for alias in taken):
            return True
    return False


def circle(graph: dict[str, set[str]]) -> str:
    """A circle in the graph, as ``a → b → a``; empty if there is none."""
    done: set[str] = set()
    for begin in sorted(graph):
        trail: list[str] = []
        pending = [(begin, iter(sorted(graph[begin])))] if begin not in done else []
        trail += [begin] * bool(pending)
        while pending:
            name, others = pending[-1]
            other = next(others, None)
            if other is None:
                done.add(name)
                pending.pop()
                trail.pop()
            elif other in trail:
                return " → ".join((*trail[trail.index(other) :], other))
            elif other not in done:
                trail.append(other)
                pending.append((other, iter(sorted(graph[other]))))
    return ""


EVERY = {name: path for folder in MAY_IMPORT for name, path in modules(folder).items()}


@functools.cache
def the_graph() -> dict[str, set[str]]:
    return graph_of(EVERY)


def test_no_circle_between_files() -> None:
    assert not circle(the_graph())


# Edges that close a circle between rooms. May only shrink.
BACKWARD: set[tuple[str, str]] = set()


def room(name: str) -> str:
    """The room of a module: the folder directly below a package. A file directly below the package is a room of its own."""
    return "/".join(EVERY[name].relative_to(ROOT).with_suffix("").parts[:2])


def test_no_circle_between_rooms() -> None:
    """``__main__`` files are left out, because nothing imports them."""
    graph: dict[str, set[str]] = {room(name): set() for name in EVERY}
    for name, found in the_graph().items():
        if not name.endswith("__main__"):
            graph[room(name)] |= {room(i) for i in found} - {room(name)}
    without = {begin: {end for end in ends if (begin, end) not in BACKWARD} for begin, ends in graph.items()}
    assert not circle(without)
    for begin, end in BACKWARD:
        back = end in graph[begin] and circle(without | {begin: without[begin] | {end}})
        assert back, f"{begin} → {end} closes no circle now: strike it from BACKWARD"


def test_no_circle_between_folders() -> None:
    """Folders within a room are checked too."""
    folder = lambda name: str(EVERY[name].parent.relative_to(ROOT))
    graph: dict[str, set[str]] = {}
    for name, found in the_graph().items():
        if not name.endswith("__main__"):
            graph.setdefault(folder(name), set()).update(folder(i) for i in found if folder(i) != folder(name))
    assert not circle(graph)


def test_code_that_decides_does_not_import_code_that_shows() -> None:
    """Code above the deciding code makes MLflow runs, pages and notifications from the ledger. The deciding code imports none of it."""
    may = ("show", "cli", "demo", "duties", "comparing", "__main__")
    found = [
        f"{name} imports {imported}"
        for name, path in modules("factory").items()
        if name.split(".")[1:2] != [] and name.split(".")[1] not in may
        for imported in imports(path)
        if imported.startswith("factory.show")
    ]
    assert not found


def test_a_large_folder_or_file_gives_a_warning() -> None:
    """This only warns: a file may be large if it is one idea."""
    folders = (*MAY_IMPORT, "tests", "benchmarks", "policies", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    count = Counter(path.parent for path in files if "__pycache__" not in path.parts)
    told = [f"{folder.relative_to(ROOT)}: {n} files" for folder, n in count.items() if n > 25]
    lines = {path: len(path.read_text().splitlines()) for path in files if path.suffix == ".py"}
    told += [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lines.items() if n > 500]
    if told:
        warnings.warn("; ".join(told), stacklevel=1)


REASON = "A separate file, because "


def is_small_and_alone(path: Path, importers: set[str]) -> bool:
    """True for a file of under 80 lines that only one file imports, which lies beside it: a reader opens two files where one would do.

    A line of the file's docstring that begins with ``REASON`` excuses it, such as: A separate file, because it runs in the sandbox.
    """
    if path.name in ("__init__.py", "__main__.py") or len(importers) != 1 or len(path.read_text().splitlines()) >= 80:
        return False
    reason = any(line.startswith(REASON) for line in (ast.get_docstring(parsed(path)) or "").splitlines())
    return EVERY[min(importers)].parent == path.parent and not reason


def test_a_small_file_has_more_than_one_importer_or_a_reason() -> None:
    importers: dict[str, set[str]] = {}
    for name, found in the_graph().items():
        for imported in found:
            importers.setdefault(imported, set()).add(name)
    alone = {
        str(path.relative_to(ROOT))
        for name, path in EVERY.items()
        if is_small_and_alone(path, importers.get(name, set()))
    }
    assert sorted(alone) == [], (
        "put it into its one importer, or say why it is a file of its own: 'A separate file, because …' in its docstring"
    )


def test_every_package_has_a_docstring() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("__init__.py"):
            assert ast.get_docstring(parsed(path)), f"{path.relative_to(ROOT)} has no docstring"


def _reached(module: str, graph: dict[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """Every module that a module imports, directly or not, with the path of imports to it."""
    ways: dict[str, tuple[str, ...]] = {}
    pending = [(module, (module,))]
    while pending:
        name, way = pending.pop()
        for imported in graph[name] - set(ways):
            ways[imported] = (*way, imported)
            pending.append((imported, ways[imported]))
    return ways


POLICY = AgentsPolicy.load(ROOT / "policies" / "agents.yaml")
PATCHABLE = {name for name, path in EVERY.items() if POLICY.is_patchable(str(path.relative_to(ROOT)))}
# These run patchable code when they are called (an op's own), though they import none.
RUN_PATCHABLE = {f"kernels.contract.{name}" for name in ("registry", "bench", "tune")}


def test_agents_may_patch_all_of_kernels_and_trainer_except_contract() -> None:
    """Besides contract/, only the ``__init__`` files that an import from contract/ runs are closed to agents."""
    kept = {n for n in EVERY if n.startswith(("kernels", "trainer"))} - PATCHABLE
    assert kept == {n for n in EVERY if n.startswith(("kernels.contract", "trainer.contract"))} | {"kernels", "trainer"}
    assert {"trainer.model.transformer", "trainer.run", "kernels.swiglu"} <= PATCHABLE


@pytest.mark.parametrize("contract", ["kernels.contract", "models", "trainer.contract"])
def test_the_contract_imports_nothing_that_agents_may_patch(contract: str) -> None:
    graph = the_graph()
    for name in (n for n in EVERY if n.startswith(contract)):
        ways = _reached(name, graph)
        assert not (found := PATCHABLE & set(ways)), " → ".join(ways[min(found)])


def test_code_that_judges_imports_nothing_that_agents_may_patch() -> None:
    """This holds for approved code too: the live code runs in processes of its own, or in the sandbox."""
    graph = the_graph()
    shown_to_people = (
        "factory.cli",
        "factory.__main__",
        "factory.machine_check",
    )  # they tell what the live code does here
    judges = [n for n in EVERY if n.startswith("factory.") and not n.startswith(shown_to_people)]
    for name in (
        "factory.gates.patch.op_driver",
        "factory.gates.patch.matrix.train_cases",
        "factory.code_loop.try_driver",
    ):  # run in the sandbox, from a worktree
        judges.remove(name)
    for name in [
        *judges,
        "agents.search_proposer.search_proposer",
        "agents.loop.graph",
        "agents.kernel_engineer.role",
        "agents.recipe_scout.role",
    ]:
        ways = _reached(name, graph)
        assert not (found := (PATCHABLE | RUN_PATCHABLE) & set(ways)), " → ".join(ways[min(found)])


def test_tests_do_not_import_test_files() -> None:
    """Shared code of tests is in tests/support. tests/chaos, tests/mutants and tests/night are programs of their own."""
    for path in (ROOT / "tests").rglob("*.py"):
        for imported in imports(path):
            last = imported.split(".")
            shared = last[0] != "tests" or last[1:2] in ([], ["support"], ["chaos"], ["mutants"], ["night"])
            assert shared and not last[0].startswith("test_"), f"{path.relative_to(ROOT)} imports {imported}"


def test_class_names_are_unique() -> None:
    names = Counter(
        name for path in EVERY.values() for name in re.findall(r"^class ([^_\W]\w*)", path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_repository_holds_only_regular_files() -> None:
    """A tracked link replaces whatever is at its path in every clone; this once replaced an environment."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    assert [line for line in listed.stdout.splitlines() if not line.startswith(("100644", "100755"))] == []
