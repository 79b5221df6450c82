"""A machine that is too busy holds a patch in every stage with a time limit. The patch is judged again later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_yaml_value
from factory.code_loop.approvals import find_proposals_to_judge_again, judge_held_patches_again
from factory.code_loop.submitting import submit_proposal
from factory.core import devices
from factory.core.policy_file import StrictPolicy
from factory.core.workspace import find_checkout_root
from factory.gates.patch.matrix.unexecuted_code import UnexecutedPart
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import matrix
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.stage_interface import make_missing_evidence
from factory.gates.time_limits import make_out_of_time_evidence, was_held_by_time_limit_only
from factory.git import repository
from factory.ledger.ledger import proposals, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow
from tests.support.factory.approvals import PatchPlant, given_verdict
from tests.support.factory.code_loop import GATE, Made, make

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


def held(plant: PatchPlant, evidence: dict[str, Any]) -> None:
    row = plant.judged(outcome="hold")
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == row["verdict"]).values(evidence=evidence))


LATE = {"stages": {"training": make_out_of_time_evidence("too late")}, "patch_id": "p"}


def test_a_held_patch_is_judged_again_a_few_times_then_waits_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, LATE)
    own = plant.workspace.root / "policies" / "gates" / "patch.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("judge_again_after_seconds: 1e6\n")
    again = lambda: judge_held_patches_again(plant)
    assert again() == []
    own.write_text("judge_again_after_seconds: 1e-6\njudge_again: 2\n")
    judged = given_verdict(monkeypatch, "hold")
    for number in (2, 3):
        assert again() == [number]
        assert plant.row(number - 1)["state"] == "superseded" and plant.row(number)["state"] == "judged"
        with plant.ledger.begin() as tx:
            key = plant.row(number)["verdict"]
            tx.execute(verdicts.update().where(verdicts.c.id == key).values(evidence=LATE))
    assert again() == [] and len({sha256 for _, _, sha256 in judged}) == 1  # the same patch each time
    assert find_proposals_to_judge_again(plant.ledger, PatchPolicy(judge_again=3, judge_again_after_seconds=1e-6))


def test_a_patch_with_code_for_another_device_waits_for_a_daemon_on_that_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"cpu": "cuda", "cuda": "cpu"}[devices.get_device_kind()]
    parts = [UnexecutedPart("kernels/swiglu/triton.py", 3, "x"), UnexecutedPart("kernels/rows_in_triton.py", 9, "y")]
    found = matrix._unexecuted(parts)
    assert found.get("waits_for") == ("cuda" if elsewhere == "cuda" else None)
    mixed = [*parts, UnexecutedPart("kernels/swiglu/cpp.py", 3, "x")]
    assert "waits_for" not in matrix._unexecuted(mixed) and "waits" not in matrix._reasons(mixed)[0]
    plant, policy = PatchPlant(tmp_path), PatchPolicy()
    held(
        plant,
        {"stages": {"matrix": make_missing_evidence(*matrix._reasons(parts), waits_for=elsewhere)}, "patch_id": "p"},
    )
    assert find_proposals_to_judge_again(plant.ledger, policy) == []
    monkeypatch.setattr(devices, "get_device_kind", lambda: elsewhere)  # the workspace is opened on another machine
    assert [row.number for row in find_proposals_to_judge_again(plant.ledger, policy)] == [1]
    given_verdict(monkeypatch, "hold")
    assert judge_held_patches_again(plant) == [2]


def test_patches_decided_by_a_person_or_another_reason_are_not_judged_again(tmp_path: Path) -> None:
    plant = PatchPlant(tmp_path)
    held(plant, LATE)
    soon = PatchPolicy(judge_again_after_seconds=1e-6)
    assert [row.number for row in find_proposals_to_judge_again(plant.ledger, soon)] == [1]
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().values(evidence={"stages": {"training": {"state": "missing"}}, "patch_id": "p"}))
    assert find_proposals_to_judge_again(plant.ledger, soon) == []
    with plant.ledger.begin() as tx:
        tx.execute(verdicts.update().values(evidence=LATE))
        tx.execute(proposals.update().values(state="rejected"))
    assert find_proposals_to_judge_again(plant.ledger, soon) == []
