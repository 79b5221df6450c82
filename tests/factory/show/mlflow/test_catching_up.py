"""What is behind in MLflow is shown one by one: what one meets holds up nothing behind it."""

from __future__ import annotations

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, evaluations
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow
from factory.release import releases
from factory.show.catching_up import catch_up
from factory.show.mlflow import registry
from factory.show.mlflow.runs import Tracking
from factory.show.mlflow.store import open_client
from tests.support.plants.release_scene import add_candidate, add_shard, add_verdict, approval, with_store
from tests.support.said import Said


def test_a_run_that_a_person_deleted_holds_up_no_alias_and_is_said_once(workspace: Workspace, ledger: Ledger) -> None:
    approval(with_store(workspace), "automatic")
    add_shard(ledger)
    plant = Plant(workspace, ledger, said := Said())
    rejected, good = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    add_verdict(ledger, rejected, "reject")
    releases.release(plant, add_verdict(ledger, good))
    catch_up(plant)
    client = open_client(workspace)
    version = registry.find_version(client, rejected, CandidateRow.get(ledger, rejected).export_sha256)
    assert version and registry.aliases(client)["champion"] == "2"
    client.delete_model_version(registry.MODEL, version.version)
    client.delete_run(Tracking.open(plant).candidate_run(rejected))
    better = add_candidate(workspace, ledger)
    releases.release(plant, add_verdict(ledger, better, against=good))
    for _ in range(3):
        catch_up(plant)
    assert registry.aliases(client)["champion"] == "3"
    assert len([line for line in said.lines if "candidate 1 cannot be shown" in line]) == 1


def test_a_page_that_cannot_be_made_holds_up_nothing(workspace: Workspace, ledger: Ledger) -> None:
    approval(with_store(workspace), "automatic")
    add_shard(ledger)
    plant = Plant(workspace, ledger, said := Said())
    bad, good = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    add_verdict(ledger, bad, "reject")
    add_verdict(ledger, good)
    with ledger.begin() as tx:  # as an older factory, or a hand, left it
        tx.execute(evaluations.update().where(evaluations.c.candidate == bad).values(summary="odd"))
    for _ in range(2):
        catch_up(plant)
    assert (workspace.reports / f"candidate-{good}.html").is_file()
    assert len([line for line in said.lines if "candidates' pages" in line]) == 1, said.lines
    assert registry.find_version(open_client(workspace), good, CandidateRow.get(ledger, good).export_sha256)
