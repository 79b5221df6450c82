"""Diagnoses in a plant: the poisoned shard, bad input, what is done and undone."""

from __future__ import annotations

import json
import shutil
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.loss_doctor.causes import TABLE
from agents.loss_doctor.curves import KINDS as KINDS_OF_A_CURVE
from factory.audit.reverts import open_reverts
from factory.cli.app import app
from factory.core.errors import ConfigError, InputError, SegmentError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.daemon import Action, next_action, observe
from factory.diagnosis.acting import accept, act, blamed_patches, quarantine_and_rewind, reject
from factory.diagnosis.diagnosing import diagnose_and_act
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git.repository import live_commit
from factory.ledger.anomalies import (
    ASKED,
    DIAGNOSED,
    DIAGNOSIS,
    REPLICAS_APART,
    WORDED,
    every_anomaly,
    newest_about,
    open_anomalies,
    open_in,
    undiagnosed,
)
from factory.ledger.ledger import Ledger, anomalies, candidates, checkpoints, record, segments
from factory.ledger.rows import ProposalRow, SegmentRow, Subject
from factory.ledger.status import screen, snapshot
from factory.ledger.writing import record_verdict
from factory.release.releases import release
from factory.training.overrides import RecipeOverride, override_of
from factory.training.planning import load_recipe, next_trunk, plan_anneal, plan_of, plan_trunk
from factory.training.segment_folder import record_done
from tests.support.factory.code_loop import make_target
from tests.support.factory.merged_patch import merge_patch
from tests.support.factory.trained_plant import make_plant, train_anneal
from tests.support.git import git
from tests.support.paths import ROOT

KINDS = AnomalyPolicy().kinds


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Workspace, Ledger]]:
    yield make_plant(tmp_path, make_target(tmp_path / "target"))


def note(ledger: Ledger, segment: int, step: int, kind: str = "loss_spike") -> int:
    """An anomaly as a finished segment leaves it."""
    with ledger.begin() as tx:
        made = tx.execute(
            anomalies.insert().values(segment=segment, step=step, kind=kind, detail={}).returning(anomalies.c.id)
        )
        return int(made.scalar_one())


def diagnosed(
    ledger: Ledger,
    number: int,
    segment: int,
    causes: list[str],
    guilty: list[str],
    undo: Sequence[int] = (),
    override: dict[str, Any] | None = None,
    noted: tuple[int, int] | None = None,
) -> None:
    detail = {
        "anomalies": [number],
        "segment": segment,
        "kind": "loss_spike",
        "onset": 12,
        "noted": [12, 12] if noted is None else list(noted),
        "last": 12,
        "causes": causes,
        "guilty": guilty,
        "triggers": guilty,
        "why": "so it was",
        "arms": [],
        "report": "",
        "undo": list(undo),
        "override": override,
    }
    with ledger.begin() as tx:
        record(tx, DIAGNOSED, Subject("anomaly", number), detail)


def test_what_cannot_be_diagnosed_says_why_and_is_not_tried_for_ever(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    early, slow = note(ledger, 1, 3), note(ledger, 1, 15, "throughput_drop")
    assert undiagnosed(ledger, KINDS) == early and next_action(observe(workspace, ledger)).kind == "diagnose"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="a budget of 0 replayed steps"):
        diagnose_and_act(workspace, ledger, early, SILENT, steps=0)
    with pytest.raises(InputError, match="no anomaly 99"):
        diagnose_and_act(workspace, ledger, 99, SILENT)
    with pytest.raises(InputError, match="is a throughput_drop"):
        diagnose_and_act(workspace, ledger, slow, SILENT)
    found = diagnose_and_act(workspace, ledger, early, SILENT)
    assert found["causes"] == ["unknown"] and "the oldest that is left is of step 15" in found["why"], found
    assert undiagnosed(ledger, KINDS) is None and [row.id for row in open_in(ledger, 1, KINDS)] == [early]
    assert any("factory anomalies show" in line for line in screen(snapshot(workspace)))
    late = note(ledger, 1, 18)
    with ledger.begin() as tx:
        other = dict(SegmentRow.get(ledger, 1).computing or {}) | {"machine": {"device": "cuda", "name": "cuda-sm90"}}
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=other))
    assert "trained on cuda-sm90" in diagnose_and_act(workspace, ledger, late, SILENT)["why"]
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=None))
    shutil.rmtree(plan_of(ledger, SegmentRow.get(ledger, 1))["token_shards"][0]["path"])
    assert "its documents cannot be replayed" in diagnose_and_act(workspace, ledger, late, SILENT)["why"]
    assert accept(ledger, early, "ada").startswith("closed") and [row.id for row in open_anomalies(ledger, KINDS)] == [
        late
    ]
    with pytest.raises(InputError, match="is closed: accepted by ada"):
        accept(ledger, early, "bob")


