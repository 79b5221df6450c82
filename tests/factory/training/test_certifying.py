"""Certificates of code changes between the segments of a real run: real commits, and real trainers of old and new code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError, SegmentError
from factory.core.workspace import Workspace
from factory.duties.runner import run_duty_pass
from factory.ledger.ledger import Ledger, data_plans, events, record_event, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject, VerdictRow
from factory.ledger.status import format_status, read_status
from factory.ledger.writing import record_verdict
from factory.runs.arm_runner import list_runs
from factory.training import certificate_runs
from factory.training.certifying import (
    NotCertifiedError,
    accept_code,
    ensure_certified,
    find_newest_code_verdict,
    find_segment_with_old_code,
    list_certificates,
)
from factory.training.planning import plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import factory
from tests.support.factory.errands import next_due, stuck
from tests.support.messages import codes, refused
from tests.support.plants.trained_plant import commit_edit, git, make_plant

STEPS = 8
LONG = pytest.mark.long("ten runs for each mistake; two other mistakes are in the fast tier")
# Mistakes are made around the trainer's own functions, so that the tests don't hang on their lines. The new code runs once a
# process.
INIT = "trainer/__init__.py"
BACKWARD = """'''Trainer.'''
import torch
backward = torch.Tensor.backward
def changed(self, *a, **k):
    return backward({0}, *a, **k)
torch.Tensor.backward = changed
"""
STEP = """'''Trainer.'''
from trainer.optim.optimizer import Optimizer
step, done = Optimizer.step, [0]
def changed(self, lr, divide_by, skip):
    done[0] += 1
    times = {0}
    return step(self, lr * times, divide_by, skip) if times else None
Optimizer.step = changed
"""
ANNEAL = """'''Trainer.'''
from trainer.contract.plan.spec import SegmentSpec
from trainer.optim.optimizer import Optimizer
step, load, kinds = Optimizer.step, SegmentSpec.load, []
def loaded(folder):
    spec = load(folder)
    kinds.append(spec.kind)
    return spec
def changed(self, lr, divide_by, skip):
    return step(self, lr * (2 if kinds[-1] == "anneal" else 1), divide_by, skip)
