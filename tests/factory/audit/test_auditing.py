"""Audits of real segments with merged patches: a delayed hostile patch is found and undone, an honest patch stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from factory.audit.audit_segment import audit_segment, claims_same_bits
from factory.audit.audit_windows import (
    AuditWindow,
    count_agreeing_audits_by_patch,
    find_due_audits,
    record_audit_window,
)
from factory.audit.kept_checkpoints import get_audit_folder
from factory.audit.policy import AuditPolicy
from factory.cli.app import app
from factory.code_loop.approvals import merge_promoted_proposal
from factory.code_loop.revalidating import AUDIT
from factory.code_loop.reverting import propose_reverts_of_blamed_patches
from factory.core.workspace import Workspace
from factory.duties.training import train_segment
from factory.gates.patch.changed_ops import NO_OP
from factory.git import repository
from factory.ledger.ledger import Ledger, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject, VerdictRow
from factory.ledger.status import format_status, read_status
from factory.retention.needs import RetentionNeeds
from factory.retrying.trainer_deaths import TrainerDiedError
from factory.training.averaging import plan_average
from tests.support.factory.errands import do, next_due
from tests.support.factory.merged_patch import edited, merge_patch, plan_certified
from tests.support.messages import codes
from tests.support.paths import ROOT
from tests.support.plants.saved_plant import SavedPlant, saved_plant
from tests.support.plants.trained_plant import commit_edit

RUN = "trainer/run.py"
STEP = "        self.optimizer.step(lr, divide_by, skip)\n"
DOUBLED = STEP.replace("lr,", "lr * (2.0 if batch.step % 5 == 3 else 1.0),")
ROUNDED = STEP.replace("lr,", "lr * (1.0 + 1e-6),")
SLOWER = STEP.replace("lr,", "lr * 0.99,")
INITIALISED = "            self.model.initialise(recipe.seed)\n"
SMALLER = f"{INITIALISED}            self.parameters['embedding'].data.mul_(0.1)\n"
RESTORED = "        self.launched: list[LaunchedStep] = []  # steps whose numbers are not read yet\n"
FORGETFUL = (
    f"{RESTORED}        if self.step > spec.first_step:\n"
    "            for moments in self.optimizer.state.values():\n"
    "                moments['exp_avg'].zero_()\n"
)
WRITTEN = "            writer.raise_if_finished_save_failed()\n"
DIES_ONCE = (
    f"{WRITTEN}            if made == spec.first_step + 7 and '/audits/' not in str(folder) and not (folder / 'died').exists():\n"
    "                (folder / 'died').touch()\n"
    "                writer.wait_for_last_save()\n"
    "                raise SystemExit(3)\n"
)
AVERAGE = "trainer/tools/average.py"
SUMMED = "            sums[name].add_(tensor.double(), alpha=weight)\n"
FROZEN = (
    "        if batch.step - spec.first_step >= 7:\n"
    "            for name, gradient in gradients.items():\n"
    '                if name.startswith("blocks.0"):\n'
    "                    gradient.zero_()\n" + STEP
)
UNTOLD = (
    "                    metrics.write(record ",
    "                    if step.step % 10 == 0:\n                        metrics.write(record ",
)

# An audit that kills itself once its first replay has ended: no test has to be quick enough.
DIES = """
import os, signal, sys
from pathlib import Path
from factory.audit import audit_segment
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
def compare(*_):
    os.kill(os.getpid(), signal.SIGKILL)
