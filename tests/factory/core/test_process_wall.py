"""Which files do our processes load? Those that judge, decide or store load none that agents may patch, wherever they are started."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.workspace import Config, Workspace
from factory.evals import server
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, verdicts
from factory.ledger.rows import SegmentRow
from factory.sandbox import namespaces
from factory.sandbox.view import LAUNCHER
from tests.support.factory.code_loop import make, make_target
from tests.support.factory.trained_plant import make_plant
from tests.support.paths import ROOT

POLICY = AgentsPolicy.load(ROOT / "policies" / "agents.yaml")
NOTING = ROOT / "tests" / "support" / "noting"


@dataclass(frozen=True)
class Noted:
    """One process: its command line, and the files whose code it ran."""

    command: str
    files: list[Path]

    def below(self, *folders: Path) -> list[Path]:
        return [path for path in self.files if any(path.is_relative_to(folder) for folder in folders)]

    def patchable(self, *checkouts: Path) -> list[Path]:
        """The files that agents may patch, in whichever checkout."""
        found = [(path, top) for path in self.files for top in checkouts if path.is_relative_to(top)]
        return [path for path, top in found if POLICY.patchable(str(path.relative_to(top)))]


def noted(command: list[str], cwd: Path, folder: Path, python_path: str = "") -> list[Noted]:
    """Run a command; what it and the processes that it started loaded."""
    folder.mkdir()
    known = {key: value for key, value in os.environ.items() if key not in ("FACTORY_HOME", "PYTHONSAFEPATH")}
    path = ":".join(filter(None, (str(NOTING), str(ROOT), python_path)))
    subprocess.run(
        command, cwd=cwd, env=known | {"NOTED": str(folder), "PYTHONPATH": path}, check=True, stdin=subprocess.DEVNULL
    )
    lines = [path.read_text().splitlines() for path in folder.iterdir()]
    return [Noted(first, [Path(line) for line in rest]) for first, *rest in lines]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("wall") / "target")


@pytest.fixture(scope="module")
def workspace(target: Path) -> Workspace:
    made = Workspace.create(target.parent / "workspace", Config(recipe="tiny", repository=str(target)))
    Ledger.create(made.ledger_url)
    return made


STARTS = [
    (words, inside) for words in ("status", "proposals list") for inside in ("", "kernels", "trainer", "kernels/swiglu")
]


@pytest.mark.parametrize(("words", "inside"), [*STARTS, ("config show agents", ""), ("doctor", "")])
def test_a_command_started_in_a_checkout_loads_nothing_of_it(
    target: Path, workspace: Workspace, tmp_path: Path, words: str, inside: str
) -> None:
    command = [sys.executable, "-m", "factory", *words.split(), "--workspace", str(workspace.root)]
    ours, *others = noted(command, target / inside, tmp_path / "noted")
    assert ours.below(ROOT / "factory") and ours.below(ROOT / "kernels" / "contract")  # it was heard
    for process in (ours, *others):
        assert not process.below(target, workspace.root), process
    if words != "doctor":  # which tells people what the live code does here
        assert not ours.patchable(ROOT)


JUDGE = """
import sys
from factory.code_loop.submitting import submit
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, verdicts
from factory.ledger.rows import SegmentRow
from factory.git import repository
from agents.core.proposal import Edit, Proposal
from pathlib import Path

workspace = Workspace.open(Path(sys.argv[1]))
text = (workspace.repository / sys.argv[2]).read_text()
edit = Edit(sys.argv[2], text.replace(sys.argv[3], sys.argv[4], 1))
assert edit.new_text != text
drafted = Proposal("x", "x", "Judged elsewhere", "h", 1.1, (edit,))
number = submit(workspace, Ledger.open(workspace.ledger_url), SILENT, drafted, repository.live_commit(workspace.repository))
print(number)
"""


def judged(tmp_path: Path, path: str, old: str, new: str) -> list[Noted]:
    made = make()
    script = tmp_path / "judge.py"
    script.write_text(JUDGE)
    command = [sys.executable, str(script), str(made.workspace.root), path, old, new]
    found = noted(command, made.target, tmp_path / "noted")
    assert made.left_behind() == []
    return found


def assert_wall(processes: list[Noted]) -> None:
    made = make()
    for process in processes:
        assert not process.below(made.target, made.workspace.root), process
        assert not process.patchable(ROOT), process


def test_the_judge_loads_nothing_that_agents_may_patch(tmp_path: Path) -> None:
    """The stages that read; all others, in the slow tier, start the sandbox."""
    processes = judged(tmp_path, "trainer/optim/schedule.py", '"""', '"""The rate. """\nimport os\n"""')
    assert_wall(processes)
    assert any(process.below(ROOT / "factory" / "gates" / "patch" / "stages") for process in processes)


@pytest.mark.slow("a whole gate run, every stage")
def test_the_judge_of_a_whole_gate_run_loads_nothing_that_agents_may_patch(tmp_path: Path) -> None:
    """The patch changes a docstring: no gain and no cheat."""
    processes = judged(tmp_path, "trainer/optim/schedule.py", '"""', '"""The rate. ')
    assert_wall(processes)
    assert any(process.below(ROOT / "factory" / "evals") for process in processes)
    row = make().ledger.one(
        sa.select(verdicts.c.outcome, verdicts.c.reasons, verdicts.c.evidence).order_by(verdicts.c.id.desc()).limit(1)
    )
    assert row is not None
    training = row["evidence"]["stages"]["training"]
    assert training.get("drift") == 0, training  # the same code on the same data leaves the same weights
    assert 0 < training["control_drift"] < 0.5, training
    assert training["state"] == "missing" or training["slow_control"] > 1.5, training
    assert row["outcome"] in ("reject", "hold")  # whatever a busy machine's clock says
    assert any(
        words in row["reasons"][0]
        for words in ("no gain", "noisy", "not shown", "overhead", "trusted", "did not", "unsure")
    ), row["reasons"]


@pytest.mark.slow("a pass of the daemon: planning, training, evaluation")
def test_a_pass_of_the_daemon_loads_nothing_that_agents_may_patch(target: Path, tmp_path: Path) -> None:
    """What trains is in the sandbox, where nothing is noted."""
    made, _ = make_plant(tmp_path / "plant", target)
    command = [sys.executable, "-m", "factory", "run", "--once", "--workspace", str(made.root)]
    ours, *others = noted(command, target, tmp_path / "noted")
    assert ours.below(ROOT / "factory" / "training")
    assert SegmentRow.select(Ledger.open(made.ledger_url), "WHERE state = 'done'")
    for process in (ours, *others):
        assert not process.below(target, made.root), process
        assert not process.patchable(ROOT), process


def test_the_sandboxes_own_programs_load_the_standard_library_alone() -> None:
    """They are started with -I and -S, so that neither the environment nor the current folder has a say."""
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
    for program in (LAUNCHER, namespaces.ENTER):
        tree = ast.parse(program.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
        assert imported <= sys.stdlib_module_names


def test_the_probe_of_the_server_is_isolated() -> None:
    """Its interpreter is the server's environment's, where ours is not installed."""
    starts = [
        node
        for node in ast.walk(ast.parse(Path(server.__file__).read_text()))
        if isinstance(node, ast.List) and "PROBE" in ast.dump(node)
    ]
    assert starts and all("-I" in ast.dump(node) for node in starts)
