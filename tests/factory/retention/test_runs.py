"""Old runs of MLflow are removed, from MLflow's store too, and old logs without a segment. Newer ones stay."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.ledger import Ledger, exchanges
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.retention.cleaning import remove_unneeded_folders
from factory.show.mlflow.runs import MlflowTracking
from factory.show.unshown_items import show_unshown_items
from tests.support.messages import the
from tests.support.plants.history import DAY, History


def aged(ledger: Ledger, segment: int, days: float) -> None:
    with ledger.begin() as tx:
        tx.exec_driver_sql("UPDATE segments SET finished_at = ? WHERE id = ?", (time.time() - days * DAY, segment))


@pytest.mark.slow("MLflow's garbage collection in a process of its own")
def test_an_old_segments_run_is_removed_from_mlflow_for_good(tmp_path: Path, code_repository: Path) -> None:
    workspace = Workspace.create(tmp_path / "plant", WorkspaceConfig(repository=str(code_repository)))
    ledger = Ledger.create(workspace.ledger_url)
    history, tracking = History(workspace, ledger, 1), MlflowTracking.open(Plant(workspace, ledger))
    runs, parent = [], None
    for days in (400.0, 200.0, 30.0, 1.0):
        parent = history.segment("trunk", parent, "done", parent.last_step if parent else 0)
        aged(ledger, parent.id, days)
        runs.append(tracking.ensure_segment_run(parent))
        tracking.client.log_metric(runs[-1], "loss", 3.0, step=1)
    history.candidate(parent)
    gone = [
        one
        for one in remove_unneeded_folders(Plant(workspace, ledger)).list_removal_decisions()
        if one.folder.kind == "run"
    ]
    assert [one.folder.path.name for one in gone] == runs[:2]
    show_unshown_items(Plant(workspace, ledger))
    data = the([gone[0].reason], "removal_decisions.age").data
    assert (round(data["days"]), data["key"], data["limit"]) == (400, "run_days", 180.0)
    for run in runs[:2]:
        with pytest.raises(MlflowException, match="not found"):
            tracking.client.get_run(run)
    with closing(sqlite3.connect(workspace.root / "mlflow.db")) as store:
        assert {row[0] for row in store.execute("SELECT run_uuid FROM metrics")} == set(runs[2:])
    assert all(
        one.folder.kind != "run" for one in remove_unneeded_folders(Plant(workspace, ledger)).list_removal_decisions()
    )
    tracking.delete_runs(runs[:1])  # after a kill behind MLflow's removal the factory removes them again
    assert len(SegmentRow.select(ledger)) == 4


def test_old_logs_of_ranks_and_exchanges_are_removed_after_mlflow_has_them(
    tmp_path: Path, code_repository: Path
) -> None:
    workspace = Workspace.create(tmp_path / "plant", WorkspaceConfig(repository=str(code_repository)))
    ledger = Ledger.create(workspace.ledger_url)
    folder = workspace.logs / "exchanges"
    paths = {name: folder / f"{name}.json" for name in ("old", "new", "unsent")} | {
        "ranks": workspace.logs / "torchrun" / "a"
    }
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        with ledger.begin() as tx:
            tx.execute(
                exchanges.insert().values(
                    at=0.0, run=1, label=name, state="done", tokens=1, usd=0.0, file=ledger.to_stored_path(path),
                    trace=None if name == "unsent" else "t"
                )
            )  # fmt: skip
    long_ago = time.time() - 91 * DAY
    for name in ("old", "unsent", "ranks"):
        os.utime(paths[name], (long_ago, long_ago))
    remove_unneeded_folders(Plant(workspace, ledger))
    assert {name for name, path in paths.items() if path.exists()} == {"new", "unsent"}
