"""Patches that only their surroundings held are judged again: when, how often, at what confidence, and what a person sees."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents.core.improvement_policy import ImprovementPolicy
from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_yaml_value
from factory.code_loop import judging_again
from factory.code_loop.held_proposals import (
    JudgingAgainRules,
    ProposalDescents,
    describe_judging_again,
    list_held_patches,
    read_judging_again_facts,
)
from factory.code_loop.judging_again import (
    find_patches_to_judge_again,
    is_machine_quiet,
    judge_held_patch_again,
    judge_proposals_again,
    list_due_judgements,
)
from factory.code_loop.submitting import compute_tries, submit_proposal
from factory.core import devices
from factory.core.errors import InputError
from factory.core.policy_file import StrictPolicy
from factory.core.workspace import find_checkout_root
from factory.duties.duty import DutyState
from factory.duties.patches import JUDGE_HELD_AGAIN
from factory.duties.table import DUTIES
from factory.gates.holds import find_hold_cause, was_held_by_time_limit_only
from factory.gates.patch.matrix.unexecuted_code import UnexecutedPart
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import matrix
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.stage_interface import make_missing_evidence
from factory.gates.staged_gate import convert_to_stored_evidence
from factory.gates.time_limits import make_out_of_time_evidence
from factory.git import repository
from factory.ledger.ledger import proposals, record_event, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, Subject
from factory.retrying.daemon_requests import Pause
from factory.status.status import format_status_lines, read_status_facts
from kernels.contract.message import Message, messages_to_json
from tests.support.factory.approvals import PatchPlant, given_verdict
from tests.support.factory.code_loop import GATE, Made, make
from tests.support.git import git
from tests.support.messages import refused

KERNELS, TINY, CODE = "policies/kernels.yaml", "policies/recipes/tiny.yaml", "trainer/optim/schedule.py"
PATHS = {"runs": TINY, "matrix": CODE}  # others: KERNELS
BUSY = {"wall_seconds": 0.05}  # no Python starts so quickly, which is what a stalled machine looks like


@pytest.fixture
def made() -> Iterator[Made]:
    made = make()
    gates = made.workspace.root / "policies" / "gates"
    yield made
    (gates / "patch.yaml").write_text(GATE)
    (gates / "recipe.yaml").unlink(missing_ok=True)


def busy_in(made: Made, stage: str) -> None:
    """Give a stage's approved code no time."""
    gates = made.workspace.root / "policies" / "gates"
    if stage == "runs":
        policy = yaml.safe_load((find_checkout_root() / "policies" / "gates" / "recipe.yaml").read_text())
        runs = {"seeds": 3, "steps": 12, "tail_steps": 5, "held_out_documents": 2, **BUSY}
        (gates / "recipe.yaml").write_text(yaml.safe_dump(policy | {"runs": runs}))
        return
    policy = yaml.safe_load(GATE)
    policy["isolated"]["min_ratio"] = 0.01  # whatever a busy machine measures
    policy[stage] = policy.get(stage, {}) | BUSY
    (gates / "patch.yaml").write_text(yaml.safe_dump(policy))


LONG = pytest.mark.long("the stages before it run whole")


@pytest.mark.parametrize(
    "stage", ["oracle", pytest.param("isolated", marks=LONG), "matrix", pytest.param("training", marks=LONG), "runs"]
)
def test_a_machine_that_is_too_busy_holds_a_patch_in_every_stage(stage: str, made: Made) -> None:
    busy_in(made, stage)
    text = repository.read_file_text(made.target, made.base, path := PATHS.get(stage, KERNELS))
    edits = {
        TINY: text.replace("lr: 3e-3", "lr: 4e-3"),
        CODE: text.replace("The learning rate", "The rate of learning"),
        KERNELS: set_yaml_value(text, ("cpu", "swiglu"), "native") if path == KERNELS else "",
    }
    edit = edits[path]
    assert edit != text
    drafted = Proposal("search", f"busy:{stage}", "Try it", "h", 1.1, (Edit(path, edit),))
    row = ProposalRow.get(made.ledger, submit_proposal(Plant(made.workspace, made.ledger), drafted, made.base))
    assert row.outcome == "hold", row.reasons
    evidence = row.read_evidence(made.ledger)
    assert was_held_by_time_limit_only(evidence) and evidence["stages"][stage]["out_of_time"], evidence["stages"]
    assert "wall_seconds" in (row.reasons or [""])[0]
    with made.ledger.begin() as tx:  # no other test judges it again
        tx.execute(proposals.update().where(proposals.c.number == row.number).values(state="rejected"))


