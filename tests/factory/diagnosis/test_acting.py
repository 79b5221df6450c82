"""Actions on a diagnosis by the policy or a person, and how to undo them. Rewinds and quarantines by a person without a diagnosis."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.code_loop.reverting import propose_reverts_of_blamed_patches
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.diagnosis.remedies import (
    accept_diagnosis,
    apply_anomaly_policy,
    end_document_quarantine,
    find_blamed_patches,
    quarantine_and_rewind,
    quarantine_documents,
    reject_diagnosis,
    rewind_segment,
)
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.git.repository import get_live_commit
from factory.ledger.anomalies import (
    DIAGNOSED,
    DIAGNOSIS,
    EXPLAINED,
    RELEASE_MARKED,
    list_open_anomalies,
    read_newest_details_by_anomaly,
)
from factory.ledger.ledger import (
    Ledger,
    candidates,
    checkpoints,
    data_plans,
    documents,
    events,
    record_event,
    releases,
    segments,
    shards,
    verdicts,
)
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow, SegmentRow, Subject
from factory.ledger.writing import record_verdict
from factory.release.releases import release_candidate
from factory.training.planning import (
    RecipeOverride,
    _left_out,
    find_recipe_override,
    forecast_trunk,
    load_recipe,
    plan_anneal,
    plan_trunk,
    read_data_plan,
)
from tests.support.factory.command import factory
from tests.support.factory.errands import due_of, next_due, stuck
from tests.support.factory.merged_patch import merge_patch
from tests.support.git import git
from tests.support.messages import refused
from tests.support.plants.saved_plant import KINDS, diagnosed, note


def test_quarantined_documents_are_masked_and_their_segment_is_rewound(
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
    assert apply_anomaly_policy(ledger, ask, number).code == "diagnosis.person_decides" and list_open_anomalies(
        ledger, KINDS
    )
    done = apply_anomaly_policy(ledger, AnomalyPolicy(), number)
    assert (done.code, done.data) == ("diagnosis.quarantined", {"documents": 1, "segment": 1, "releases": ""})
    fate = ledger.read("SELECT fate, rule, detail FROM documents WHERE key = :key", key=key)[0]
    assert fate == {"fate": "quarantined", "rule": "loss_doctor", "detail": f"anomaly {number}: bad data"}
    assert SegmentRow.get(ledger, 1).state == "rewound" and not list_open_anomalies(ledger, KINDS)
    assert forecast_trunk(Plant(workspace, ledger)).steps == 20
    again = SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger)))
    assert again.parent is None and read_data_plan(ledger, again)["masked"] == [key]
    assert shard in {one["id"] for one in read_data_plan(ledger, again)["token_shards"]}
    rejected = reject_diagnosis(ledger, number, "ada")
    assert (rejected.code, rejected.data) == ("diagnosis.rejected_freed", {"documents": 1})
    (row,) = ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)
    assert row["fate"] == "train"
    with refused("diagnosis.closed", InputError, anomaly=number):
        quarantine_and_rewind(ledger, number, "bob")


def test_a_learning_rate_that_removes_an_anomaly_is_used_for_a_while(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    usual = SegmentRow.get(ledger, 1).recipe_json["optimizer"]["lr"]
    override = {"keys": {"optimizer.lr": usual / 10}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    asked = apply_anomaly_policy(ledger, AnomalyPolicy(), number)
    assert asked.code == "diagnosis.person_decides" and asked.data["repeats"].data["until"] == 17
    assert list_open_anomalies(ledger, KINDS)
    automatic = AnomalyPolicy(rate="automatic")
    done = apply_anomaly_policy(ledger, automatic, number)
    assert done.code == "diagnosis.rate_lowered" and (done.data["segment"], done.data["until"]) == (1, 17)
    assert done.data["values"][0].startswith("optimizer.lr ")
    assert SegmentRow.get(ledger, 1).state == "rewound" and not list_open_anomalies(ledger, KINDS)
    again = SegmentRow.get(ledger, plan_trunk(Plant(workspace, ledger)))
    assert (again.first_step, again.last_step, again.parent) == (0, 17, None)  # the recipe asks for 20
    assert again.recipe_json["optimizer"]["lr"] == usual / 10
    assert load_recipe(workspace).optimizer.lr == usual

    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again.id).values(state="done"))
    other = note(ledger, again.id, 12)
    diagnosed(ledger, other, again.id, ["rate"], [], override=override | {"keys": {"optimizer.lr": usual / 100}})
    assert (
        apply_anomaly_policy(ledger, automatic, other).code == "diagnosis.person_decides"
    )  # the rate was already lowered here once
    assert accept_diagnosis(ledger, other, "ada").code == "diagnosis.rate_lowered"
    assert find_recipe_override(ledger, "trunk", None) == RecipeOverride(
        {"optimizer.lr": usual / 100}, 17, f"anomaly {other}: rate"
    )
    reject_diagnosis(ledger, other, "ada")
    assert find_recipe_override(ledger, "trunk", None) is None


def test_a_rejected_diagnosis_frees_only_its_documents_and_the_policy_spares_them(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    fate = lambda: ledger.read("SELECT fate FROM documents WHERE key = :key", key=key)[0]["fate"]
    asked, done = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, asked, 1, ["bad data"], [key])
    diagnosed(ledger, done, 1, ["bad data"], [key])
    apply_anomaly_policy(ledger, AnomalyPolicy(), done)
    assert (
        reject_diagnosis(ledger, asked, "ada").code == "diagnosis.rejected" and fate() == "quarantined"
    )  # for the other one
    assert "again" in reject_diagnosis(ledger, done, "ada") and fate() == "train"
    again = plan_trunk(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    next_one = note(ledger, again, 12)
    diagnosed(ledger, next_one, again, ["bad data"], [key])
    assert (
        apply_anomaly_policy(ledger, AnomalyPolicy(), next_one).code == "diagnosis.person_decides" and fate() == "train"
    )
    accept_diagnosis(ledger, next_one, "ada")
    assert fate() == "quarantined"


def test_the_policy_does_not_lower_a_learning_rate_after_a_person_rejected_it(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    override = {"keys": {"optimizer.lr": 1e-4}, "until": 17}
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate"], [], override=override)
    automatic = AnomalyPolicy(rate="automatic")
    apply_anomaly_policy(ledger, automatic, number)
    reject_diagnosis(ledger, number, "ada")
    again = plan_trunk(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == again).values(state="done"))
    other = note(ledger, again, 12)
    diagnosed(ledger, other, again, ["rate"], [], override=override)
    assert (
        apply_anomaly_policy(ledger, automatic, other).code == "diagnosis.person_decides"
        and find_recipe_override(ledger, "trunk", None) is None
    )


def test_accepting_a_diagnosis_of_a_replaced_segment_overrides_nothing(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    spoiled, late = note(ledger, 1, 2), note(ledger, 1, 12)
    diagnosed(ledger, spoiled, 1, ["bad data"], [key])
    diagnosed(ledger, late, 1, ["rate"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    apply_anomaly_policy(ledger, AnomalyPolicy(), late)
    apply_anomaly_policy(ledger, AnomalyPolicy(), spoiled)
    plan_trunk(Plant(workspace, ledger))
    assert (
        accept_diagnosis(ledger, late, "ada").code == "diagnosis.accepted"
        and find_recipe_override(ledger, "trunk", None) is None
    )


def test_a_promoted_candidate_that_is_rewound_is_not_released(
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
    apply_anomaly_policy(ledger, AnomalyPolicy(), number)
    assert due_of(Plant(workspace, ledger), "release") == []
    with pytest.raises(InputError, match="segment 1 .* was rewound"):
        release_candidate(Plant(workspace, ledger), verdict, approved_by="ada")


def test_a_failed_segment_that_continues_a_rewound_one_does_not_stop_training(
    restored: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = restored
    key = ledger.read("SELECT key FROM documents WHERE fate = 'train' ORDER BY key")[0]["key"]
    failed = plan_anneal(Plant(workspace, ledger))
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == failed).values(state="failed"))
    assert stuck(Plant(workspace, ledger)) == failed
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["bad data"], [key])
    accept_diagnosis(ledger, number, "ada")
    assert stuck(Plant(workspace, ledger)) is None
    assert next_due(Plant(workspace, ledger)) == "plan_trunk"


def test_the_learning_rate_is_not_lowered_if_it_is_one_of_two_causes(restored: tuple[Workspace, Ledger]) -> None:
    _, ledger = restored
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["rate", "hardware"], [], override={"keys": {"optimizer.lr": 1e-4}, "until": 17})
    assert apply_anomaly_policy(ledger, AnomalyPolicy(rate="automatic"), number).data["repeats"] == ""
    assert (
        accept_diagnosis(ledger, number, "ada").code == "diagnosis.accepted"
        and find_recipe_override(ledger, "trunk", None) is None
    )


def test_an_anomaly_that_was_not_replayed_is_not_closed_as_healthy(restored: tuple[Workspace, Ledger]) -> None:
    _, ledger = restored
    near, far = note(ledger, 1, 12), note(ledger, 1, 13)
    diagnosed(ledger, near, 1, ["new generation"], [], noted=(12, 14))
    diagnosed(ledger, far, 1, ["new generation"], [], noted=(12, 40))
    assert apply_anomaly_policy(ledger, AnomalyPolicy(), near).code == "diagnosis.healthy"
    assert apply_anomaly_policy(ledger, AnomalyPolicy(), far).code == "diagnosis.person_decides"
    assert [row.id for row in list_open_anomalies(ledger, KINDS)] == [far]


@pytest.mark.parametrize("rejected", [False, True])
def test_a_patch_that_is_blamed_is_undone_by_a_proposal_unless_a_person_rejects_it(
    restored: tuple[Workspace, Ledger], rejected: bool
) -> None:
    workspace, ledger = restored
    before = get_live_commit(workspace.repository)
    text = (workspace.repository / "trainer/run.py").read_text()
    after = merge_patch(workspace, ledger, 1, {"trainer/run.py": text + "\n# a remark\n"})
    assert find_blamed_patches(Plant(workspace, ledger), ["code change"], after, before) == [1]
    assert find_blamed_patches(Plant(workspace, ledger), ["code change"], after, after) == []  # it was there before
    assert find_blamed_patches(Plant(workspace, ledger), ["faulty kernel"], after, before) == []  # it changed no kernel
    assert find_blamed_patches(Plant(workspace, ledger), ["rate"], after, before) == []
    number = note(ledger, 1, 12)
    diagnosed(ledger, number, 1, ["code change"], [], undo=[1])
    with ledger.begin() as tx:
        record_verdict(
            tx, DIAGNOSIS, Subject("segment", 1), against=None, policy_sha256="", subject_sha256=after, outcome="reject",
            reasons=["it is gone without it"], evidence={"anomaly": number},
        )  # fmt: skip
        claim = {"says": "It stays with older weights.", "rests_on": "older weights", "shows": "there"}
        event = read_newest_details_by_anomaly(ledger, DIAGNOSED)[number]["event"]
        record_event(
            tx,
            EXPLAINED,
            Subject("anomaly", number),
            {"diagnosis": event, "failed": "", "claims": [claim], "dropped": []},
        )
    assert "undoes proposal 1" in apply_anomaly_policy(ledger, AnomalyPolicy(), number)
    if rejected:
        reject_diagnosis(ledger, number, "ada")
        assert propose_reverts_of_blamed_patches(Plant(workspace, ledger)) == []
        return
    (opened,) = propose_reverts_of_blamed_patches(Plant(workspace, ledger))
    row = ProposalRow.get(ledger, opened)
    assert row.target == "undo:1" and row.outcome == "promote" and "blames proposal 1" in (row.reasons or [""])[0]
    words = "In a language model's words: It stays with older weights. [older weights: there]"
    assert row.hypothesis.endswith(words) and words in git(workspace.repository, "log", "-1", "--format=%B", row.branch)
    assert propose_reverts_of_blamed_patches(Plant(workspace, ledger)) == []


@pytest.fixture
def past(workspace: Workspace, ledger: Ledger) -> Ledger:
    """Trunk 1 → trunk 2 → anneal 3 (release 1) and trunk 4, over a token shard with three documents."""
    plan = {"token_shards": [{"id": "t", "path": "t", "generation": 1}]}
    with ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="p", plan=plan, created_at=0.0))
        for number, kind, parent in ((1, "trunk", None), (2, "trunk", 1), (3, "anneal", 2), (4, "trunk", 2)):
            folder = workspace.segments / f"{number:05d}-{kind}"
            path = folder / "checkpoints" / "step-00000005"
            path.mkdir(parents=True)
            (path / "manifest.json").write_text("{}")
            tx.execute(
                segments.insert().values(
                    id=number, kind=kind, parent=parent, generation=1, recipe="r", recipe_json={}, recipe_sha256="r", data_plan="p",
                    code_commit="c", first_step=0, last_step=5, state="done", result={}, folder=str(folder), created_at=0.0,
                )
            )  # fmt: skip
            tx.execute(
                checkpoints.insert().values(id=f"c{number}", segment=number, step=5, path=str(path), created_at=0.0)
            )
        tx.execute(
            candidates.insert().values(
                id=1, segment=3, checkpoint="c3", export_path="e", export_sha256="e", created_at=0.0
            )
        )
        tx.execute(
            verdicts.insert().values(
                id=1, gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="promote", reasons=[],
                evidence={}, created_at=0.0,
            )
        )  # fmt: skip
        tx.execute(releases.insert().values(number=1, candidate=1, verdict=1, state="published", created_at=0.0))
        tx.execute(shards.insert().values(sha256="s", name="s", path="s", bytes=1, state="ingested", ingested_at=0.0))
        for key, fate in (("s:0", "train"), ("s:1", "train"), ("s:2", "held_out")):
            tx.execute(
                documents.insert().values(
                    key=key, id=f"d{key[-1]}", shard="s", row=int(key[-1]), domain="x", fate=fate, token_shard="t"
                )
            )
    return ledger


def states(ledger: Ledger) -> dict[int, str]:
    return {row.id: row.state for row in SegmentRow.select(ledger)}


def test_a_rewind_includes_all_descendants(past: Ledger) -> None:
    said = rewind_segment(past, 2, "ann", "wrong data")
    assert said.code == "diagnosis.rewound" and (said.data["segments"], said.data["parent"]) == ([2, 3, 4], 1)
    assert "the end of segment 1" in said and said.data["releases"].data["releases"] == [1]
    assert states(past) == {1: "done", 2: "rewound", 3: "rewound", 4: "rewound"}
    (found,) = past.select_rows(sa.select(events).where(events.c.subject == "segment:4"))
    assert (found["kind"], found["detail"]) == ("segment_rewound", {"by": "ann", "why": "wrong data"})
    with refused("diagnosis.already_rewound", InputError, segment=3, state="rewound"):
        rewind_segment(past, 3, "ann")
    again = rewind_segment(past, 1, "ann")
    assert again.data["parent"] is None and "from step 0" in again


def test_a_segment_whose_parent_has_no_checkpoint_is_not_rewound(past: Ledger) -> None:
    (Path(SegmentRow.get(past, 2).folder) / "checkpoints" / "step-00000005" / "manifest.json").unlink()
    with refused("diagnosis.no_checkpoint_to_rewind_to", InputError, segment=4) as raised:
        rewind_segment(past, 4, "ann")
    assert "00002-trunk" in str(raised.value) and "trunk_segments" in str(raised.value)
    assert set(states(past).values()) == {"done"}


def test_a_document_quarantined_by_a_person_is_masked_until_it_is_freed(past: Ledger) -> None:
    said = quarantine_documents(past, ["d0", "s:1"], "ann", "private")
    assert said.code == "diagnosis.quarantined_by_person" and said.data["documents"] == 2
    assert said.data["releases"].code == "diagnosis.releases_may_have_seen"
    assert said.data["releases"].data == {"releases": [1]}
    assert sorted(_left_out(past, {"t"})) == ["s:0", "s:1"]
    (mark,) = past.select_rows(sa.select(events).where(events.c.kind == RELEASE_MARKED))
    assert mark["subject"] == "release:1" and mark["detail"]["documents"] == ["s:0", "s:1"]
    freed = end_document_quarantine(past, ["d0"], "ann")
    assert (freed.code, freed.data) == ("diagnosis.freed", {"documents": 1})
    assert _left_out(past, {"t"}) == ["s:1"]


def test_the_maker_of_a_document_stays_recorded(past: Ledger) -> None:
    maker = "synthetic, by release 1 (weights 0123456789abcdef)"
    with past.begin() as tx:
        tx.execute(documents.update().where(documents.c.key == "s:0").values(detail=f"{maker}; replaced: 1 email"))
    detail = lambda: [
        row["detail"] for row in past.read("SELECT detail FROM documents WHERE fate <> 'held_out' ORDER BY key")
    ]
    quarantine_documents(past, ["s:0", "s:1"], "ann", "private")
    assert detail() == [f"{maker}; by ann: private", "by ann: private"]
    end_document_quarantine(past, ["s:0", "s:1"], "ann")
    assert detail() == [maker, None]


@pytest.mark.parametrize(
    ("names", "code"),
    [(["d0", "nobody"], "diagnosis.unknown_document"), (["d0", "d2"], "diagnosis.not_trained_on")],
)
def test_one_wrong_name_in_a_quarantine_changes_nothing(past: Ledger, names: list[str], code: str) -> None:
    with refused(code, InputError) as raised:
        quarantine_documents(past, names, "ann")
    assert repr(names[1]) in str(raised.value) and "othing was changed" in str(raised.value)
    assert raised.value.data.get("fate") == ("held_out" if names[1] == "d2" else None)
    assert _left_out(past, {"t"}) == []
    with refused("diagnosis.not_quarantined", InputError, document="d0", fate="train"):
        end_document_quarantine(past, ["d0"], "ann")


def test_an_id_of_several_documents_is_refused_until_a_key_is_named(past: Ledger) -> None:
    with past.begin() as tx:
        tx.execute(documents.update().where(documents.c.key != "s:1").values(id="3"))
        tx.execute(documents.insert().values(key="s:3", id="3", shard="s", row=3, domain="x", fate="train", source="b"))
    for names in (["3"], ["s:1", "3"]):
        with pytest.raises(InputError) as found:
            quarantine_documents(past, names, "ann")
        data = {"documents": 2, "id": "3", "keys": "s:0 (s, train); s:3 (source b, s, train)"}
        assert (found.value.code, found.value.data) == ("data.ambiguous_id", data)
    assert _left_out(past, {"t"}) == []
    quarantine_documents(past, ["s:0"], "ann")
    quarantine_documents(past, ["3"], "ann")  # the only one of them that is trained on
    with pytest.raises(InputError, match="2 documents .*'3'"):
        end_document_quarantine(past, ["3"], "ann")


def test_the_commands_quarantine_a_document_and_rewind_a_segment(past: Ledger, workspace: Workspace) -> None:
    home = ["-w", str(workspace.root)]
    assert factory("quarantine", "d1", "--why", "private", *home).stdout.startswith("  1 document is quarantined")
    assert "training uses 1 document again" in factory("quarantine", "d1", "--undo", *home).stdout
    assert "egment 4 is rewound" in factory("rewind", "4", "--json", *home).stdout
