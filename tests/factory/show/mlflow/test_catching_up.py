"""Things that MLflow lacks are shown one by one. A thing that cannot be shown does not stop the others."""

from __future__ import annotations

import time

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, evaluations, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, Subject
from factory.release import releases
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner
from factory.show.mlflow import registry
from factory.show.mlflow.runs import ARM_SHOWN, ARMS, MlflowTracking
from factory.show.mlflow.store import open_client
from factory.show.unshown_items import show_unshown_items
from tests.support.plants.release_scene import (
    add_candidate,
    add_shard,
    add_verdict,
    approval,
    with_store,
    write_metrics,
)
from tests.support.said import Said


def test_a_run_that_a_person_deleted_is_reported_once_and_blocks_no_alias(workspace: Workspace, ledger: Ledger) -> None:
    approval(with_store(workspace), "automatic")
    add_shard(ledger)
    plant = Plant(workspace, ledger, said := Said())
    rejected, good = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    add_verdict(ledger, rejected, "reject")
    releases.release_candidate(plant, add_verdict(ledger, good))
    show_unshown_items(plant)
    client = open_client(workspace)
    version = registry.find_candidate_version(client, rejected, CandidateRow.get(ledger, rejected).export_sha256)
    assert version and registry.read_aliases(client)["champion"] == "2"
    client.delete_model_version(registry.MODEL, version.version)
    client.delete_run(MlflowTracking.open(plant).update_candidate_run(rejected))
    better = add_candidate(workspace, ledger)
    releases.release_candidate(plant, add_verdict(ledger, better, against=good))
    for _ in range(3):
        show_unshown_items(plant)
    assert registry.read_aliases(client)["champion"] == "3"
    assert len([line for line in said.lines if "Candidate 1 cannot be shown" in line]) == 1


def test_a_page_that_cannot_be_written_blocks_nothing_else(workspace: Workspace, ledger: Ledger) -> None:
    approval(with_store(workspace), "automatic")
    add_shard(ledger)
    plant = Plant(workspace, ledger, said := Said())
    bad, good = add_candidate(workspace, ledger), add_candidate(workspace, ledger)
    add_verdict(ledger, bad, "reject")
    add_verdict(ledger, good)
    with ledger.begin() as tx:  # as an older factory, or a hand, left it
        tx.execute(evaluations.update().where(evaluations.c.candidate == bad).values(summary="odd"))
    for _ in range(2):
        show_unshown_items(plant)
    assert (workspace.reports / f"candidate-{good}.html").is_file()
    assert len([line for line in said.lines if "candidates' pages" in line]) == 1, said.lines
    assert registry.find_candidate_version(open_client(workspace), good, CandidateRow.get(ledger, good).export_sha256)


def test_after_the_clock_was_set_back_a_page_is_not_written_in_each_pass(workspace: Workspace, ledger: Ledger) -> None:
    approval(with_store(workspace), "automatic")
    add_shard(ledger)
    plant = Plant(workspace, ledger)
    number = add_candidate(workspace, ledger)
    add_verdict(ledger, number)
    with ledger.begin() as tx:  # by a clock of tomorrow
        tx.execute(verdicts.update().values(created_at=time.time() + 86_400))
    for _ in range(2):  # MLflow's first showing writes it, too
        show_unshown_items(plant)
    page = workspace.reports / f"candidate-{number}.html"
    first = page.stat().st_ino
    show_unshown_items(plant)
    assert page.stat().st_ino == first


def test_the_run_of_an_arm_shows_its_changes_to_the_recipe_and_its_loss_curve(
    workspace: Workspace, ledger: Ledger
) -> None:
    plant = Plant(with_store(workspace), ledger)
    base = {"recipe": {"optimizer": {"lr": 0.1}}, "data_plan": {"token_shards": []}, "first_step": 4, "last_step": 6}
    arm = Arm("low rate", {**base, "initial_checkpoint": None}, "c0ffee", recipe={"optimizer.lr": 0.01})
    runs = ArmRunner(plant, workspace.root / "certificate", "certificate", Subject("segment", 3))
    runs.find_arm_folder(arm).mkdir(parents=True)
    write_metrics(runs.find_arm_folder(arm) / "metrics.jsonl", 4, 6)

    def told() -> tuple[str, dict[str, str]]:
        (found,) = open_client(workspace).search_runs(
            [open_client(workspace).get_experiment_by_name(ARMS).experiment_id]
        )
        return found.info.status, found.data.tags

    with runs.record_arm_states({runs.find_arm_folder(arm): arm}) as ends:
        show_unshown_items(plant)
        assert open_client(workspace).get_experiment_by_name(ARMS) is None, "it still runs"
        ends[arm.key] = "exit 2: no data"
    show_unshown_items(plant)
    status, tags = told()
    assert (status, tags["state"], tags["for"], tags["purpose"]) == ("FAILED", "failed", "segment:3", "certificate")
    with runs.record_arm_states({runs.find_arm_folder(arm): arm}) as ends:
        ends[arm.key] = ""
    for _ in range(2):
        show_unshown_items(plant)
    assert (told()[0], told()[1]["state"]) == ("FINISHED", "done")
    run = MlflowTracking.open(plant).find_run_and_experiment(f"arm:{arm.key}")
    assert run is not None
    client = open_client(workspace)
    assert client.get_run(run[0]).data.params["recipe.optimizer.lr"] == "0.01"
    assert [point.step for point in client.get_metric_history(run[0], "loss/all")] == [4, 5]
    assert len(ledger.read("SELECT id FROM events WHERE kind = :kind", kind=ARM_SHOWN)) == 2