def test_a_patch_is_judged_again_only_if_a_time_limit_was_the_only_reason() -> None:
    passed, late = {"state": "passed"}, make_out_of_time_evidence("too late")
    assert was_held_by_time_limit_only(
        {"stages": {"scope": passed, "oracle": {"state": "not needed"}, "training": late}}
    )
    assert not was_held_by_time_limit_only(
        {"stages": {"scope": passed, "oracle": {"state": "failed"}, "training": late}}
    )
    assert not was_held_by_time_limit_only({"stages": {"scope": passed, "training": {"state": "missing"}}})
    assert not was_held_by_time_limit_only({"stages": {"scope": passed}}) and not was_held_by_time_limit_only({})
    every: list[type[StrictPolicy]] = [PatchPolicy, RecipePolicy]
    limited = {
        f"{policy.__name__}.{name}"
        for policy in every
        for name, field in policy.model_fields.items()
        if isinstance(field.default, StrictPolicy) and "wall_seconds" in type(field.default).model_fields
    }
    tried = {f"PatchPolicy.{stage}" for stage in ("oracle", "isolated", "matrix", "training")}
    assert limited == tried | {"RecipePolicy.runs"}, "a stage with a new time limit: add it to the test above"


PASSED = {"state": "passed", "reasons": []}
LATE = {"stages": {"training": make_out_of_time_evidence("too late")}, "patch_id": "p"}
NOISY = {"stages": {"scope": PASSED, "training": make_missing_evidence("unclear", undecided=True)}, "patch_id": "p"}
LIKELY = Message("patch.gain_likely", "A gain is likely.")
NEVER = "03:00-03:00"  # no minute of the day


def change_verdict(plant: PatchPlant, number: int, **values: Any) -> None:
    with plant.ledger.begin() as tx:
        key = plant.row(number)["verdict"]
        tx.execute(verdicts.update().where(verdicts.c.id == key).values(**values))


def held(plant: PatchPlant, evidence: dict[str, Any], number: int = 1, edits: dict[str, str] | None = None) -> None:
    plant.judged(number, outcome="hold", edits=edits)
    change_verdict(plant, number, evidence=evidence)


def set_rules(plant: PatchPlant, night: str = NEVER, **rules: float) -> None:
    """Set when held patches are judged again. Unless told otherwise, no wait is left, and the machine counts as quiet."""
    raw = yaml.safe_load((find_checkout_root() / "policies" / "agents.yaml").read_text())
    policies = plant.workspace.root / "policies"
    (policies / "gates").mkdir(parents=True, exist_ok=True)
    (policies / "agents.yaml").write_text(yaml.safe_dump(raw | {"improve": raw["improve"] | {"night": night}}))
    rules = {"judge_again_after_seconds": 1e-6, "quiet_load": 1e9} | rules
    (policies / "gates" / "patch.yaml").write_text(yaml.safe_dump(rules))


def again(plant: PatchPlant) -> list[int | None]:
    """Let the daemon judge again what is due."""
    return [judge_held_patch_again(plant, number) for number in list_due_judgements(plant, plant.ledger)]


@pytest.mark.parametrize(
    ("stages", "reasons", "cause"),
    [
        ({"training": make_missing_evidence("unclear", undecided=True)}, [], "noise"),
        ({"training": make_missing_evidence("unclear")}, [], ""),
        ({"training": make_missing_evidence(LIKELY)}, [], "noise"),
        ({"training": PASSED, "evals": PASSED}, [LIKELY, "more"], "noise"),
        ({"training": PASSED, "evals": PASSED}, ["more", LIKELY], ""),
        ({"training": PASSED, "evals": PASSED}, [Message("patch.quicker_start", "Longer.")], ""),
        ({"training": PASSED, "evals": make_missing_evidence("none")}, [LIKELY], ""),
        ({"matrix": make_missing_evidence("x"), "training": make_missing_evidence("x", undecided=True)}, [], ""),
        ({"matrix": make_missing_evidence("x", undecided=True)}, [], ""),
        ({"training": make_out_of_time_evidence("late", undecided=True)}, [], "time limit"),
        ({"matrix": make_missing_evidence("x", waits_for="cuda")}, [], "device"),
        ({}, [LIKELY], ""),
    ],
)
def test_a_verdict_names_the_only_cause_that_held_a_patch(
    stages: dict[str, Any], reasons: list[str], cause: str
) -> None:
    whole = {"stages": {"scope": PASSED, "oracle": {"state": "not needed"}, **stages}}
    assert find_hold_cause(whole, reasons) == cause
    as_stored = {"stages": {name: convert_to_stored_evidence(stage) for name, stage in whole["stages"].items()}}
    assert find_hold_cause(as_stored, [Message.from_json(messages_to_json(reason)) for reason in reasons]) == cause


