"""After the hardest cleaning a real plant still works: trunk, anneal, export, rollback and average. ``check`` reports nothing missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from factory.duties.training import train_segment
from factory.ledger.file_events import list_paths_removed_by_retention
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.repairs.workspace_examination import examine_workspace_files
from factory.retention.cleaning import remove_unneeded_folders
from factory.training.exporting import export_candidate
from factory.training.planning import plan_anneal, plan_trunk
from tests.support.plants.trained_plant import make_plant, train_anneal


@pytest.mark.slow("five real segments and two exports")
def test_after_cleaning_every_action_still_works(tmp_path: Path, code_repository: Path) -> None:
    workspace, ledger = make_plant(tmp_path, code_repository)
    first = export_candidate(Plant(workspace, ledger), train_anneal(workspace, ledger))
    train_segment(Plant(workspace, ledger), plan_trunk(Plant(workspace, ledger), 10))
    gone = remove_unneeded_folders(Plant(workspace, ledger), hard=True).list_removal_decisions()
    assert any(
        one.folder.kind == "checkpoint" and one.folder.number == 1 for one in gone
    ) and list_paths_removed_by_retention(ledger)
    train_segment(Plant(workspace, ledger), plan_trunk(Plant(workspace, ledger), 10))
    number = plan_anneal(Plant(workspace, ledger))
    train_segment(Plant(workspace, ledger), number)
    remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    second = export_candidate(Plant(workspace, ledger), number)
    remove_unneeded_folders(Plant(workspace, ledger), hard=True)
    assert {row.state for row in SegmentRow.select(ledger)} == {"done"} and second > first
    for candidate in (first, second):  # neither candidate has a verdict: both are open
        assert os.listdir(
            ledger.read("SELECT export_path FROM candidates WHERE id = :id", id=candidate)[0]["export_path"]
        )
    # This plant has no raw shards.
    examined = [kind for kind in examine_workspace_files(Plant(workspace, ledger), True) if kind.kind != "raw shards"]
    assert [fault for kind in examined for fault in kind.faults] == []
