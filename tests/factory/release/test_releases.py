"""The release saga with a real ledger, a real MLflow store and real kills of a real process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, candidates, events, verdicts
from factory.ledger.ledger import releases as releases_table
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, find_champion
from factory.release import published_link, releases
from factory.show.mlflow import registry, runs, store
from factory.show.mlflow.registry import MODEL, list_start_page_addresses
from factory.show.mlflow.releases import ALIAS_SET, register_candidate
from factory.show.mlflow.runs import CLOSED
from factory.show.mlflow.store import open_client
from tests.support.factory.shown import reconcile, release, rollback
from tests.support.killed_at import killed_at, lines_run
from tests.support.messages import codes, refused, the
from tests.support.plants.release_scene import add_candidate, add_shard, add_verdict, approval, with_store


@pytest.fixture(autouse=True)
def policy(workspace: Workspace) -> None:
    with_store(workspace)
    approval(workspace, "automatic")


def in_mlflow(workspace: Workspace) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """([(version, verdict)], aliases) as a person sees them."""
    client = open_client(workspace)
    found = sorted((str(v.version), v.tags["verdict"]) for v in client.search_model_versions(f"name = '{MODEL}'"))
    return found, registry.read_aliases(client)


def kinds(ledger: Ledger) -> list[str]:
    """The kinds of all events, without those about MLflow's display."""
    rows = ledger.select_rows(sa.select(events.c.kind).order_by(events.c.id))
    return [row["kind"] for row in rows if row["kind"] not in (ALIAS_SET, CLOSED)]


def best(ledger: Ledger) -> ReleaseRow:
    found = find_champion(ledger)
    assert found is not None
    return found


def test_a_release_changes_alias_link_and_ledger_once(workspace: Workspace, ledger: Ledger) -> None:
    add_shard(ledger)
    assert find_champion(ledger) is None
    verdict = add_verdict(ledger, add_candidate(workspace, ledger))
    assert release(Plant(workspace, ledger), verdict) == release(Plant(workspace, ledger), verdict) == 1
    row = best(ledger)
    assert (row.number, row.state, row.approved_by, row.mlflow_version) == (1, "published", "policy", "1")
    assert in_mlflow(workspace) == ([("1", "promote")], {"champion": "1", "candidate": "1"})
    assert (published_link.read_publication_record(workspace) or {})["release"] == 1
    assert kinds(ledger) == ["release_decided", "promoted"]
    assert "Release 1" in Path(row.report or "").read_text()

    client = open_client(workspace)
    version = client.get_model_version_by_alias(MODEL, "champion")
    assert version.tags["bpb.code"] == "2.1000" and version.tags["release"] == "1"
    assert version.tags["export_sha256"] == row.export_sha256 and version.tags["code_commit"] == "c" * 40
    files = {a.path for a in client.list_artifacts(version.run_id)}
    assert {"model", "report.html", "samples.json"} <= files
    model = workspace.mlflow_artifacts / "candidates" / version.run_id / "artifacts" / "model"
    assert (model / "MLmodel").is_file() and version.source == model.as_uri()
    assert reconcile(Plant(workspace, ledger)) == []


def test_a_second_release_and_a_rollback(workspace: Workspace, ledger: Ledger) -> None:
    first, second = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, first))
    assert release(Plant(workspace, ledger), add_verdict(ledger, second, against=first)) == 2
    assert in_mlflow(workspace)[1] == {"champion": "2", "candidate": "2"}
    rollback(Plant(workspace, ledger), 1)
    rollback(Plant(workspace, ledger), 1)
    assert best(ledger).number == 1
    assert in_mlflow(workspace)[1] == {"champion": "1", "candidate": "2"}
    assert (published_link.read_publication_record(workspace) or {})["release"] == 1
    assert kinds(ledger).count("rolled_back") == 1 and "repaired" not in kinds(ledger)
    assert reconcile(Plant(workspace, ledger)) == []
    with refused("rows.unknown_key", InputError, noun="release", key=7, known=["1", "2"]):
        rollback(Plant(workspace, ledger), 7)


@pytest.mark.parametrize("outcome", ["hold", "reject"])
def test_only_promoted_candidates_are_released_but_all_judged_ones_are_shown(
    workspace: Workspace, ledger: Ledger, outcome: str
) -> None:
    candidate = add_candidate(workspace, ledger)
    with refused("checks.not_judged", InputError, candidate=candidate):
        register_candidate(Plant(workspace, ledger), candidate)
    verdict = add_verdict(ledger, candidate, outcome)
    with refused("checks.not_promoted", InputError, verdict=verdict, outcome=outcome):
        release(Plant(workspace, ledger), verdict)
    assert reconcile(Plant(workspace, ledger)) == []
    assert in_mlflow(workspace)[0] == [("1", outcome)]
    assert register_candidate(Plant(workspace, ledger), candidate) == "1"
    assert in_mlflow(workspace) == ([("1", outcome)], {"candidate": "1"})
    assert find_champion(ledger) is None and ledger.select_rows(releases_table.select()) == []
    with refused("checks.no_verdict", InputError, verdict=99):
        release(Plant(workspace, ledger), 99)