@pytest.mark.parametrize("evidence", [LATE, NOISY])
def test_a_held_patch_is_judged_again_a_few_times_then_waits_for_a_person(
    evidence: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, evidence)
    set_rules(plant, judge_again_after_seconds=1e6)
    assert again(plant) == []
    set_rules(plant, judge_again=2)
    judged = given_verdict(monkeypatch, "hold")
    for number in (2, 3):
        assert again(plant) == [number]
        assert plant.row(number - 1)["state"] == "superseded" and plant.row(number)["state"] == "judged"
        change_verdict(plant, number, evidence=evidence)
    assert again(plant) == [] and len({sha256 for _, _, sha256 in judged}) == 1  # the same patch each time
    (waits,) = read_judging_again_facts(plant.ledger, plant.workspace)
    assert (waits["proposal"], waits["judged"], waits["not_before"]) == (3, 3, None)
    assert describe_judging_again(waits, 0.0).code == "code_loop.again_by_person"  # type: ignore[attr-defined]
    set_rules(plant, judge_again=3)
    assert list_due_judgements(plant, plant.ledger) == [3]
    assert [one.judged_as for one in judge_proposals_again(plant, [3])] == [4]  # by a person, whatever the rules


def test_each_wait_is_four_times_as_long_and_starts_at_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, rules = PatchPlant(tmp_path), JudgingAgainRules(3, 100.0)
    held(plant, NOISY)
    given_verdict(monkeypatch, "hold")
    for number, wait in ((1, 100.0), (2, 400.0), (3, 1600.0)):
        change_verdict(plant, number, evidence=NOISY, created_at=1e6 * number)
        (one,) = list_held_patches(plant.ledger, rules)
        assert (one.row.number, one.judged, one.not_before) == (number, number, 1e6 * number + wait)
        judge_proposals_again(plant, [number])
    with plant.ledger.begin() as tx:  # the process was killed while it judged proposal 4
        tx.execute(
            proposals.update().where(proposals.c.number == 4).values(state="failed", verdict=None, created_at=5e6)
        )
        tx.execute(proposals.update().where(proposals.c.number == 3).values(state="judged"))
    (one,) = list_held_patches(plant.ledger, JudgingAgainRules(4, 100.0))
    assert (one.row.number, one.judged, one.not_before) == (3, 4, 5e6 + 6400.0)


def test_held_patches_are_judged_again_only_while_the_machine_is_quiet_or_at_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, noon = PatchPlant(tmp_path), time.mktime((2026, 11, 28, 12, 0, 0, 0, 0, -1))
    rules = JudgingAgainRules(quiet_load=0.25)
    quiet = lambda night: is_machine_quiet(rules, ImprovementPolicy(night=night), noon)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for load, expected in ((1.99, True), (2.01, False)):  # of eight cores
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 99.0))
        assert quiet(NEVER) == expected and quiet("11:00-12:01")
    monkeypatch.setattr(os, "getloadavg", given_no_load)
    assert not quiet(NEVER) and quiet("11:00-12:01")
    monkeypatch.undo()
    held(plant, NOISY)
    set_rules(plant, quiet_load=1e-12)
    assert os.getloadavg()[0] < 1e-12 * (os.cpu_count() or 1) or again(plant) == []
    set_rules(plant, night="00:00-23:59", quiet_load=1e-12)
    assert time.localtime().tm_hour == 23 or list_due_judgements(plant, plant.ledger) == [1]
    set_rules(plant)
    assert list_due_judgements(plant, plant.ledger) == [1]
    (plant.target / "kernels/ops.py").write_text("mine\n")  # work that no judgement may run beside
    assert list_due_judgements(plant, plant.ledger) == []
    git(plant.target, "checkout", "-q", "--", ".")
    with plant.workspace.hold_lock("code-loop"):
        assert list_due_judgements(plant, plant.ledger) == []


