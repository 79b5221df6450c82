"""A person overrides a hold: when this is allowed, for which export, how it is recorded, and what happens after a kill."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

import factory.cli  # noqa: F401 (registers every command)
from factory.cli.app import app
from factory.cli.core.options import get_current_user
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.gates.release.evidence import ReleaseEvidence
from factory.ledger.ledger import Ledger, anomalies, documents, events, verdicts
from factory.ledger.ledger import releases as releases_table
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, VerdictRow, find_champion
from factory.release import releases
from factory.release.approvals import record_rejection
from factory.release.checks import OutOfDateVerdictError
from factory.show.mlflow.approval_answers import ApprovalResponder
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.releases import register_candidate
from factory.show.mlflow.store import open_client
from factory.show.pages.release_facts import list_releases, read_release_details
from factory.show.unshown_items import show_unshown_items
from tests.support.factory.shown import override, reconcile, release
from tests.support.gates.release_evidence import changed, evidence, gain
from tests.support.killed_at import killed_at, lines_run
from tests.support.messages import refused, the
from tests.support.plants.release_scene import (
    add_candidate,
    add_document,
    add_judged,
    add_shard,
    add_verdict,
    approval,
    with_store,
)

WHY = "the demo is tomorrow"
HELD = evidence(target=0.005)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with release 1 and candidate 2, which has no verdict yet. Each test has a copy."""
    workspace = with_store(Workspace.create(tmp_path_factory.mktemp("made") / "workspace"))
    ledger = Ledger.create(workspace.ledger_url)
    approval(workspace, "automatic")
    add_shard(ledger)
    add_document(ledger, "MIT")
    for _ in range(2):
        add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, 1))
    ledger.engine.dispose()
    return workspace.root


@pytest.fixture
def workspace(made: Path, tmp_path: Path) -> Workspace:
    return Workspace.open(shutil.copytree(made, tmp_path / "workspace", symlinks=True))


@pytest.fixture
def scene(workspace: Workspace) -> Ledger:
    return Ledger.open(workspace.ledger_url)


def recorded(ledger: Ledger) -> list[tuple[str, str]]:
    rows = ledger.select_rows(sa.select(events).where(events.c.kind == "overridden"))
    return [(row["subject"], row["detail"]["by"] + ": " + row["detail"]["why"]) for row in rows]


def test_a_held_candidate_is_released_by_a_person_with_a_reason(workspace: Workspace, scene: Ledger) -> None:
    verdict = add_judged(scene, 2, HELD, against=1)
    assert VerdictRow.get(scene, verdict).outcome == "hold"
    assert override(Plant(workspace, scene), 2, "ada", f" {WHY}\n") == 2
    assert override(Plant(workspace, scene), 2, "bob", "again") == 2 and release(Plant(workspace, scene), verdict) == 2
    assert recorded(scene) == [(f"verdict:{verdict}", f"ada: {WHY}")], "once"
    row = find_champion(scene)
    assert row is not None and (row.number, row.state, row.approved_by, row.verdict) == (2, "published", "ada", verdict)
    assert [one["override"] and one["override"]["why"] for one in list_releases(scene)] == [None, WHY]
    told = read_release_details(Plant(workspace, scene), "2")
    assert told["verdict"] == "hold" and told["override"]["by"] == "ada" and told["decision"]["word"] == "overridden"
    assert f"ada: {WHY}" in Path(told["report"]).read_text()
    client = open_client(workspace)
    version = client.get_model_version_by_alias(MODEL, "champion")
    assert version.tags["verdict"] == "hold" and version.tags["release"] == "2"
    assert (version.tags["overridden_by"], version.tags["override_reason"]) == ("ada", WHY)
    assert version.tags["approval"] == "overridden" and f"the candidate: {WHY}" in version.tags["approval_answer"]
    assert "blocked it**, by ada" in (version.description or "")
    assert reconcile(Plant(workspace, scene)) == []