def test_an_export_that_differs_from_the_judged_one_is_not_released(workspace: Workspace, ledger: Ledger) -> None:
    candidate = add_candidate(workspace, ledger)
    verdict = add_verdict(ledger, candidate)
    export = workspace.exports / "candidate-1"
    weights = (export / "model.safetensors").read_bytes()
    (export / "model.safetensors").write_bytes(weights[:-1] + b"!")
    with refused("checks.changed_export", InputError, candidate=candidate):
        release(Plant(workspace, ledger), verdict)
    (export / "model.safetensors").write_bytes(weights)
    (export / "extra.json").symlink_to("/etc/passwd")
    with refused("exports.not_a_file", InputError, path=export / "extra.json"):
        release(Plant(workspace, ledger), verdict)
    (export / "extra.json").unlink()
    with ledger.begin() as tx:  # the candidate's row changed after the verdict
        (export / "config.json").write_text("{}")
        tx.execute(candidates.update().values(export_sha256=hash_export_folder(export)))
    with refused("checks.other_export", InputError, verdict=verdict):
        release(Plant(workspace, ledger), verdict)
    assert ledger.select_rows(releases_table.select()) == [] and kinds(ledger) == []


def test_an_interrupted_release_whose_export_changed_is_reported_and_not_published(
    workspace: Workspace, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, first))
    second = add_candidate(workspace, ledger)
    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(published_link, "publish_export", lambda *_: (_ for _ in ()).throw(RuntimeError("power")))
        release(Plant(workspace, ledger), add_verdict(ledger, second, against=first))
    assert in_mlflow(workspace)[1]["champion"] == "1", "a release that is not public is not shown as champion"
    (workspace.exports / "candidate-2" / "config.json").write_text("changed")
    done = reconcile(Plant(workspace, ledger))
    assert the(done, "releases.not_finished").data["release"] == 2
    assert in_mlflow(workspace)[1]["champion"] == "1" and best(ledger).number == 1


def test_changes_by_people_in_mlflow_do_not_change_the_champion(workspace: Workspace, ledger: Ledger) -> None:
    first, second = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, first))
    add_verdict(ledger, second, "reject", against=first)
    register_candidate(Plant(workspace, ledger), second)
    client = open_client(workspace)
    client.set_registered_model_alias(MODEL, "champion", "2")
    (workspace.exports / "champion").unlink()
    [done] = reconcile(Plant(workspace, ledger))
    assert codes([done]) == ["releases.published_again"] and kinds(ledger)[-2:] == ["repaired", "repaired"]
    assert in_mlflow(workspace)[1] == {"champion": "1", "candidate": "2"}
    client.delete_model_version(MODEL, "1")
    reconcile(Plant(workspace, ledger))
    assert in_mlflow(workspace)[1]["champion"] == "3" and best(ledger).mlflow_version == "3"
    assert reconcile(Plant(workspace, ledger)) == []


