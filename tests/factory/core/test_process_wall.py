"""Processes that judge, decide or store load no file that agents may patch, in whatever folder they start.

``tests/attacks/test_honest_patches.py`` does the same for a whole gate run.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core.workspace import Workspace, WorkspaceConfig
from factory.evals.probes import server
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.sandbox.filesystem_view import LAUNCHER
from tests.support.factory.code_loop import make, make_target
from tests.support.factory.noted import assert_wall, judged, noted
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import make_plant


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("wall") / "target")


@pytest.fixture(scope="module")
def workspace(target: Path) -> Workspace:
    made = Workspace.create(target.parent / "workspace", WorkspaceConfig(recipe="tiny", repository=str(target)))
    Ledger.create(made.ledger_url)
    return made


PLACES = ("", "kernels", "trainer", "kernels/swiglu")
STARTS = [
    *(("status", inside) for inside in PLACES),
    ("proposals list", "kernels"),
    ("config show agents", ""),
    ("check", ""),
]


@pytest.mark.sample("status-", "status-kernels", "check-")
@pytest.mark.parametrize(("words", "inside"), STARTS)
@pytest.mark.slow("a process for each command")
def test_a_command_started_in_a_checkout_loads_nothing_of_it(
    target: Path, workspace: Workspace, tmp_path: Path, words: str, inside: str
) -> None:
    command = [sys.executable, "-m", "factory", *words.split(), "--workspace", str(workspace.root)]
    # 'check' fails here: no kernel is tuned yet.
    ours, *others = noted(command, target / inside, tmp_path / "noted", succeeds=words != "check")
    assert ours.below(ROOT / "factory") and ours.below(ROOT / "kernels" / "contract")  # the loads were recorded
    for process in (ours, *others):
        assert not process.below(target, workspace.root), process
    if words != "check":  # 'check' imports the live code, to report on it
        assert not ours.patchable(ROOT)


def test_the_judge_loads_nothing_that_agents_may_patch(tmp_path: Path) -> None:
    """This covers the stages that only read. ``tests/attacks/test_honest_patches.py`` covers those that start the sandbox."""
    path = "trainer/optim/schedule.py"
    text = (make().target / path).read_text()
    processes = judged(tmp_path, {path: text.replace('"""', '"""The rate. """\nimport os\n"""', 1)})
    assert_wall(processes)
    assert any(process.below(ROOT / "factory" / "gates" / "patch" / "stages") for process in processes)


@pytest.mark.slow("a pass of the daemon: planning, training, evaluation")
def test_a_pass_of_the_daemon_loads_nothing_that_agents_may_patch(target: Path, tmp_path: Path) -> None:
    """The trainer runs in the sandbox, where loads are not recorded."""
    made, _ = make_plant(tmp_path / "plant", target)
    command = [sys.executable, "-m", "factory", "run", "--once", "--workspace", str(made.root)]
    ours, *others = noted(command, target, tmp_path / "noted")
    assert ours.below(ROOT / "factory" / "training")
    assert SegmentRow.select(Ledger.open(made.ledger_url), "WHERE state = 'done'")
    for process in (ours, *others):
        assert not process.below(target, made.root), process
        assert not process.patchable(ROOT), process


def test_the_sandboxes_own_programs_load_only_the_standard_library() -> None:
    """They start with -I and -S: neither the environment nor the current folder can add modules."""
    described = subprocess.run(
        [sys.executable, "-I", "-S", "-v", str(LAUNCHER), "--describe"],
        cwd=ROOT / "kernels",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(described.stdout)["landlock"] >= 0
    loaded = {
        line.partition("code object from ")[2].strip("'")
        for line in described.stderr.splitlines()
        if "code object from" in line
    }
    assert loaded and all(path.startswith((sys.base_prefix, "frozen")) for path in loaded), loaded
    tree = ast.parse(LAUNCHER.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert imported <= sys.stdlib_module_names


def test_the_probe_of_the_server_is_isolated() -> None:
    """The probe runs in the server's environment, where the factory is not installed."""
    starts = [
        node
        for node in ast.walk(ast.parse(Path(server.__file__).read_text()))
        if isinstance(node, ast.List) and "PROBE" in ast.dump(node)
    ]
    assert starts and all("-I" in ast.dump(node) for node in starts)
