"""What is done about a diagnosis, and undone: by the policy, and by a person."""

from __future__ import annotations

import pytest

from factory.code_loop.reverting import open_reverts
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.diagnosis.acting import accept, act, blamed_patches, quarantine_and_rewind, reject
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git.repository import live_commit
from factory.ledger.anomalies import (
    DIAGNOSED,
    DIAGNOSIS,
    WORDED,
    newest_about,
    open_anomalies,
)
from factory.ledger.ledger import Ledger, candidates, record, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.release.releases import release
from factory.training.planning import (
    RecipeOverride,
    load_recipe,
    next_trunk,
    override_of,
    plan_anneal,
    plan_of,
    plan_trunk,
)
from tests.support.factory.errands import due_of, next_due, stuck
from tests.support.factory.merged_patch import merge_patch
from tests.support.git import git
from tests.support.plants.saved_plant import KINDS, diagnosed, note


def test_quarantined_documents_are_masked_and_what_they_spoiled_is_not_gone_on_from(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
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
    assert next_trunk(Plant(workspace, ledger)).steps == 20
    again = SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger)))
    assert again.parent is None and plan_of(ledger, again)["masked"] == [key]
    assert shard in {one["id"] for one in plan_of(ledger, again)["token_shards"]}
    assert reject(ledger, number, "ada") == "closed; 1 documents are trained on again"
    assert ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)[0]["fate"] == "train"
    with pytest.raises(InputError, match="is closed"):
        quarantine_and_rewind(ledger, number, "bob")


def test_a_rate_that_cleared_it_is_kept_for_a_while_once_and_the_recipe_stays_as_it_is(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    usual = SegmentRow.get(ledger, 1).recipe_json["optimizer"]["lr"]
    override = {"keys": {"optimizer.lr": usual / 10}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    asked = act(ledger, AnomalyPolicy(), number)
    assert asked.startswith("a person decides") and "until step 17" in asked and open_anomalies(ledger, KINDS)
    automatic = AnomalyPolicy(rate="automatic")
    assert act(ledger, automatic, number).startswith("segment 1 rewound; it is trained again with optimizer.lr")
    assert SegmentRow.get(ledger, 1).state == "rewound" and not open_anomalies(ledger, KINDS)
    again = SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger)))
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