def given_no_load() -> tuple[float, float, float]:
    raise OSError("no load average")


def test_the_duty_waits_while_a_segment_is_open_or_training_is_paused() -> None:
    state = DutyState(None, None)  # type: ignore[arg-type]
    for open_now, pause, waits in (
        (None, None, False),
        (3, None, True),
        (None, Pause("training", "ada", 0.0, ""), True),
    ):
        vars(state).update(pause=pause, unfinished_segment=open_now, stuck_segment=None)
        assert bool(JUDGE_HELD_AGAIN.find_reason_for_waiting(state)) == waits
    names = [duty.name for duty in DUTIES]
    assert names.index("judge_held_again") > max(
        names.index(name) for name in ("ingest", "train", "judge", "plan_trunk")
    )


def test_the_judgements_of_one_patch_share_the_confidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, NOISY)
    given_verdict(monkeypatch, "hold")
    tries = []
    for number in range(1, 6):
        change_verdict(plant, number, evidence=NOISY)
        descends = {"again_of": number}
        with plant.ledger.begin() as tx:  # as the next judgement records itself
            record_event(tx, "drafted", Subject("proposal", number + 100), {"patch_id": "p", **descends})
        tries.append(compute_tries(plant.ledger, number + 100, "kernel:ops", "p"))
        judge_proposals_again(plant, [number])
    assert tries == [k * 2 ** (k - 1) for k in (2, 3, 4, 5, 6)]  # the first judgement had 1
    assert 1 + sum(1 / one for one in tries) < 2 * math.log(2)
    other = PatchPlant(made_folder(tmp_path, "other"))
    held(other, LATE)
    with other.ledger.begin() as tx:
        record_event(tx, "drafted", Subject("proposal", 100), {"patch_id": "p", "again_of": 1})
    assert compute_tries(other.ledger, 100, "kernel:ops", "p") == 4  # code may stall when its time looks bad
    assert compute_tries(other.ledger, 101, "kernel:other", "p") == 2  # the same edits under another target
    assert compute_tries(other.ledger, 101, "kernel:other", "q") == 1


def made_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_patch_with_code_for_another_device_waits_for_a_daemon_on_that_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"cpu": "cuda", "cuda": "cpu"}[devices.get_device_kind()]
    parts = [UnexecutedPart("kernels/swiglu/triton.py", 3, "x"), UnexecutedPart("kernels/rows_in_triton.py", 9, "y")]
    found = matrix._unexecuted(parts)
    assert found.get("waits_for") == ("cuda" if elsewhere == "cuda" else None)
    mixed = [*parts, UnexecutedPart("kernels/swiglu/cpp.py", 3, "x")]
    assert "waits_for" not in matrix._unexecuted(mixed) and "waits" not in matrix._reasons(mixed)[0]
    plant = PatchPlant(tmp_path)
    held(
        plant,
        {"stages": {"matrix": make_missing_evidence(*matrix._reasons(parts), waits_for=elsewhere)}, "patch_id": "p"},
    )
    set_rules(plant, judge_again_after_seconds=1e6)
    assert find_patches_to_judge_again(plant, plant.ledger) == []
    (waits,) = read_judging_again_facts(plant.ledger, plant.workspace)
    assert describe_judging_again(waits, 0.0).code == "code_loop.again_on_device"  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "get_device_kind", lambda: elsewhere)  # the workspace is opened on another machine
    assert [one.row.number for one in find_patches_to_judge_again(plant, plant.ledger)] == [1]
    given_verdict(monkeypatch, "hold")
    assert again(plant) == [2]


def test_patches_decided_by_a_person_or_another_reason_are_not_judged_again(tmp_path: Path) -> None:
    plant, rules = PatchPlant(tmp_path), JudgingAgainRules()
    held(plant, LATE)
    assert [one.row.number for one in list_held_patches(plant.ledger, rules)] == [1]
    change_verdict(plant, 1, evidence={"stages": {"training": {"state": "missing"}}, "patch_id": "p"})
    assert list_held_patches(plant.ledger, rules) == []
    change_verdict(plant, 1, evidence=LATE)
    with plant.ledger.begin() as tx:
        tx.execute(proposals.update().values(state="rejected"))
    assert list_held_patches(plant.ledger, rules) == []