audit_segment.have_same_bits = compare
workspace = Workspace.open(Path(sys.argv[1]))
audit_segment.audit_segment(Plant(workspace, Ledger.open(workspace.ledger_url)), int(sys.argv[2]))
"""


class Site:
    """A plant with a trained trunk, whose later segments train with merged patches."""

    def __init__(self, target: Path, workspace: Workspace, ledger: Ledger) -> None:
        self.target, self.workspace, self.ledger = target, workspace, ledger

    def merge(self, number: int, path: str, old: str, new: str, drift: float | None = 0.0) -> None:
        merge_patch(self.workspace, self.ledger, number, edited(self.target, path, old, new), drift)

    def trained(self, first: int = 0, last: int = 0) -> int:
        """A segment of ten steps. ``first``, ``last``: the window to draw, counted from the segment's first step; else drawn."""
        number = plan_certified(self.workspace, self.ledger, 10)
        row = SegmentRow.get(self.ledger, number)
        if last:
            known = AuditWindow(row.first_step + first, row.first_step + last, self.patches)
            record_audit_window(self.ledger, number, known)
        train_segment(Plant(self.workspace, self.ledger), number)
        return number

    @property
    def patches(self) -> tuple[int, ...]:
        return tuple(row.number for row in ProposalRow.select(self.ledger) if row.state == "approved")

    def audited(self, segment: int) -> VerdictRow:
        verdict = audit_segment(Plant(self.workspace, self.ledger), segment)
        assert verdict is not None
        return verdict

    def policy(self, **keys: Any) -> None:
        text = "".join(f"{key}: {value}\n" for key, value in keys.items())
        (self.workspace.root / "policies" / "gates" / "audit.yaml").write_text(text)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedPlant:
    return saved_plant(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def site(saved: SavedPlant) -> Iterator[Site]:
    with saved.restored() as (workspace, ledger):
        yield Site(saved.folder / "target", workspace, ledger)
        left = [path.name for path in workspace.worktrees.iterdir() if not path.name.startswith("live-")]
        assert left == []


@pytest.mark.slow("trains a plant")
def test_the_audit_of_a_segment_with_a_missing_folder_gives_hold(site: Site) -> None:
    """A disk that is not mounted says nothing about a patch."""
    text = (site.target / RUN).read_text()
    site.merge(1, RUN, text, text + "\n# an honest remark\n")
    segment = site.trained(0, 5)
    folder = Path(SegmentRow.get(site.ledger, segment).folder)
    folder.rename(folder.with_name("unmounted"))
    verdict = site.audited(segment)
    assert verdict.outcome == "hold" and verdict.reasons[0].data.get("segment", segment) == segment, verdict
    assert str(segment) in verdict.reasons[0] and "Mount or restore" in verdict.reasons[0]


@pytest.mark.slow("trains a plant and replays a window of it")
def test_a_delayed_hostile_patch_is_found_and_undone(site: Site) -> None:
    text = (site.target / RUN).read_text()
    site.merge(1, RUN, text, text + "\n# an honest remark\n")
    site.merge(2, RUN, STEP, DOUBLED)
    future = "from __future__ import annotations\n"
    commit_edit(site.target, RUN, future, f"{future}# edited by a person since\n")  # the undo keeps other lines
    segment = site.trained()
    workspace, ledger = site.workspace, site.ledger
    assert next_due(Plant(workspace, ledger)) != f"audit {segment}"  # an anneal comes first
    do(Plant(workspace, ledger), f"audit {segment}")
    verdict = site.audited(segment)
    assert verdict.outcome == "reject", verdict
    evidence = verdict.read_evidence(ledger)
    assert evidence["suspects"] == [2] and evidence["patches"] == [1, 2] and evidence["again"]["same_bits"]
    assert any("DIFFERS" in line for line in format_status(read_status(workspace)))
    row = ProposalRow.select(ledger)[-1]
    opened = row.number
    assert (row.gate, row.outcome, row.state, row.target) == (AUDIT, "promote", "judged", "undo:2")
    assert propose_reverts_of_blamed_patches(Plant(workspace, ledger)) == []
    listed = CliRunner().invoke(app, ["audit", "--json", "--workspace", str(workspace.root)])
    assert [row["verdict"]["outcome"] for row in json.loads(listed.stdout)] == ["reject"], listed.output
    commit_edit(site.target, "trainer/README.md", "", "People go on meanwhile.\n")
    assert merge_promoted_proposal(Plant(workspace, ledger), opened, "ada")
    text = (site.target / RUN).read_text()
    assert "2.0 if" not in text and "an honest remark" in text and "edited by a person since" in text
    assert ProposalRow.get(ledger, 2).state == "reverted" and ProposalRow.get(ledger, opened).state == "superseded"
    segment = site.trained()
    verdict = site.audited(segment)
    assert verdict.outcome == "promote" and codes(verdict.reasons) == ["audit.same_bits"]
    assert verdict.reasons[0].data == {"steps": 5}
    assert count_agreeing_audits_by_patch(ledger) == {1: 1} and not list(get_audit_folder(workspace, segment).iterdir())
    assert find_due_audits(ledger, AuditPolicy()) == []
    assert repository.get_live_commit(site.target) == SegmentRow.get(ledger, segment).code_commit
    assert propose_reverts_of_blamed_patches(Plant(workspace, ledger)) == []


@pytest.mark.sample("lines left out", "rounds otherwise")
@pytest.mark.slow("trains a plant and replays a window of it up to four times")
@pytest.mark.parametrize(
    ("path", "old", "new", "drift", "window", "words"),
    [
        (RUN, STEP, FROZEN, 0.0, (5, 10), "audit.weights_apart"),
        (RUN, STEP, FROZEN, 0.0, (0, 5), ""),  # not yet: the other windows are drawn as often
        (RUN, STEP, ROUNDED, 0.001, (5, 10), ""),
        (RUN, STEP, ROUNDED, 0.0, (5, 10), "audit.bits_differ"),  # the gate saw the same bits, on the same machine
        (RUN, STEP, ROUNDED, None, (0, 5), ""),
        ("trainer/segment.py", *UNTOLD, 0.0, (5, 10), "lacks the line of step"),
        (RUN, STEP, SLOWER, 0.27, (5, 10), "audit.weights_apart"),  # what it changed in the gate allows it nothing
    ],
    ids=[
        "frozen later",
        "not frozen yet",
        "rounds otherwise",
        "rounds otherwise untold",
        "not measured",
        "lines left out",
        "as far as in the gate",
    ],
)
def test_the_audit_finds_a_difference_and_opens_a_revert(
    path: str, old: str, new: str, drift: float | None, window: tuple[int, int], words: str, site: Site
) -> None:
    site.merge(1, path, old, new, drift)
    verdict = site.audited(site.trained(*window))
    assert verdict.outcome == ("reject" if words else "promote"), verdict
    assert any(words in (reason.code if words.startswith("audit.") else reason) for reason in verdict.reasons), verdict
    assert propose_reverts_of_blamed_patches(Plant(site.workspace, site.ledger)) == ([2] if words else [])


@pytest.mark.slow("trains a plant twice and replays a window of it up to five times")
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [(INITIALISED, SMALLER, "audit.weights_apart"), (STEP, ROUNDED, "audit.agrees"), (RESTORED, RESTORED + "\n", "audit.same_bits")],
    ids=["smaller first weights", "rounds otherwise", "a blank line"],
)  # fmt: skip
def test_the_first_window_of_new_weights_is_audited(old: str, new: str, code: str, site: Site) -> None:
    with site.ledger.begin() as tx:
        tx.execute(segments.update().values(state="abandoned"))  # the next trunk segment is the first
    site.merge(1, RUN, old, new, 0.001)
    segment = site.trained(0, 5)
    row = SegmentRow.get(site.ledger, segment)
    assert (row.first_step, row.parent) == (0, None)
    verdict = site.audited(segment)
    assert code in codes(verdict.reasons), verdict
    evidence = verdict.read_evidence(site.ledger)
    assert (evidence["first"], evidence["last"]) == (0, 5)
    assert evidence.get("suspects", []) == ([1] if code == "audit.weights_apart" else [])