def test_a_rejected_diagnosis_frees_its_own_documents_only_and_the_policy_does_not_blame_them_again(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    fate = lambda: ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)[0]["fate"]
    asked, done = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, asked, 1, ["bad data"], [key])
    diagnosed(ledger, done, 1, ["bad data"], [key])
    act(ledger, AnomalyPolicy(), done)
    assert reject(ledger, asked, "ada") == "closed" and fate() == "quarantined"  # for the other one
    assert "trained on again" in reject(ledger, done, "ada") and fate() == "train"
    again = plan_trunk(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    next_one = note(ledger, again, 12)
    diagnosed(ledger, next_one, again, ["bad data"], [key])
    assert "a person decides" in act(ledger, AnomalyPolicy(), next_one) and fate() == "train"
    accept(ledger, next_one, "ada")
    assert fate() == "quarantined"


def test_a_rate_is_not_lowered_by_the_policy_where_a_person_rejected_that(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    override = {"keys": {"optimizer.lr": 1e-4}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    automatic = AnomalyPolicy(rate="automatic")
    act(ledger, automatic, number)
    reject(ledger, number, "ada")
    again = plan_trunk(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    other = note(ledger, again, 12)
    diagnosed(ledger, other, again, ["rate"], [], override=override)
    assert "a person decides" in act(ledger, automatic, other) and override_of(ledger, "trunk", None) is None


def test_accepting_what_was_found_in_a_segment_whose_place_is_taken_overrides_nothing(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    spoiled, late = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, spoiled, 1, ["bad data"], [key])
    diagnosed(ledger, late, 1, ["rate"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    act(ledger, AnomalyPolicy(), late)
    act(ledger, AnomalyPolicy(), spoiled)
    plan_trunk(Plant(workspace, ledger))
    assert accept(ledger, late, "ada").startswith("closed") and override_of(ledger, "trunk", None) is None


def test_what_was_promoted_and_is_rewound_before_its_release_is_not_released(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    anneal = plan_anneal(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == anneal).values(state="done"))
        held = {"checkpoint": "c", "export_path": str(workspace.root), "export_sha256": "e", "created_at": 0.0}
        tx.execute(candidates.insert().values(id=1, segment=anneal, **held))
        verdict = record_verdict(
            tx, "release", Subject("candidate", 1), against=None, policy_sha256="", subject_sha256="e", outcome="promote",
            reasons=[], evidence={},
        )  # fmt: skip
    assert due_of(Plant(workspace, ledger), "release") == [verdict]
    number = note(ledger, 1, 12, "grad_norm_jump")  # of a kind that holds nothing: 'factory diagnose' was asked for
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    diagnosed(ledger, number, 1, ["bad data"], [key])
    act(ledger, AnomalyPolicy(), number)
    assert due_of(Plant(workspace, ledger), "release") == []
    with pytest.raises(InputError, match="segment 1 was rewound"):
        release(Plant(workspace, ledger), verdict, approved_by="ada")


def test_a_failed_segment_off_a_rewound_one_does_not_pause_training(restored: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    failed = plan_anneal(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == failed).values(state="failed"))
    assert stuck(Plant(workspace, ledger)) == failed
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    accept(ledger, number, "ada")
    assert stuck(Plant(workspace, ledger)) is None
    assert next_due(Plant(workspace, ledger)) == "plan_trunk"


def test_what_cleared_it_is_not_kept_where_the_rate_is_one_of_two_causes(restored: tuple[Workspace, Ledger]) -> None:
    _, ledger = restored
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate", "hardware"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    assert "trained again" not in act(ledger, AnomalyPolicy(rate="automatic"), number)
    assert "closed" in accept(ledger, number, "ada") and override_of(ledger, "trunk", None) is None


def test_what_was_not_replayed_is_not_closed_as_healthy(restored: tuple[Workspace, Ledger]) -> None:
    _, ledger = restored
    near, far = note(ledger, 1, 12), note(ledger, 1, 13)
    diagnosed(ledger, near, 1, ["new generation"], [], noted=(12, 14))
    diagnosed(ledger, far, 1, ["new generation"], [], noted=(12, 40))
    assert act(ledger, AnomalyPolicy(), near) == "nothing is wrong; it is closed"
    assert "a person decides" in act(ledger, AnomalyPolicy(), far)
    assert [row.id for row in open_anomalies(ledger, KINDS)] == [far]


@pytest.mark.parametrize("rejected", [False, True])
def test_a_patch_that_is_blamed_is_undone_by_a_proposal_unless_a_person_rejects_it(
    restored: tuple[Workspace, Ledger], rejected: bool
) -> None:
    workspace, ledger = restored
    before = live_commit(workspace.repository)
    text = (workspace.repository / "trainer/run.py").read_text()
    after = merge_patch(workspace, ledger, 1, {"trainer/run.py": text + "\n# a remark\n"})
    assert blamed_patches(Plant(workspace, ledger), ["code change"], after, before) == [1]
    assert blamed_patches(Plant(workspace, ledger), ["code change"], after, after) == []  # it was there before
    assert blamed_patches(Plant(workspace, ledger), ["faulty kernel"], after, before) == []  # it changed no kernel
    assert blamed_patches(Plant(workspace, ledger), ["rate"], after, before) == []
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
        assert open_reverts(Plant(workspace, ledger)) == []
        return
    (opened,) = open_reverts(Plant(workspace, ledger))
    row = ProposalRow.get(ledger, opened)
    assert (
        row.target == "undo:1" and row.outcome == "promote" and "the loss doctor blames it" in (row.reasons or [""])[0]
    )
    words = "In a language model's words: It stays with older weights. [older weights: there]"
    assert row.hypothesis.endswith(words) and words in git(workspace.repository, "log", "-1", "--format=%B", row.branch)
    assert open_reverts(Plant(workspace, ledger)) == []