# evidence → the code of the refusal, and a mark in its reasons
REFUSED: dict[str, tuple[ReleaseEvidence, str, str]] = {
    "better": (evidence(), "releases.override_of_promoted", ""),
    "worse": (evidence(target=-0.05), "releases.override_of_worse", ""),
    "a guard violated": (evidence(code=-0.05), "releases.override_of_worse", ""),
    "a failed check": (changed(HELD, "checks", "logits", (False, "0.3 apart")), "releases.override_of_worse", ""),
    "an unmade check": (
        changed(HELD, "checks", "smoke", (None, "no time")),
        "releases.not_overridable",
        "smoke",
    ),
    "contamination unmade": (
        changed(HELD, "checks", "contamination", (None, "no time")),
        "releases.not_overridable",
        "contamination",
    ),
    "licences": (
        replace(HELD, releasable=0.5, not_releasable={"no licence": 0.5}),
        "releases.not_overridable",
        "50.0%",
    ),
    "licences unknown": (replace(HELD, releasable=None), "releases.not_overridable", "icence"),
    "an anomaly": (
        replace(HELD, anomalies=("loss_spike at step 4",)),
        "releases.not_overridable",
        "loss_spike at step 4",
    ),
    "it saw the exam": (
        replace(HELD, on_sealed=gain(0.6), halves_gap=gain(0.6)),
        "releases.not_overridable",
        "sealed",
    ),
    "nothing was measured": (replace(HELD, sealed_looks=1000.0), "releases.not_overridable", "measured"),
}


def test_a_person_can_override_only_a_lack_of_shown_gain(workspace: Workspace, scene: Ledger) -> None:
    for what, (given, code, mark) in REFUSED.items():
        add_judged(scene, 2, given, against=1)
        with refused(code, InputError) as error:
            override(Plant(workspace, scene), 2, "ada", WHY)
        assert mark in error.value.data.get("reasons", "") and "\n" not in str(error.value), (what, error.value)
    assert recorded(scene) == [] and ReleaseRow.find_first(scene, "WHERE candidate = 2") is None


def test_an_override_counts_only_for_the_judged_export_and_evidence(workspace: Workspace, scene: Ledger) -> None:
    add_judged(scene, 2, replace(HELD, look=2), against=1)
    newest = add_judged(scene, 2, HELD, against=1)
    stored = VerdictRow.get(scene, newest).read_evidence(scene)

    def put(**values: Any) -> None:
        with scene.begin() as tx:
            tx.execute(verdicts.update().where(verdicts.c.id == newest).values(values))

    put(evidence=stored | {"target": None})
    with refused("release.record_changed", InputError):
        override(Plant(workspace, scene), 2, "ada", WHY)
    put(evidence=stored, policy_sha256="0" * 64)
    with refused("release.record_changed", InputError):
        override(Plant(workspace, scene), 2, "ada", WHY)
    put(policy_sha256=VerdictRow.get(scene, newest - 1).policy_sha256, subject_sha256="0" * 64)
    with refused("checks.other_export", InputError, verdict=newest):
        override(Plant(workspace, scene), 2, "ada", WHY)
    put(subject_sha256=VerdictRow.get(scene, newest - 1).subject_sha256, against=None)
    with refused("checks.other_champion", InputError, against="no champion", champion="candidate:1"):
        override(Plant(workspace, scene), 2, "ada", WHY)
    with refused("releases.was_not_held", InputError, candidate=1, release=1):
        override(Plant(workspace, scene), 1, "ada", WHY)
    assert recorded(scene) == []


def test_an_override_checks_present_licences_and_anomalies(workspace: Workspace, scene: Ledger) -> None:
    """A person may have corrected a licence or a policy after the verdict, and a new anomaly may exist."""
    add_judged(scene, 2, HELD, against=1)

    def refused_for(mark: str) -> None:
        with refused("releases.not_overridable_now", InputError, subject="candidate:2", candidate=2) as error:
            override(Plant(workspace, scene), 2, "ada", WHY)
        assert mark in error.value.data["reasons"], error.value

    licence(scene, "CC-BY-NC-4.0")
    refused_for("CC-BY-NC-4.0 100.0%")
    licence(scene, "MIT")
    policy = workspace.root / "policies" / "data.yaml"
    policy.write_text("licences: {known: {MIT: {train: true, release: false}}}\n")
    refused_for("MIT 100.0%")
    policy.unlink()
    segment = {"segment": 2, "step": 4, "kind": "loss_spike", "detail": {"step": 4, "kind": "loss_spike"}}
    with scene.begin() as tx:
        tx.execute(anomalies.insert().values(**segment))
    refused_for("loss_spike at step 4")
    with scene.begin() as tx:
        tx.execute(anomalies.delete())
    assert recorded(scene) == [] and override(Plant(workspace, scene), 2, "ada", WHY) == 2


