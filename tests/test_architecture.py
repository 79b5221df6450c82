"""The folder tree is the security model: imports point down only, there is no circle, and the bare-image folders stay light."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from factory.gates.patch_scope import AgentsPolicy

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "trainer": {"trainer", "kernels"},
    "agents": {"agents", "trainer", "kernels"},
    "factory": {"factory", "agents", "trainer", "kernels"},
}
BARE_IMAGE = {"torch", "triton", "numpy", "pyarrow", "safetensors", "tokenizers", "yaml", "pydantic"}


def modules(folder: str) -> dict[str, Path]:
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
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


@pytest.mark.parametrize("folder", ["kernels", "trainer", "agents"])
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


def test_no_circle_between_files() -> None:
    every = {name: path for folder in MAY_IMPORT for name, path in modules(folder).items()}
    graph = {
        name: {i for i in imports(path, top_level_only=True) if i in every and i != name}
        for name, path in every.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_every_folder_says_what_lives_there() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("__init__.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_no_file_holds_two_ideas() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for folder in MAY_IMPORT
        for p in modules(folder).values()
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long


def _reached(module: str, graph: dict[str, set[str]]) -> dict[str, tuple[str, ...]]:
    """Everything that a module imports, by whatever way, and the way."""
    ways: dict[str, tuple[str, ...]] = {}
    pending = [(module, (module,))]
    while pending:
        name, way = pending.pop()
        for imported in graph[name] - set(ways):
            ways[imported] = (*way, imported)
            pending.append((imported, ways[imported]))
    return ways


def test_what_judges_imports_nothing_that_agents_may_patch() -> None:
    """Not even once it was approved: the live code runs in processes of its own, or in the sandbox."""
    policy = AgentsPolicy.load(ROOT / "policies" / "agents.yaml")
    every = {name: path for folder in MAY_IMPORT for name, path in modules(folder).items()}
    graph = {name: {i for i in imports(path) if i in every and i != name} for name, path in every.items()}
    kept = set(policy.out_of_scope)
    paths = {name: str(path.relative_to(ROOT)) for name, path in every.items()}
    patchable = {n for n, p in paths.items() if p not in kept and any(rule.covers(p) for rule in policy.scope)}
    assert {"trainer.model", "kernels.swiglu"} <= patchable and all((ROOT / path).is_file() for path in kept)
    shown_to_people = ("factory.cli", "factory.__main__", "factory.doctor")  # they tell what the live code does here
    judges = [n for n in every if n.startswith("factory.") and not n.startswith(shown_to_people)]
    judges.remove("factory.gates.patch_driver")  # runs in the sandbox, from a worktree
    for name in [
        *judges,
        "agents.search_proposer",
        "agents.loop.graph",
        "agents.kernel_engineer.role",
        "agents.recipe_scout.role",
    ]:
        ways = _reached(name, graph)
        assert not (found := patchable & set(ways)), " → ".join(ways[min(found)])
