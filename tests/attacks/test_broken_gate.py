"""Code in the sandbox that tries to break the gate: the gate still ends with a verdict, and nothing is left behind."""

from __future__ import annotations

from tests.support.gates.reasons import expect, tells
from tests.support.messages import codes
from kernels.contract.message import Message

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.ledger.plant import Plant
from factory.code_loop.submitting import submit_proposal
from factory.core.progress import SILENT
from agents.core.proposal import Edit, Proposal
from factory.gates.stage_interface import PatchCase, StageResult, make_failed_evidence, make_passed_evidence
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.policy import IsolatedTimingPolicy
from factory.gates.patch.stages import isolated, oracle, static
from factory.gates.staged_gate import get_gate_folder
from factory.ledger.ledger import proposals, verdicts
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from tests.support.factory.code_loop import make

NEST = """
import os
def nest(depth, name='d'):
    os.mkdir(name)
    inner = os.open(name, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=inner)
        deeper = os.open(name, os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    return inner
"""
MESSES = {
    "1,500 folders, one in the other": NEST + "nest(1500)\n",
    "1,500 folders with long names": NEST + "nest(1500, 'n' * 250)\n",
    "a file deep in them": NEST + "os.close(os.open('x', os.O_CREAT, dir_fd=nest(1200)))\n",
    "links to outside and to themselves": "import os\nos.symlink('/', 'root')\nos.symlink(KEPT, 'kept')\nos.symlink('loop', 'loop')\nos.symlink('..', 'up')\n",
    "pipes and sockets": "import os, socket\nos.mkfifo('segment.json')\nos.mkfifo('result.json')\nsocket.socket(socket.AF_UNIX).bind('s')\n",
    "folders that nobody may read": "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\nos.chmod('.', 0)\n",
    "names that are no text": "import os\nos.makedirs(b'\\xff\\xfe/\\x80')\nopen(b'\\xff\\xfe/\\n\\x1b[2J', 'w').close()\n",
    "five thousand files": "import os\nfor n in range(5000):\n    open(str(n), 'w').close()\n",
    "the remover's own names": "import os\nfor n in range(20):\n    os.makedirs(f'.removed-{n}/.removed-0/x')\n",
}


def judged(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[dict[str, Any], list[Path]]:
    """A proposal whose oracle stage is ``run_in_sandbox``; its verdict as the ledger has it, and the gate's folders."""
    made = make()
    seen: list[Path] = []

    def stage(case: PatchCase[Any]) -> StageResult:
        seen.append(get_gate_folder(case.candidate))
        assert seen[0] == case.work
        return run(case)

    monkeypatch.setattr(static, "run", lambda case: StageResult(make_passed_evidence("read")))
    monkeypatch.setattr(oracle, "run", stage)
    edit = Edit("trainer/optim/schedule.py", (made.target / "trainer/optim/schedule.py").read_text() + "# x\n")
    number = submit_proposal(
        Plant(made.workspace, made.ledger), Proposal("x", "x", "Mess", "h", 1.1, (edit,)), made.base
    )
    joined = proposals.join(verdicts, verdicts.c.id == proposals.c.verdict)
    row = made.ledger.select_first(sa.select(verdicts).select_from(joined).where(proposals.c.number == number))
    assert row is not None, "no verdict"
    assert made.left_behind() == [] and not any(map(os.path.lexists, seen))
    return row, seen


def in_sandbox(
    case: PatchCase[Any], script: str, folder: str = "run", limits: SandboxLimits | None = None
) -> sandbox.SandboxResult:
    output = case.work / folder
    return sandbox.run_in_sandbox(
        [sys.executable, "-c", textwrap.dedent(script)], output=output, limits=limits or SandboxLimits(wall_seconds=300)
    )


@pytest.mark.parametrize("name", MESSES)
def test_the_gate_gives_a_verdict_after_any_mess_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "kept").write_text("mine")

    def run(case: PatchCase[Any]) -> StageResult:
        result = in_sandbox(case, f"KEPT = {str(tmp_path)!r}\n{MESSES[name]}")
        assert result.returncode == 0 or result.stopped == "output", result
        return StageResult(make_failed_evidence(Message("attacks.mess", "a mess")))

    row, seen = judged(monkeypatch, run)
    assert row["outcome"] == "reject" and codes(row["reasons"]) == ["attacks.mess"] and len(seen) == 1
    assert (tmp_path / "kept").read_text() == "mine"


def test_files_below_a_path_that_is_too_long_count_as_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose name cannot be written cannot be measured: it counts as more than is allowed, whatever is in it."""
    hide = (
        NEST
        + "inner = nest(20, 'n' * 250)\nfile = os.open('big', os.O_CREAT | os.O_WRONLY, dir_fd=inner)\nos.write(file, b'x' * 100)\nimport time\ntime.sleep(300)\n"
    )
    stopped = []

    def run(case: PatchCase[Any]) -> StageResult:
        stopped.append(in_sandbox(case, hide).stopped)
        return StageResult(make_failed_evidence(Message("attacks.hidden", "hidden")))

    row, _ = judged(monkeypatch, run)
    assert stopped == ["output"] and row["outcome"] == "reject"


def test_a_stage_that_recurses_too_deep_gives_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: PatchCase[Any]) -> StageResult:
        return run(case)

    row, _ = judged(monkeypatch, run)
    assert row["outcome"] == "hold" and tells(row["reasons"], expect("gates.stage_error", kind="RecursionError"))


@pytest.mark.slow("20,000 folders are made and removed")
def test_the_gate_gives_a_verdict_after_twenty_thousand_nested_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: PatchCase[Any]) -> StageResult:
        in_sandbox(case, NEST + "nest(20000)\n")
        return StageResult(make_failed_evidence(Message("attacks.mess", "a mess")))

    row, _ = judged(monkeypatch, run)
    assert row["outcome"] == "reject"


def test_a_link_of_timed_code_is_not_followed(tmp_path: Path) -> None:
    """The folder is used again by the next timing, with a new recipe."""
    code, work, kept = tmp_path / "code", tmp_path / "work", tmp_path / "kept"
    contract = code / "kernels" / "contract"
    contract.mkdir(parents=True)
    for folder in (contract, contract.parent):
        (folder / "__init__.py").write_text("")
    names = [str(work / "recipe.yaml"), str(work / "work-recipe.yaml")]
    leaves = f"import os\nfor name in {names}:\n    os.path.lexists(name) or os.symlink({str(kept)!r}, name)\nprint('{{}}')\n"
    (contract / "bench.py").write_text(leaves)
    for _ in range(2):
        with pytest.raises(KeyError):  # it tells no times
            isolated.time_switched_ops(
                IsolatedTimingPolicy(), [ChangedOp("attention", "reference", "native")], {}, code, work
            )
        assert (work / "recipe.yaml").is_symlink() and not kept.exists()