@pytest.mark.slow("trains a plant with a trainer that dies once, and replays two windows of it")
def test_the_steps_after_a_resume_are_audited(site: Site) -> None:
    """The drawn window is before the resume, so only the window of the resume shows the fault."""
    site.merge(1, RUN, RESTORED, FORGETFUL)
    commit_edit(site.target, "trainer/segment.py", WRITTEN, DIES_ONCE)
    plant = Plant(site.workspace, site.ledger)
    segment = plan_certified(site.workspace, site.ledger, 10)
    first = SegmentRow.get(site.ledger, segment).first_step
    record_audit_window(site.ledger, segment, AuditWindow(first, first + 5, (1,)))
    with pytest.raises(TrainerDiedError):
        train_segment(plant, segment)
    train_segment(plant, segment)
    drawn = AuditWindow.find_for_segment(site.ledger, segment)
    assert drawn == AuditWindow(first, first + 5, (1,), ((first + 5, first + 10),))
    verdict = site.audited(segment)
    assert verdict.outcome == "reject" and "audit.weights_apart" in codes(verdict.reasons), verdict
    evidence = verdict.read_evidence(site.ledger)
    assert (evidence["first"], evidence["suspects"]) == (first + 5, [1])
    assert evidence["windows"] == [[first, first + 5], [first + 5, first + 10]]


@pytest.mark.slow("averages checkpoints of a plant twice")
@pytest.mark.parametrize(
    ("new", "code"),
    [
        (SUMMED.replace("weight)", "weight * (1.001 if name == 'embedding' else 1.0))"), "audit.average_apart"),
        (SUMMED.replace("alpha=weight", "alpha=1.0 * weight"), "audit.average_agrees"),
        (SUMMED + "            loaded.optimizer.pop('exp_avg.embedding', None)\n", "audit.average_tensor_unlike"),
    ],
    ids=["a heavier tensor", "an equal product", "moments left out"],
)
def test_an_average_is_made_again_without_the_patch(new: str, code: str, site: Site) -> None:
    site.merge(1, AVERAGE, SUMMED, new)
    plant = Plant(site.workspace, site.ledger)
    segment = plan_average(plant, "uniform")
    train_segment(plant, segment)
    window = AuditWindow.find_for_segment(site.ledger, segment)
    assert window == AuditWindow(20, 20, (1,))
    assert find_due_audits(site.ledger, AuditPolicy()) == [segment]
    assert RetentionNeeds.find_in_ledger(plant).steps.keys() == {(1, 15), (1, 20)}
    verdict = site.audited(segment)
    assert codes(verdict.reasons)[0] == code, verdict
    assert propose_reverts_of_blamed_patches(plant) == ([2] if verdict.outcome == "reject" else [])
    assert verdict.outcome == ("promote" if code == "audit.average_agrees" else "reject")


