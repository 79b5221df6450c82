"""Which files the processes of a command load, and a judge in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from factory.git.scope import AgentsPolicy
from tests.support.factory.code_loop import make
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
        return [path for path, top in found if POLICY.is_patchable(str(path.relative_to(top)))]


def noted(command: list[str], cwd: Path, folder: Path, python_path: str = "", succeeds: bool = True) -> list[Noted]:
    """Run a command; what it and the processes that it started loaded."""
    folder.mkdir()
    known = {key: value for key, value in os.environ.items() if key not in ("FACTORY_HOME", "PYTHONSAFEPATH")}
    path = ":".join(filter(None, (str(NOTING), str(ROOT), python_path)))
    subprocess.run(
        command,
        cwd=cwd,
        env=known | {"NOTED": str(folder), "PYTHONPATH": path},
        check=succeeds,
        stdin=subprocess.DEVNULL,
    )
    lines = [path.read_text().splitlines() for path in folder.iterdir()]
    return [Noted(first, [Path(line) for line in rest]) for first, *rest in lines]


JUDGE = """
import json
import sys
from factory.code_loop.submitting import submit_proposal
from factory.ledger.plant import Plant
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, verdicts
from factory.ledger.rows import SegmentRow
from factory.git import repository
from agents.core.proposal import Edit, Proposal
from pathlib import Path

workspace = Workspace.open(Path(sys.argv[1]))
edits = tuple(Edit(path, text) for path, text in json.loads(Path(sys.argv[2]).read_text()).items())
drafted = Proposal("x", "x", "Judged elsewhere", "h", 1.1, edits)
number = submit_proposal(Plant(workspace, Ledger.open(workspace.ledger_url)), drafted, repository.get_live_commit(workspace.repository))
print(number)
"""


def judged(folder: Path, texts: Mapping[str, str]) -> list[Noted]:
    """A patch of these files, submitted and judged by a process that is started in a checkout of the code it patches."""
    made = make()
    script, edits = folder / "judge.py", folder / "edits.json"
    script.write_text(JUDGE)
    edits.write_text(json.dumps(texts))
    command = [sys.executable, str(script), str(made.workspace.root), str(edits)]
    found = noted(command, made.target, folder / "noted")
    assert made.left_behind() == []
    return found


def assert_wall(processes: list[Noted]) -> None:
    made = make()
    for process in processes:
        assert not process.below(made.target, made.workspace.root), process
        assert not process.patchable(ROOT), process