def test_a_patch_that_no_longer_fits_is_refused_once_and_tried_when_the_live_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, NOISY)
    set_rules(plant)
    judged = given_verdict(monkeypatch, "hold")
    (plant.target / "kernels/ops.py").write_text("x = 7\n")
    git(plant.target, "commit", "-q", "-a", "-m", "a person's")
    assert again(plant) == [None] and list_due_judgements(plant, plant.ledger) == [] and judged == []
    with refused("code_loop.files_changed", InputError, proposal=1, files=["kernels/ops.py"]):
        judge_proposals_again(plant, [1])
    git(plant.target, "revert", "--no-edit", "HEAD")
    assert again(plant) == [2]  # on top of the live code
    assert judged[0][1] == plant.head() != plant.base


def test_a_person_is_told_why_a_proposal_cannot_be_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, NOISY)
    plant.judged(2, edits={"kernels/b.py": "b = 1\n"})
    plant.judged(3, outcome="reject", edits={"kernels/c.py": "c = 1\n"})
    held(plant, NOISY, 4, {"kernels/d.py": "d = 1\n"})
    judged = given_verdict(monkeypatch, "hold")
    git(plant.target, "update-ref", "-d", f"refs/heads/{plant.row(4)['branch']}")
    for number, code in (
        (9, "rows.unknown_key"),
        (2, "code_loop.not_held"),
        (3, "code_loop.not_held"),
        (4, "code_loop.no_branch"),
    ):
        with refused(code, InputError):
            judge_proposals_again(plant, [1, number])  # nothing is judged if one of them cannot be
    plant.approve(2)
    with refused("code_loop.already_merged", InputError, proposal=2):
        judge_proposals_again(plant, [2])
    assert judged == []
    (done,) = judge_proposals_again(plant, [1, 1])
    assert (done.judged_as, done.rebased) == (5, True) and judged[0][1] == plant.head()
    with refused("code_loop.judged_since", InputError, proposal=1, newest=5):
        judge_proposals_again(plant, [1])
    assert ProposalDescents(plant.ledger).list_family(1) == [1, 5]


def test_an_older_ledger_knows_repeats_by_their_edits(tmp_path: Path) -> None:
    plant = PatchPlant(tmp_path)
    with plant.ledger.begin() as tx:
        for number, patch in ((1, "p"), (2, "q"), (3, "p")):
            record_event(tx, "drafted", Subject("proposal", number), {"branch": "b", "patch_id": patch})
    descents = ProposalDescents(plant.ledger)
    assert [descents.list_family(number) for number in (1, 2)] == [[1, 3], [2]]


def test_the_unchecked_rules_have_the_defaults_of_the_policy(tmp_path: Path) -> None:
    plant = PatchPlant(tmp_path)
    assert JudgingAgainRules() == judging_again.read_judging_again_rules(plant)
    set_rules(plant, judge_again=7, quiet_load=0.5)
    assert JudgingAgainRules.read_unchecked(plant.workspace) == judging_again.read_judging_again_rules(plant)


def test_status_and_the_list_of_proposals_say_when_and_why_a_patch_is_judged_again(tmp_path: Path) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, NOISY)
    change_verdict(plant, 1, created_at=1e6)
    set_rules(plant, judge_again_after_seconds=100.0)
    (told,) = read_status_facts(plant.workspace)["judge_again"]
    assert told == {
        "proposal": 1, "cause": "noise", "judged": 1, "not_before": 1e6 + 100.0, "device": None, "in_sum": None, "most": 2,
    }  # fmt: skip
    for now, when in ((1e6, "code_loop.again_after"), (1e6 + 101, "code_loop.again_when_quiet")):
        line = describe_judging_again(told, now)
        assert line.code == "code_loop.again_later" and line.data["when"].code == when  # type: ignore[attr-defined]
    shown = format_status_lines(read_status_facts(plant.workspace))
    assert [line for line in shown if line.startswith("again ")] == [
        f"{'again':<10}{describe_judging_again(told, 2e9)}"
    ]