def licence(ledger: Ledger, name: str) -> None:
    with ledger.begin() as tx:
        tx.execute(documents.update().values(license=name))


def test_every_release_checks_present_licences_and_anomalies(workspace: Workspace, scene: Ledger) -> None:
    """A licence of a promoted candidate changed. The command, a decision in MLflow and the policy all refuse the release."""
    approval(workspace, "manual")
    verdict = add_judged(scene, 2, evidence(), against=1)
    licence(scene, "CC-BY-NC-4.0")
    for by in ("ada", None):
        with refused("checks.held_now", OutOfDateVerdictError, subject="candidate:2", candidate=2) as error:
            release(Plant(workspace, scene), verdict, approved_by=by)
        assert "100.0%" in error.value.data["why"] and "CC-BY-NC-4.0" in error.value.data["why"]
        approval(workspace, "automatic")
    approval(workspace, "manual")
    version = register_candidate(Plant(workspace, scene), 2)
    client = open_client(workspace)
    client.set_model_version_tag(MODEL, version, "approval", "approved")
    [line] = ApprovalResponder(Plant(workspace, scene)).answer_new_decisions()
    assert "refused" in line and "CC-BY-NC-4.0" in line
    decided = scene.select_rows(sa.select(events).where(events.c.kind == "approved"))
    assert decided == [] and ReleaseRow.find_first(scene, "WHERE candidate = 2") is None
    licence(scene, "MIT")
    assert release(Plant(workspace, scene), verdict, approved_by="ada") == 2