# -- killed at any instruction ------------------------------------------------------------------------------------------
KILLS = 6  # spread evenly over the lines that a release executes
OURS = {Path(module.__file__ or "").name for module in (releases, published_link, registry, runs, store)}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A workspace with release 1, the verdict for release 2, and the number of lines that this release executes."""
    root = tmp_path_factory.mktemp("kills")
    workspace = with_store(Workspace.create(root / "measure"))
    approval(workspace, "automatic")
    ledger = Ledger.create(workspace.ledger_url)
    first, second = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, first))
    verdict = add_verdict(ledger, second, against=first)
    ledger.engine.dispose()
    copy = shutil.copytree(workspace.root, root / "copy", symlinks=True)
    return copy, verdict, lines_run(lambda: release(Plant(workspace, ledger), verdict), OURS)


@pytest.mark.sample("4")  # tests/chaos kills a release at each durable effect
@pytest.mark.parametrize("part", range(KILLS))
@pytest.mark.slow("a release, killed at each step")
def test_after_a_kill_anywhere_the_release_exists_once(
    template: tuple[Path, int, int], tmp_path: Path, part: int
) -> None:
    copy, verdict, lines = template
    assert lines > 200
    workspace = Workspace.open(shutil.copytree(copy, tmp_path / "kill", symlinks=True))
    ledger = Ledger.open(workspace.ledger_url)
    call = lambda: release(Plant(Workspace.open(workspace.root), Ledger.open(workspace.ledger_url)), verdict)
    killed_at(1 + part * (lines - 1) // KILLS, call, OURS)
    shown = published_link.read_publication_record(workspace)
    assert shown is None or shown["release"] in (1, 2)
    assert (workspace.exports / "champion" / "config.json").exists(), "a whole model is served at every moment"

    reconcile(Plant(workspace, ledger))
    assert release(Plant(workspace, ledger), verdict) == 2
    assert [row["state"] for row in ledger.select_rows(releases_table.select())] == ["published", "published"]
    assert in_mlflow(workspace) == ([("1", "promote"), ("2", "promote")], {"champion": "2", "candidate": "2"})
    assert kinds(ledger).count("promoted") == 2 and best(ledger).number == 2
    assert (published_link.read_publication_record(workspace) or {})["release"] == 2
    assert reconcile(Plant(workspace, ledger)) == []


def test_mlflow_shows_a_version_with_its_numbers_and_reasons(workspace: Workspace, ledger: Ledger) -> None:
    """Runs open as training runs. A version's page has the decisive numbers and one reason on each line."""
    first, second = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    release(Plant(workspace, ledger), add_verdict(ledger, first))
    verdict = add_verdict(ledger, second, "hold", against=first)
    measured = {"gain": 0.2, "error": 0.01, "clusters": 12, "effective": 12.0}
    evidence = {"target": measured, "guards": {"code": measured, "a|b": measured | {"gain": -0.1}}, "releasable": 0.5}
    reasons = ["code: 1 → 2.", "**chat** <b>worse</b> | a cell"]
    with ledger.begin() as tx:
        tx.execute(verdicts.update().where(verdicts.c.id == verdict).values(evidence=evidence, reasons=reasons))
    reconcile(Plant(workspace, ledger))
    client = open_client(workspace)
    kinds_by_name = {one.name: one.tags for one in client.search_experiments() if one.name != "Default"}
    shown_as = {name: tags["mlflow.experimentKind"] for name, tags in kinds_by_name.items()}
    assert shown_as == dict.fromkeys(("candidates", "training"), "custom_model_development")
    assert "factory-lm in the model registry" in kinds_by_name["candidates"]["mlflow.note.content"]
    version = client.get_model_version(MODEL, "2")
    assert client.get_run(version.run_id).data.tags["mlflow.note.content"].startswith("Candidate 2, from segment 2")
    text = version.description
    assert text.startswith("HOLD: candidate 2 over candidate 1\n"), (
        "the list of versions shows the text without formatting"
    )
    assert "| gain in bits per byte &emsp; | +0.200 (95 %: +0.178 … +0.222) |" in text
    assert "| worst guard &emsp; | a\\|b −0.100 (95 %: −0.122 … −0.078) |" in text
    assert "| releasable tokens &emsp; | 50.0% |" in text
    run = client.get_run(version.run_id)
    mode = "workflowType=machine_learning"
    assert f"(#/experiments/{run.info.experiment_id}/runs/{version.run_id}/artifacts/report.html?{mode})" in text
    assert f"](get-artifact?path=comparison/gain.svg&run_uuid={version.run_id})" in text
    pictures = {one.path for one in client.list_artifacts(version.run_id, "comparison")}
    assert pictures == {f"comparison/{name}.svg" for name in ("gain", "bits_per_byte", "loss")}
    champions = client.get_model_version(MODEL, "1").run_id
    beside = (
        f"runs=%5B%22{version.run_id}%22%2C%20%22{champions}%22%5D&experiments=%5B%22{run.info.experiment_id}%22%5D"
    )
    assert f"[comparison with candidate 1](#/compare-runs?{beside}&{mode})" in text
    assert run.data.metrics["gain/target"] == 0.2 and run.data.metrics["gain/a_b"] == -0.1
    assert [one.info.run_id for one in client.search_runs([run.info.experiment_id], "tags.verdict = 'hold'")] == [
        version.run_id
    ]
    assert (
        "- code: 1 → 2." in text.splitlines()
        and "- \\*\\*chat\\*\\* \\<b\\>worse\\</b\\> \\| a cell" in text.splitlines()
    )
    assert version.tags["gain"] == "+0.2000" and version.tags["judged_at"].startswith("2023-11-14")
    found = client.search_model_versions(f"name = '{MODEL}' and tags.verdict = 'hold'")
    assert [one.version for one in found] == [version.version]
    training = client.get_experiment_by_name("training")
    pages = list_start_page_addresses(workspace, "http://127.0.0.1:5000")
    assert pages == {
        "releases": f"http://127.0.0.1:5000/#/models/factory-lm?{mode}",
        "candidates": f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}?{mode}",
        "training": f"http://127.0.0.1:5000/#/experiments/{training.experiment_id}?{mode}",
    }
    # After another verdict the page changes.
    add_verdict(ledger, second, "reject", against=first)
    reconcile(Plant(workspace, ledger))
    assert (client.get_model_version(MODEL, "2").description or "").startswith("REJECT: candidate 2")