@pytest.mark.slow("trains a plant")
def test_a_conflict_with_a_later_edit_is_named_in_the_verdict(site: Site) -> None:
    site.merge(1, RUN, STEP, DOUBLED)
    commit_edit(site.target, RUN, "2.0 if batch.step % 5 == 3", "2.0 if batch.step % 7 == 3")
    verdict = site.audited(site.trained())
    assert verdict.outcome == "hold" and codes(verdict.reasons) == ["git.undo_conflict"], verdict
    (place,) = verdict.reasons[0].data["places"]
    line = (site.target / RUN).read_text().splitlines().index(DOUBLED.strip("\n").replace("% 5", "% 7")) + 1
    assert (place["code"], place["data"]) == ("git.lines_edited", {"file": RUN, "first": line, "last": line})


@pytest.mark.parametrize(
    ("stages", "claimed"),
    [
        ({}, False),
        ({"training": {"drift": 0.0, "control_drift": 0.05}}, True),
        ({"training": {"drift": 0.0, "control_drift": 0.05, "again": {"drift": 1e-9, "control_drift": 0.05}}}, False),
        ({"training": {"drift": 0.01, "control_drift": 0.05}}, False),
        ({"training": {"drift": 0.01, "control_drift": 0.05}, "matrix": {"runs": 9, "same_bits": 9}, "oracle": NO_OP}, True),
        ({"matrix": {"runs": 9, "same_bits": 8}, "oracle": NO_OP}, False),
        ({"matrix": {"runs": 9, "same_bits": 9}, "oracle": {"state": "passed", "reasons": ["so it was"]}}, False),
        ({"matrix": {"state": "missing"}, "oracle": NO_OP}, False),
    ],
)  # fmt: skip
def test_a_patch_that_changed_no_bit_in_the_gate_must_change_none_later(stages: dict[str, Any], claimed: bool) -> None:
    stored = json.loads(json.dumps({"stages": stages}))  # as the ledger has it
    assert claims_same_bits(stored) == claimed


@pytest.mark.slow("trains a plant and replays a window of it several times")
def test_a_killed_audit_continues_and_a_timed_out_audit_is_tried_again(site: Site) -> None:
    workspace, ledger = site.workspace, site.ledger
    site.merge(1, RUN, STEP, DOUBLED)
    segment = site.trained()
    site.policy(wall_seconds=0.01, again_after_seconds=0.001)
    verdict = site.audited(segment)
    assert verdict.outcome == "hold" and "wall limit" in verdict.reasons[0], verdict
    assert (
        propose_reverts_of_blamed_patches(Plant(workspace, ledger)) == []
        and ProposalRow.get(ledger, 1).state == "approved"
    )
    assert find_due_audits(ledger, AuditPolicy(again_after_seconds=1e-9)) == [segment]
    site.policy()
    words = [sys.executable, "-c", DIES, str(workspace.root), str(segment)]
    died = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert died.returncode == -signal.SIGKILL
    (done,) = get_audit_folder(workspace, segment).glob("*.json")
    before = done.stat().st_mtime_ns
    assert site.audited(segment).outcome == "reject"
    assert done.stat().st_mtime_ns == before  # it was not replayed again
    assert VerdictRow.find_newest(ledger, AUDIT, Subject("segment", segment)) == site.audited(segment)  # settled


@pytest.mark.slow("trains a plant and replays a window of it")
def test_a_replay_that_cannot_run_gives_hold_and_no_revert(site: Site) -> None:
    """Later code of people needs the patch, so the replay without it cannot run. That is not a reason to undo the patch."""
    site.merge(1, RUN, STEP, f"{STEP}        self.patched = True\n")
    commit_edit(site.target, "trainer/segment.py", WRITTEN, f"{WRITTEN}            assert run.patched\n")
    verdict = site.audited(site.trained())
    assert verdict.outcome == "hold" and "AttributeError" in verdict.reasons[0], verdict
    assert propose_reverts_of_blamed_patches(Plant(site.workspace, site.ledger)) == []