def test_quarantined_documents_are_masked_and_what_they_spoiled_is_not_gone_on_from(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    key, shard = (
        ledger.read("SELECT key, token_shard FROM documents WHERE fate = 'train' ORDER BY key")[0][k]
        for k in ("key", "token_shard")
    )
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    ask = AnomalyPolicy(quarantine="ask")
    assert "a person decides" in act(ledger, ask, number) and open_anomalies(ledger, KINDS)
    assert act(ledger, AnomalyPolicy(), number) == "1 documents quarantined, segment 1 rewound"
    fate = ledger.read("SELECT fate, rule, detail FROM documents WHERE key = :key", key=key)[0]
    assert fate == {"fate": "quarantined", "rule": "loss_doctor", "detail": f"anomaly {number}: bad data"}
    assert SegmentRow.get(ledger, 1).state == "rewound" and not open_anomalies(ledger, KINDS)
    assert next_trunk(workspace, ledger).steps == 20
    again = SegmentRow.get(ledger, plan_trunk(workspace, ledger))
    assert again.parent is None and plan_of(ledger, again)["masked"] == [key]
    assert shard in {one["id"] for one in plan_of(ledger, again)["token_shards"]}
    assert reject(ledger, number, "ada") == "closed; 1 documents are trained on again"
    assert ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)[0]["fate"] == "train"
    with pytest.raises(InputError, match="is closed"):
        quarantine_and_rewind(ledger, number, "bob")


def test_a_rate_that_cleared_it_is_kept_for_a_while_once_and_the_recipe_stays_as_it_is(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    usual = SegmentRow.get(ledger, 1).recipe_json["optimizer"]["lr"]
    override = {"keys": {"optimizer.lr": usual / 10}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    asked = act(ledger, AnomalyPolicy(), number)
    assert asked.startswith("a person decides") and "until step 17" in asked and open_anomalies(ledger, KINDS)
    automatic = AnomalyPolicy(rate="automatic")
    assert act(ledger, automatic, number).startswith("segment 1 rewound; it is trained again with optimizer.lr")
    assert SegmentRow.get(ledger, 1).state == "rewound" and not open_anomalies(ledger, KINDS)
    again = SegmentRow.get(ledger, plan_trunk(workspace, ledger))
    assert (again.first_step, again.last_step, again.parent) == (0, 17, None)  # the recipe asks for 20
    assert again.recipe_json["optimizer"]["lr"] == usual / 10
    assert load_recipe(workspace).optimizer.lr == usual

    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again.id).values(state="done"))
    other = note(ledger, again.id, 12)
    diagnosed(ledger, other, again.id, ["rate"], [], override=override | {"keys": {"optimizer.lr": usual / 100}})
    assert "a person decides" in act(ledger, automatic, other)  # it was done here once
    assert "trained again" in accept(ledger, other, "ada")
    assert override_of(ledger, "trunk", None) == RecipeOverride(
        {"optimizer.lr": usual / 100}, 17, f"anomaly {other}: rate"
    )
    reject(ledger, other, "ada")
    assert override_of(ledger, "trunk", None) is None