@pytest.mark.parametrize("seen", [False, True])
def test_an_interrupted_release_is_checked_again_before_it_continues(
    workspace: Workspace, scene: Ledger, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A licence changes after a kill and before the next pass: the release is withdrawn. A public release stays."""
    verdict = add_judged(scene, 2, HELD, against=1)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(releases._Saga, "_publish", killed)
        override(Plant(workspace, scene), 2, "ada", WHY)
    row = ReleaseRow.find_first(scene, "WHERE candidate = 2")
    assert row is not None and row.state == "decided"
    if seen:  # MLflow already shows the decided release
        show_unshown_items(Plant(workspace, scene))
    licence(scene, "CC-BY-NC-4.0")
    with refused("checks.held_now", OutOfDateVerdictError, subject="candidate:2") as error:
        override(Plant(workspace, scene), 2, "ada", WHY)
    assert "CC-BY-NC-4.0" in error.value.data["why"]
    done = the(reconcile(Plant(workspace, scene))[:1], "releases.not_finished")
    assert (done.data["release"], done.data["why"].code) == (2, "checks.held_now")
    assert reconcile(Plant(workspace, scene)) == [], "MLflow shows the present state"
    assert ReleaseRow.find_first(scene, "WHERE candidate = 2") is None and len(recorded(scene)) == 1
    client = open_client(workspace)
    [tags] = [dict(one.tags) for one in client.search_model_versions(f"name = '{MODEL}'") if str(one.version) == "2"]
    assert not {"release", "overridden_by", "override_reason"} & tags.keys() and tags.get("approval", "") == ""
    assert str(client.get_model_version_by_alias(MODEL, "champion").version) == "1"
    assert ApprovalResponder(Plant(workspace, scene)).answer_new_decisions() == []
    assert list_releases(scene)[1]["state"] == "held" and list_releases(scene)[1]["override"] is None
    licence(scene, "MIT")
    with pytest.raises(InputError, match="is 'hold', not 'promote'"):
        release(Plant(workspace, scene), verdict)  # a withdrawn override does not count
    number = override(Plant(workspace, scene), 2, "bob", "again")
    assert [one["override"] and one["override"]["by"] for one in list_releases(scene)] == [None, "bob"]
    licence(scene, "CC-BY-NC-4.0")
    assert reconcile(Plant(workspace, scene)) == [] and override(Plant(workspace, scene), 2, "bob", "again") == number
    best = find_champion(scene)
    assert best is not None and best.number == number


def test_a_rejected_candidate_cannot_be_overridden(workspace: Workspace, scene: Ledger) -> None:
    record_rejection(Plant(workspace, scene), add_judged(scene, 2, evidence(), against=1), "eve", "it swears")
    with refused("releases.override_of_rejected", InputError, decision="rejected by eve: it swears"):
        override(Plant(workspace, scene), 2, "ada", WHY)


@pytest.mark.parametrize("name", ["", " ", "\n", "a\x1b[31mda"])
def test_the_recorded_name_of_the_overriding_person_is_printable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", name)
    monkeypatch.setenv("LOGNAME", "ada  lovelace")
    assert get_current_user() == "ada lovelace"


def test_a_later_verdict_needs_an_override_of_its_own(workspace: Workspace, scene: Ledger) -> None:
    add_judged(scene, 2, HELD, against=1)
    override(Plant(workspace, scene), 2, "ada", WHY)
    again = add_judged(scene, 2, replace(HELD, look=2), against=1)
    with pytest.raises(InputError, match="is 'hold', not 'promote'"):
        release(Plant(workspace, scene), again)


def test_the_command_overrides_a_hold(workspace: Workspace, scene: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    add_judged(scene, 2, HELD, against=1)
    run = lambda *words: CliRunner().invoke(app, ["releases", *words, "--workspace", str(workspace.root)])
    for none in ((), ("--reason", ""), ("--reason", " \n\t"), ("--reason", "\u2800\u200b\x00 –")):
        error = run("override", "2", *none).exception
        assert isinstance(error, InputError) and error.code == "releases.no_reason"
    assert "no candidate 9" in str(run("override", "9", "--reason", WHY).exception)
    error = run("override", "2", "--reason", "x" * 10_000).exception
    assert isinstance(error, InputError) and error.code == "releases.long_reason"
    assert error.data == {"length": 10_000, "limit": 2_000}
    done = run("override", "2", "--reason", WHY, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["release"] == 2
    person = json.loads(done.stdout)["overridden_by"]
    assert f"{person} overrode the gate" in run("show", "2").stdout and WHY in run("show", "2").stdout
    assert "though held, by" in run("list").stdout
    monkeypatch.setenv("USER", "bob")
    again = run("override", "2", "--reason", "mine")
    assert f"overridden by {person}." in again.stdout


# -- killed at any instruction ------------------------------------------------------------------------------------------
KILLS = 5  # spread evenly over the lines that an override executes
OURS = {"releases.py", "registry.py", "serving.py", "checks.py"}


@pytest.fixture(scope="module")
def lines(made: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many lines an override executes."""
    copy = shutil.copytree(made, tmp_path_factory.mktemp("kills") / "measure", symlinks=True)
    workspace = Workspace.open(copy)
    ledger = Ledger.open(workspace.ledger_url)
    add_judged(ledger, 2, HELD, against=1)
    return lines_run(lambda: override(Plant(workspace, ledger), 2, "ada", WHY), OURS)


@pytest.mark.sample("2")  # tests/factory/release/test_releases.py kills a release at another part
@pytest.mark.parametrize("part", range(KILLS))
@pytest.mark.slow("a release, killed at each step")
def test_after_a_kill_anywhere_the_candidate_is_released_once_or_not_at_all(
    workspace: Workspace, scene: Ledger, lines: int, part: int
) -> None:
    assert lines > 100
    ledger = scene
    add_judged(ledger, 2, HELD, against=1)
    opened = lambda: Plant(Workspace.open(workspace.root), Ledger.open(workspace.ledger_url))
    killed_at(1 + part * (lines - 1) // KILLS, lambda: override(opened(), 2, "ada", WHY), OURS)
    decided = ReleaseRow.find_first(ledger, "WHERE candidate = 2")
    assert bool(recorded(ledger)) == (decided is not None), "the override and the release, or neither"
    reconcile(Plant(workspace, ledger))  # the daemon finishes a decided release
    after = find_champion(ledger)
    assert after is not None and after.number == (2 if decided else 1)
    assert override(Plant(workspace, ledger), 2, "ada", WHY) == 2 and recorded(ledger) == [("verdict:2", f"ada: {WHY}")]
    assert [row["state"] for row in ledger.select_rows(releases_table.select())] == ["published", "published"]
    assert reconcile(Plant(workspace, ledger)) == []