Optimizer.step, SegmentSpec.load = changed, staticmethod(loaded)
"""


class Site:
    """The plant, and the code that it trains with."""

    def __init__(self, workspace: Workspace, ledger: Ledger, code: Path) -> None:
        self.workspace, self.ledger, self.code = workspace, ledger, code
        self.base = git(code, "rev-parse", "HEAD")

    def edit(self, path: str, old: str, new: str) -> str:
        return commit_edit(self.code, path, old, new)

    def plan(self) -> int:
        return plan_trunk(Plant(self.workspace, self.ledger), STEPS + 2)

    def run(self, number: int) -> dict[str, Any]:
        return run_segment(Plant(self.workspace, self.ledger), number)

    def certify(self, number: int) -> VerdictRow:
        """The verdict, whatever it is."""
        with contextlib.suppress(NotCertifiedError):
            ensure_certified(Plant(self.workspace, self.ledger), SegmentRow.get(self.ledger, number))
        found = find_newest_code_verdict(self.ledger, number)
        assert found is not None
        return found

    def action(self) -> str:
        return next_due(Plant(self.workspace, self.ledger))


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Site:
    root = tmp_path_factory.mktemp("certifying")
    code = make_target(root / "code")
    workspace, ledger = make_plant(root, code)
    (workspace.root / "policies" / "gates" / "certificate.yaml").write_text(
        f"steps: {STEPS}\npreflight: {{parts: []}}\n"
    )
    return Site(workspace, ledger, code)


@pytest.fixture
def site(plant: Site) -> Iterator[Site]:
    """The plant with the code that trained its trunk. Afterwards no segment of the test is open."""
    yield plant
    git(plant.code, "reset", "--quiet", "--hard", plant.base)
    with plant.ledger.begin() as tx:
        unfinished = segments.c.state.in_(("planned", "uncertified"))
        tx.execute(segments.update().where(unfinished).values(state="abandoned"))


def runs_of(site: Site, number: int) -> Path:
    return Path(SegmentRow.get(site.ledger, number).folder) / "certificate"


def runs_for(site: Site, number: int) -> list[dict[str, Any]]:
    """As ``factory runs`` lists them."""
    return [run for run in list_runs(site.ledger) if run["subject"] == f"segment:{number}"]


def started(site: Site, number: int) -> bool:
    return (Path(SegmentRow.get(site.ledger, number).folder) / "segment.json").exists()


def test_a_change_of_docs_needs_no_runs(site: Site) -> None:
    assert (
        find_newest_code_verdict(site.ledger, 1) is None and SegmentRow.get(site.ledger, 1).state == "done"
    )  # the first
    site.edit("docs/notes.md", "", "# Notes\n")
    number = site.plan()
    verdict = site.certify(number)
    assert verdict.outcome == "promote" and codes(verdict.reasons) == ["training.certificate.no_change"]
    assert verdict.read_evidence(site.ledger)["steps"] == 0 and not runs_of(site, number).exists()


def test_a_harmless_change_passes_and_the_segment_trains(site: Site) -> None:
    """A faster attention kernel rounds differently, and training continues."""
    text = (site.code / "policies" / "kernels.yaml").read_text()
    site.edit("policies/kernels.yaml", text, text.replace("attention: reference", "attention: recompute", 1))
    number = site.plan()
    site.run(number)
    assert SegmentRow.get(site.ledger, number).state == "done"
    (shown,) = [row for row in list_certificates(site.ledger) if row["segment"] == number]
    facts = shown["evidence"]
    assert shown["outcome"] == "promote" and facts["basis"] == "segment" and facts["steps"] == STEPS
    file, kernel = facts["changed"]
    assert file == "policies/kernels.yaml" and kernel.endswith("attention: reference → recompute")
    assert len(facts["seeds"]) == 3
    assert (facts["old_commit"], facts["new_commit"]) == (site.base, git(site.code, "rev-parse", "HEAD"))
    found = {m["name"]: m for m in facts["measures"]}
    assert 0 < found["weights"]["share"] < 0.1 and found["weights"]["again"] == 0, "the CPU repeats itself to the bit"
    assert len(facts["loss"]["old"]) == len(facts["loss"]["difference"]) == STEPS
    whole = json.loads(Path(facts["file"]).read_text())
    assert whole["outcome"] == "promote" and len(whole["evidence"]["others"]) == 3
    lines = [json.loads(line) for line in (Path(facts["file"]).parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines[:STEPS]] == facts["loss"]["new"], "its first steps are the segment's own"
    assert not runs_of(site, number).exists()
    runs = {run["arm"]["name"]: run for run in runs_for(site, number)}
    assert runs.keys() == {"old code", "old code, again", *(f"old code, seed {n}" for n in facts["seeds"]), "new code"}
    assert {(run["purpose"], run["state"], run["there"]) for run in runs.values()} == {("certificate", "done", False)}
    with site.ledger.begin() as tx:  # the other tests start from segment 1
        tx.execute(segments.update().where(segments.c.id == number).values(state="abandoned"))


@pytest.mark.long("four runs in bf16: a minute where the processor has no fast bf16 product")
def test_another_precision_is_certified_like_other_code(site: Site) -> None:
    """As on a machine with another fastest precision: same commit, same kernels. Only the new precision measures the noise."""
    recipe = site.workspace.own_recipe_path()
    before = recipe.read_text()
    try:
        recipe.write_text(before.replace("precision: fp32", "precision: bf16"))
        number = site.plan()
    finally:
        recipe.write_text(before)
    row = SegmentRow.get(site.ledger, number)
    assert row.recipe_json["precision"] == "bf16" and (row.computing or {})["precision"]["asked"] == "bf16"
    verdict = site.certify(number)
    facts = verdict.read_evidence(site.ledger)
    assert verdict.outcome == "promote" and facts["changed"] == ["precision: fp32 → bf16"], verdict.reasons
    assert facts["old_commit"] == facts["new_commit"] and facts["basis"] == "segment" and len(facts["seeds"]) == 3
    weights = next(m for m in facts["measures"] if m["name"] == "weights")
    assert 0 < weights["share"] < 1, "bf16 rounds otherwise than fp32, and less than another seed moves"


@pytest.mark.long("five runs of the trainer, in bf16 and in fp8")
def test_a_change_from_bf16_to_fp8_needs_a_certificate_that_runs_in_both(site: Site) -> None:
    """The old code runs once in bf16; its runs with other seeds, and the new code, run in fp8."""
    recipe = site.workspace.own_recipe_path()
    before = recipe.read_text()
    parent = SegmentRow.get(site.ledger, 1)
    as_trained = segments.update().where(segments.c.id == 1).values(recipe_json=parent.recipe_json)
    in_bf16 = as_trained.values(recipe_json=parent.recipe_json | {"precision": "bf16"})
    try:
        recipe.write_text(before.replace("precision: fp32", "precision: fp8"))
        with site.ledger.begin() as tx:
            tx.execute(in_bf16)
        number = site.plan()
        verdict = site.certify(number)
    finally:
        recipe.write_text(before)
        with site.ledger.begin() as tx:
            tx.execute(as_trained)
    row = SegmentRow.get(site.ledger, number)
    assert row.recipe_json["precision"] == "fp8" and (row.computing or {})["precision"]["asked"] == "fp8"
    facts = verdict.read_evidence(site.ledger)
    assert facts["changed"] == ["precision: bf16 → fp8"] and facts["basis"] == "segment"
    precisions = {run["arm"]["name"]: run["arm"]["precision"] for run in runs_for(site, number)}
    seeds = {f"old code, seed {seed}": "fp8" for seed in facts["seeds"]}
    assert precisions == {"old code": "bf16", "new code": "fp8"} | seeds and len(seeds) == 3
    found = {m["name"]: m for m in facts["measures"]}
    # All was measured. A model of 60,000 weights need not pass: eight bits raise the second moments of its smallest gradients.
    assert verdict.outcome in ("promote", "reject") and len(facts["loss"]["difference"]) == STEPS
    assert 0 < found["loss"]["share"] < 0.2 and 0 < found["weights"]["share"] < 1


@pytest.mark.parametrize(
    ("code", "seen_by"),
    [
        (BACKWARD.format("2 * self"), "optimiser's exp_avg_sq"),
        pytest.param(STEP.format("1.1"), "length of the update", marks=LONG),
        pytest.param(STEP.format("0 if done[0] == 5 else 1"), "optimiser's step", marks=LONG),
        (STEP.format("1 if done[0] < 7 else 4"), "weights"),
    ],
    ids=["wrong gradient scale", "another rate than it reports", "a skipped update", "right at first, wrong later"],
)
@pytest.mark.slow("trains under two commits")
def test_a_wrong_change_is_refused_and_its_segment_does_not_start(site: Site, code: str, seen_by: str) -> None:
    site.edit(INIT, "", code)
    number = site.plan()
    with refused("training.not_certified", NotCertifiedError, segment=number) as raised:
        site.run(number)
    assert raised.value.data["to_do"].data == {"segment": number} and f"--accept {number}" in str(raised.value)
    verdict = find_newest_code_verdict(site.ledger, number)
    assert (
        verdict
        and verdict.outcome == "reject"
        and set(codes(verdict.reasons)) == {"training.certificate.outside_noise"}
    )
    assert any(seen_by in reason.data["measure"] for reason in verdict.reasons), verdict.reasons
    assert SegmentRow.get(site.ledger, number).state == "uncertified" and not started(site, number)


@pytest.mark.slow("trains under two commits, a trunk segment and an anneal")
def test_the_first_anneal_under_new_code_needs_a_certificate_of_its_own(site: Site) -> None:
    """The new code is wrong in anneals alone, so the certificate of the trunk segment cannot see it."""
    commit = site.edit(INIT, "", ANNEAL)
    trunk = site.plan()
    site.run(trunk)
    certificate = find_newest_code_verdict(site.ledger, trunk)
    assert certificate and codes(certificate.reasons) == ["training.certificate.same_bits"]
    anneal = plan_anneal(Plant(site.workspace, site.ledger))
    row = SegmentRow.get(site.ledger, anneal)
    assert (row.parent, row.code_commit) == (trunk, commit), "the anneal has its parent's code"
    with refused("training.not_certified", NotCertifiedError, segment=anneal):
        site.run(anneal)
    verdict = find_newest_code_verdict(site.ledger, anneal)
    assert verdict and verdict.outcome == "reject" and not started(site, anneal)
    facts = verdict.read_evidence(site.ledger)
    assert (facts["old_commit"], facts["new_commit"], facts["basis"]) == (site.base, commit, "segment")
    accept_code(Plant(site.workspace, site.ledger), anneal, "ada")
    site.run(anneal)
    again = SegmentRow.get(site.ledger, plan_anneal(Plant(site.workspace, site.ledger)))
    parent = SegmentRow.get(site.ledger, trunk)
    assert find_segment_with_old_code(site.ledger, again, parent) is None, "an anneal has run with this code"
    with site.ledger.begin() as tx:  # the other tests start from segment 1
        later = segments.c.id.in_((trunk, anneal))
        tx.execute(segments.update().where(later).values(state="abandoned"))


A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.mark.parametrize(
    ("before", "row", "expected"),
    [
        ([("trunk", None, A)], ("trunk", 1, A), None),
        ([("trunk", None, A)], ("trunk", 1, B), A),
        ([("trunk", None, A)], ("anneal", 1, B), A),
        ([("trunk", None, A), ("trunk", 1, B)], ("anneal", 2, B), A),  # the first anneal, under new code
        ([("trunk", None, A), ("trunk", 1, B, "accepted")], ("anneal", 2, B), None),
        ([("trunk", None, A), ("trunk", 1, B, "accepted"), ("trunk", 2, C)], ("anneal", 3, C), B),
        ([("trunk", None, A), ("anneal", 1, A), ("trunk", 1, B)], ("anneal", 3, B), A),
        ([("trunk", None, A), ("anneal", 1, A), ("trunk", 1, B)], ("anneal", 3, C), A),
        ([("trunk", None, A), ("anneal", 1, B), ("trunk", 1, B)], ("anneal", 3, B), None),
        ([("trunk", None, A), ("anneal", 1, B)], ("trunk", 2, B), A),  # the trunk continues from an anneal
        ([("trunk", None, A), ("anneal", 1, B, "accepted")], ("trunk", 2, B), None),
        ([("trunk", None, A), ("anneal", 1, B), ("trunk", 1, A)], ("anneal", 3, B), A),  # the parent ran other code
        ([("import", None, A), ("trunk", 1, B)], ("anneal", 2, B), None),
        ([("import", None, A), ("trunk", 1, B), ("trunk", 2, C)], ("anneal", 3, C), B),
    ],
)
def test_a_certificate_compares_with_the_code_that_last_made_such_steps(
    before: list[Any], row: Any, expected: str | None, tmp_path: Path
) -> None:
    ledger = Ledger.create(f"sqlite:///{tmp_path / 'ledger.db'}")
    with ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="plan", plan={}))
        for number, (kind, parent, commit, *accepted) in enumerate([*before, row], 1):
            state = "done" if number <= len(before) else "planned"
            tx.execute(
                segments.insert().values(
                    id=number, kind=kind, parent=parent, generation=1, recipe="tiny", recipe_json={"precision": "fp32"}, recipe_sha256="",
                    data_plan="plan", code_commit=commit, first_step=0, last_step=9, state=state, folder="", created_at=0.0,
                )
            )  # fmt: skip
            if accepted:
                subject, same = Subject("segment", number), f"code {number}"
                record_verdict(
                    tx, "code", subject, against=None, policy_sha256="", subject_sha256=same, outcome="reject", reasons=["r"], evidence={}
                )  # fmt: skip
                record_event(tx, "certificate_accepted", subject, {"by": "ada", "verdict": 1, "subject_sha256": same})
    planned = SegmentRow.get(ledger, len(before) + 1)
    assert planned.parent is not None
    found = find_segment_with_old_code(ledger, planned, SegmentRow.get(ledger, planned.parent))
    assert (found and found.code_commit) == expected
    ledger.engine.dispose()


def test_code_that_crashes_is_refused_with_the_trainers_message(site: Site) -> None:
    site.edit(INIT, "", BACKWARD.format("1 / 0"))
    verdict = site.certify(site.plan())
    assert verdict.outcome == "reject" and codes(verdict.reasons) == ["training.certificate.new_code_failed"]
    assert "ZeroDivisionError" in verdict.reasons[0].data["why"]


def test_a_change_cannot_be_certified_without_the_old_code(site: Site) -> None:
    site.edit(INIT, "", BACKWARD.format("self"))
    number = site.plan()
    with site.ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 1).values(code_commit="f" * 40))
    try:
        verdict = site.certify(number)
    finally:
        with site.ledger.begin() as tx:
            tx.execute(segments.update().where(segments.c.id == 1).values(code_commit=site.base))
    assert verdict.outcome == "hold" and codes(verdict.reasons) == ["training.certificate.old_code_failed"]
    assert SegmentRow.get(site.ledger, number).state == "uncertified"


def test_both_commits_run_the_parents_recipe_if_the_old_code_cannot_read_the_new_one(site: Site) -> None:
    known = '"""All settings of a run. Recipe, data, code and first checkpoint together determine the run."""\n'
    site.edit("trainer/contract/recipe.py", known, f"{known}\n    colour: str = 'red'\n")
    number = site.plan()
    recipe = SegmentRow.get(site.ledger, number).recipe_json | {"colour": "blue"}
    with site.ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == number).values(recipe_json=recipe))
    verdict = site.certify(number)
    assert verdict.outcome == "promote", verdict.reasons
    assert verdict.read_evidence(site.ledger)["basis"] == "parent"
    assert codes(verdict.reasons)[0] == "training.certificate.same_bits"


@pytest.mark.slow("trains under two commits")
def test_after_a_refusal_the_factory_waits_until_a_person_reverts_or_accepts(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.edit(INIT, "", STEP.format("2"))
    number = site.plan()
    for code in ("training.not_certified", "duties.not_certified"):  # the second pass does not try again
        with refused(code, NotCertifiedError, segment=number):
            run_duty_pass(Plant(site.workspace, site.ledger), settle=0)
    assert len([row for row in list_certificates(site.ledger) if row["segment"] == number]) == 1
    words = "\n".join(format_status(read_status(site.workspace)))
    assert (
        "uncertified" in words
        and f"factory certify --accept {number}" in words
        and "more than seed noise allows" in words
    )
    with refused("training.not_uncertified", InputError, segment=1, waiting=[number]):
        accept_code(Plant(site.workspace, site.ledger), 1, "somebody")

    bad = git(site.code, "rev-parse", "HEAD")
    git(site.code, "revert", "--no-edit", "HEAD")
    assert site.action() != f"train {number}"
    assert stuck(Plant(site.workspace, site.ledger)) is None, "other code is live, so training continues"
    git(site.code, "reset", "--quiet", "--hard", bad)

    done = factory("certify", "--accept", str(number), "--json", "-w", str(site.workspace.root))
    assert done.returncode == 0, done.stderr
    (shown,) = [row for row in json.loads(done.stdout) if row["segment"] == number]
    assert shown["outcome"] == "reject" and shown["accepted"]["by"] and shown["accepted"]["at"]
    accepted = site.ledger.select_rows(sa.select(events).where(events.c.kind == "certificate_accepted"))
    assert f"segment:{number}" in [event["subject"] for event in accepted]
    assert site.action() == f"train {number}"
    site.run(number)
    assert SegmentRow.get(site.ledger, number).state == "done"
    assert "accepted by" in factory("certify", "-w", str(site.workspace.root)).stdout
    with site.ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == number).values(state="abandoned"))


@pytest.mark.parametrize(("code", "says"), [(74, "reported a full disk"), (75, "received SIGTERM")])
@pytest.mark.slow("a trainer, started three times")
def test_code_that_fakes_a_full_disk_or_a_stop_is_refused_after_three_tries(site: Site, code: int, says: str) -> None:
    site.edit(INIT, "", f"raise SystemExit({code})\n")
    number = site.plan()
    for tries in (1, 2):
        with pytest.raises(SegmentError, match=f"{says}.*{tries} of 3 allowed tries"):
            site.certify(number)
    verdict = site.certify(number)
    assert verdict.outcome == "reject" and codes(verdict.reasons) == ["training.certificate.new_code_failed"]
    why = verdict.reasons[0].data["why"]
    assert (why["code"], why["data"]["times"]) == ("runs.ended_each_time", 3) and says in why["text"], verdict.reasons
    assert not started(site, number)


def test_a_second_segment_of_the_same_code_reuses_the_verdict(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.edit(INIT, "", BACKWARD.format("3 * self"))
    first = site.certify(site.plan())
    monkeypatch.setattr(certificate_runs, "gather_certificate_evidence", lambda *_: pytest.fail("measured again"))
    number = site.plan()
    again = site.certify(number)
    assert (again.outcome, again.reasons) == ("reject", first.reasons) and again.id != first.id
    with refused("training.segment_replaced", InputError, segment=number - 1, newer=number):
        accept_code(Plant(site.workspace, site.ledger), number - 1, "somebody")