def test_ranks_that_drifted_apart_hold_releases_and_wait_for_a_person(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    row = SegmentRow.get(ledger, 1)
    with ledger.begin() as tx:
        tx.execute(checkpoints.delete())
    hostile = "\x1b[2Jembedding"
    record_done(ledger, row, Path(row.folder), dict(row.result or {}) | {"replicas_apart": [hostile, 3]})
    (found,) = [a for a in open_in(ledger, 1, KINDS) if a.kind == REPLICAS_APART]
    assert undiagnosed(ledger, KINDS) == found.id
    told = diagnose_and_act(workspace, ledger, found.id, SILENT)
    assert told["causes"] == ["hardware", "layout"] and "embedding, 3" in told["why"] and "\x1b" not in told["why"]
    assert told["done"].startswith("a person decides") and undiagnosed(ledger, KINDS) is None
    assert [a.id for a in open_in(ledger, 1, KINDS)] == [found.id]


HOSTILE = {
    "no step": '{"loss": 1.0}',
    "far apart": '{"step": 2, "loss": 1e308, "grad_norm": 1e308}\n{"step": 3, "loss": -1e308, "grad_norm": -1e308}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metrics_end_in_a_diagnosis_and_do_not_stop_the_daemon(
    made: tuple[Workspace, Ledger], line: str
) -> None:
    workspace, ledger = made
    with (Path(SegmentRow.get(ledger, 1).folder) / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    number = note(ledger, 1, 4)
    found = diagnose_and_act(workspace, ledger, number, SILENT)
    assert found["causes"] == ["unknown"] and undiagnosed(ledger, KINDS) is None
    assert ("without a step" in found["why"]) == (line == HOSTILE["no step"]), found["why"]


def test_an_anomaly_that_no_trainer_notes_is_refused(made: tuple[Workspace, Ledger]) -> None:
    _, ledger = made
    row = SegmentRow.get(ledger, 1)
    path = Path(row.folder) / "anomalies.jsonl"
    with ledger.begin() as tx:
        tx.execute(checkpoints.delete())
    for step, kind in (
        (-1, "loss_spike"),
        (20, "loss_spike"),
        (10**17, "loss_spike"),
        (True, "plateau"),
        (3, "\x1b[2J"),
    ):
        path.write_text(json.dumps({"step": step, "kind": kind}) + "\n")
        with pytest.raises(SegmentError, match="cannot be read: an anomaly"):
            record_done(ledger, row, Path(row.folder), dict(row.result or {}))
    path.write_text(json.dumps({"step": 19, "kind": "loss_spike"}) + "\n")
    record_done(ledger, row, Path(row.folder), dict(row.result or {}))
    assert [(a["step"], a["kind"]) for a in every_anomaly(ledger)] == [(19, "loss_spike")]


def test_what_is_closed_is_not_diagnosed_again(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["unknown"], [])
    accept(ledger, number, "ada")
    with pytest.raises(InputError, match="is closed: accepted by ada"):
        diagnose_and_act(workspace, ledger, number, SILENT)
    assert len(events(ledger, DIAGNOSED)) == 1


def test_a_rejected_diagnosis_frees_its_own_documents_only_and_the_policy_does_not_blame_them_again(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    fate = lambda: ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)[0]["fate"]
    asked, done = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, asked, 1, ["bad data"], [key])
    diagnosed(ledger, done, 1, ["bad data"], [key])
    act(ledger, AnomalyPolicy(), done)
    assert reject(ledger, asked, "ada") == "closed" and fate() == "quarantined"  # for the other one
    assert "trained on again" in reject(ledger, done, "ada") and fate() == "train"
    again = plan_trunk(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    next_one = note(ledger, again, 12)
    diagnosed(ledger, next_one, again, ["bad data"], [key])
    assert "a person decides" in act(ledger, AnomalyPolicy(), next_one) and fate() == "train"
    accept(ledger, next_one, "ada")
    assert fate() == "quarantined"


def test_a_rate_is_not_lowered_by_the_policy_where_a_person_rejected_that(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    override = {"keys": {"optimizer.lr": 1e-4}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    automatic = AnomalyPolicy(rate="automatic")
    act(ledger, automatic, number)
    reject(ledger, number, "ada")
    again = plan_trunk(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    other = note(ledger, again, 12)
    diagnosed(ledger, other, again, ["rate"], [], override=override)
    assert "a person decides" in act(ledger, automatic, other) and override_of(ledger, "trunk", None) is None


def test_accepting_what_was_found_in_a_segment_whose_place_is_taken_overrides_nothing(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    spoiled, late = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, spoiled, 1, ["bad data"], [key])
    diagnosed(ledger, late, 1, ["rate"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    act(ledger, AnomalyPolicy(), late)
    act(ledger, AnomalyPolicy(), spoiled)
    plan_trunk(workspace, ledger)
    assert accept(ledger, late, "ada").startswith("closed") and override_of(ledger, "trunk", None) is None


def test_what_was_promoted_and_is_rewound_before_its_release_is_not_released(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    anneal = plan_anneal(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == anneal).values(state="done"))
        held = {"checkpoint": "c", "export_path": str(workspace.root), "export_sha256": "e", "created_at": 0.0}
        tx.execute(candidates.insert().values(id=1, segment=anneal, **held))
        verdict = record_verdict(
            tx, "release", Subject("candidate", 1), against=None, policy_sha256="", subject_sha256="e", outcome="promote",
            reasons=[], evidence={},
        )  # fmt: skip
    assert observe(workspace, ledger).unreleased_promotion == verdict
    number = note(ledger, 1, 12, "grad_norm_jump")  # of a kind that holds nothing: 'factory diagnose' was asked for
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    diagnosed(ledger, number, 1, ["bad data"], [key])
    act(ledger, AnomalyPolicy(), number)
    assert observe(workspace, ledger).unreleased_promotion is None
    with pytest.raises(InputError, match="segment 1 was rewound"):
        release(workspace, ledger, verdict, approved_by="ada")


def test_a_failed_segment_off_a_rewound_one_does_not_pause_training(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    failed = plan_anneal(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == failed).values(state="failed"))
    assert observe(workspace, ledger).failed_segment == failed
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    accept(ledger, number, "ada")
    assert observe(workspace, ledger).failed_segment is None
    assert next_action(observe(workspace, ledger)) == Action("plan_trunk")


def test_the_page_for_people_names_every_kind_and_every_cause() -> None:
    page = (ROOT / "docs" / "ANOMALIES.md").read_text()
    assert [kind for kind in (*KINDS_OF_A_CURVE, *KINDS) if f"`{kind}`" not in page] == []
    assert [cause for _, causes, _ in TABLE for cause in causes if cause not in page] == []


def test_what_cleared_it_is_not_kept_where_the_rate_is_one_of_two_causes(made: tuple[Workspace, Ledger]) -> None:
    _, ledger = made
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate", "hardware"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    assert "trained again" not in act(ledger, AnomalyPolicy(rate="automatic"), number)
    assert "closed" in accept(ledger, number, "ada") and override_of(ledger, "trunk", None) is None


@pytest.mark.slow("a second environment, and replays in the sandbox, two of them in it")
@pytest.mark.parametrize("broken", [True, False])
def test_where_libraries_changed_the_window_is_replayed_with_those_of_before(
    made: tuple[Workspace, Ledger], tmp_path: Path, broken: bool
) -> None:
    """The other environment has the packages of this one; a broken one shows that it is what ran."""
    workspace, ledger = made
    venv.create(tmp_path / "before", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "before").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))
    if broken:
        (packages / "sitecustomize.py").write_text("raise SystemExit('an older environment')\n")
    policy = (ROOT / "policies" / "anomalies.yaml").read_text()
    (workspace.root / "policies" / "anomalies.yaml").write_text(
        f"{policy}previous_python: {tmp_path / 'before' / 'bin' / 'python'}\n"
    )
    segment = train_anneal(workspace, ledger)
    with ledger.begin() as tx:
        older = dict(SegmentRow.get(ledger, 1).computing or {})
        older["machine"] |= {"torch": "0.1"}
        tx.execute(segments.update().where(segments.c.id == 1).values(computing=older))
    first = SegmentRow.get(ledger, segment).first_step
    found = diagnose_and_act(workspace, ledger, note(ledger, segment, first + 1), SILENT, steps=9)
    (arm,) = [arm for arm in found["arms"] if arm["arm"] == "previous environment"]
    assert ("an older environment" in arm["failed"]) == broken, arm
    assert (arm["failed"] == "") == (not broken) and found["causes"] != ["code change"], found


def test_killed_between_a_diagnosis_and_what_follows_it_the_next_pass_does_what_follows(
    made: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = made
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    assert undiagnosed(ledger, KINDS) == number
    found = diagnose_and_act(workspace, ledger, number, SILENT)  # nothing is replayed again
    assert found["why"] == "so it was" and found["done"] == "1 documents quarantined, segment 1 rewound"
    assert undiagnosed(ledger, KINDS) is None and len(events(ledger, DIAGNOSED)) == 1

    other = note(ledger, SegmentRow.get(ledger, plan_trunk(workspace, ledger)).id, 12)
    diagnosed(ledger, other, 1, ["unknown"], [])
    assert "a person decides" in diagnose_and_act(workspace, ledger, other, SILENT)["done"]
    assert undiagnosed(ledger, KINDS) is None and len(events(ledger, ASKED)) == 1


def events(ledger: Ledger, kind: str) -> list[dict[str, Any]]:
    return ledger.read("SELECT id FROM events WHERE kind = :kind", kind=kind)


def test_what_was_not_replayed_is_not_closed_as_healthy(made: tuple[Workspace, Ledger]) -> None:
    _, ledger = made
    near, far = note(ledger, 1, 12), note(ledger, 1, 13)
    diagnosed(ledger, near, 1, ["new generation"], [], noted=(12, 14))
    diagnosed(ledger, far, 1, ["new generation"], [], noted=(12, 40))
    assert act(ledger, AnomalyPolicy(), near) == "nothing is wrong; it is closed"
    assert "a person decides" in act(ledger, AnomalyPolicy(), far)
    assert [row.id for row in open_anomalies(ledger, KINDS)] == [far]


def test_the_commands_tell_what_there_is(made: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = made
    run = lambda *words: CliRunner().invoke(app, [*words, "--workspace", str(workspace.root)])
    assert "no anomaly was reported yet" in run("anomalies", "list").output
    assert "no anomaly waits" in run("diagnose").output
    number = note(ledger, 1, 12)
    assert "not diagnosed yet" in run("anomalies", "show", str(number)).output
    diagnosed(ledger, number, 1, ["data × state"], [])
    assert "data × state" in run("anomalies", "list").output
    assert json.loads(run("anomalies", "show", str(number), "--json").output)["diagnosis"]["why"] == "so it was"
    assert "closed" in run("anomalies", "accept", str(number)).output
    assert every_anomaly(ledger)[-1]["how"] == "accepted"


@pytest.mark.parametrize("rejected", [False, True])
def test_a_patch_that_is_blamed_is_undone_by_a_proposal_unless_a_person_rejects_it(
    made: tuple[Workspace, Ledger], rejected: bool
) -> None:
    workspace, ledger = made
    before = live_commit(workspace.repository)
    text = (workspace.repository / "trainer/run.py").read_text()
    after = merge_patch(workspace, ledger, 1, {"trainer/run.py": text + "\n# a remark\n"})
    assert blamed_patches(workspace, ledger, ["code change"], after, before) == [1]
    assert blamed_patches(workspace, ledger, ["code change"], after, after) == []  # it was there before
    assert blamed_patches(workspace, ledger, ["faulty kernel"], after, before) == []  # it changed no kernel
    assert blamed_patches(workspace, ledger, ["rate"], after, before) == []
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["code change"], [], undo=[1])
    with ledger.begin() as tx:
        record_verdict(
            tx, DIAGNOSIS, Subject("segment", 1), against=None, policy_sha256="", subject_sha256=after, outcome="reject",
            reasons=["it is gone without it"], evidence={"anomaly": number},
        )  # fmt: skip
        claim = {"says": "It stays with older weights.", "rests_on": "older weights", "shows": "there"}
        event = newest_about(ledger, DIAGNOSED)[number]["event"]
        record(
            tx, WORDED, Subject("anomaly", number), {"diagnosis": event, "failed": "", "claims": [claim], "dropped": []}
        )
    assert "undoes proposal 1" in act(ledger, AnomalyPolicy(), number)
    if rejected:
        reject(ledger, number, "ada")
        assert open_reverts(workspace, ledger, SILENT) == []
        return
    (opened,) = open_reverts(workspace, ledger, SILENT)
    row = ProposalRow.get(ledger, opened)
    assert (
        row.target == "undo:1" and row.outcome == "promote" and "the loss doctor blames it" in (row.reasons or [""])[0]
    )
    words = "In a language model's words: It stays with older weights. [older weights: there]"
    assert row.hypothesis.endswith(words) and words in git(workspace.repository, "log", "-1", "--format=%B", row.branch)
    assert open_reverts(workspace, ledger, SILENT) == []
