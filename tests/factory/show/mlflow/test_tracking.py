"""A real MLflow store on SQLite, and real processes where several of them matter."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import sqlalchemy as sa
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, proposals, tracked_runs, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.show.mlflow.metrics_follower import clean_metric_key, flatten_numbers
from factory.show.mlflow.runs import SUBJECT, MlflowTracking, _params
from factory.show.mlflow.store import TrackingError, flush_store, open_client
from factory.show.pages.release_facts import flatten_keys
from tests.support.factory.command import FORKS
from tests.support.messages import codes
from tests.support.patience import PATIENCE_S
from tests.support.plants.release_scene import add_candidate, add_segment, metrics_line, with_store, write_metrics


def _opens(root: Path, out: Path, ready: Barrier) -> None:
    """In a process of its own, whose output and errors are ``out``."""
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    workspace = Workspace.open(root)
    ledger = Ledger.open(workspace.ledger_url)
    ready.wait(PATIENCE_S)
    print(MlflowTracking.open(Plant(workspace, ledger)).ensure_segment_run(SegmentRow.get(ledger, 1)), flush=True)


@pytest.fixture
def tracking(workspace: Workspace, ledger: Ledger) -> MlflowTracking:
    return MlflowTracking.open(Plant(with_store(workspace), ledger))


def test_flushing_the_store_does_not_drop_the_process_s_locks_on_it(
    workspace: Workspace, ledger: Ledger, tracking: MlflowTracking
) -> None:
    """Another process that closes it is not the last one, and leaves the log in which the next rows go."""
    run = tracking.ensure_segment_run(add_segment(workspace, ledger))
    flush_store(workspace)
    file = workspace.root / "mlflow.db"
    closes = f"import sqlite3; db = sqlite3.connect({str(file)!r}); db.execute('SELECT COUNT(*) FROM runs').fetchone(); db.close()"
    subprocess.run([sys.executable, "-c", closes], check=True)
    assert (workspace.root / "mlflow.db-wal").exists()
    tracking.client.log_metric(run, "loss", 2.0, step=1)
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT COUNT(*) FROM metrics").fetchone() == (1,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_processes_that_start_together_make_one_store_and_one_run(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    left_over = workspace.root / ".mlflow.db.new"  # of a process that was killed while it made the store
    left_over.write_bytes(b"SQLite format 3\0 and then the power went")
    segment = add_segment(workspace, ledger)
    ready, outs = FORKS.Barrier(3), [tmp_path / name for name in ("first", "second")]
    started = [FORKS.Process(target=_opens, args=(workspace.root, out, ready)) for out in outs]
    for process in started:
        process.start()
    ready.wait(PATIENCE_S)
    tracking = MlflowTracking.open(Plant(workspace, ledger))
    ours = tracking.ensure_segment_run(segment)
    for process in started:
        process.join(PATIENCE_S)
    assert [(process.exitcode, out.read_text()) for process, out in zip(started, outs)] == [(0, f"{ours}\n")] * 2, (
        "one run, and not a word on stderr"
    )
    assert len(tracking.client.search_runs([tracking._experiment("training")])) == 1
    assert not left_over.exists()
    with sqlite3.connect(workspace.root / "mlflow.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_broken_store_is_a_clear_error_at_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace.root / "mlflow.db").write_bytes(b"no database " * 100)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(TrackingError, match="not a database"):
        open_client(workspace)
    assert slept == [], "MLflow would try again for 100 s"


def test_a_segment_run_has_the_recipe_and_the_lineage_once(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    segment = add_segment(workspace, ledger)
    run = tracking.ensure_segment_run(segment)
    assert (
        tracking.ensure_segment_run(segment)
        == run
        == MlflowTracking.open(Plant(workspace, ledger)).ensure_segment_run(segment)
    )
    data = tracking.client.get_run(run).data
    assert data.params["model.d_model"] == "64" and data.params["phases"] == "[0.5, 0.5]"
    assert data.tags["data_plan"] == "p" * 64 and data.tags["mlflow.source.git.commit"] == "c" * 40
    assert data.tags[SUBJECT] == "segment:1" and data.tags["generation"] == "1" and "parent" not in data.tags
    tracking.follow_segment(segment).finish()
    assert tracking.client.get_run(run).info.status == "FINISHED"


def test_a_run_made_just_before_a_kill_is_found_again(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    segment = add_segment(workspace, ledger)
    run = tracking.ensure_segment_run(segment)
    with ledger.begin() as tx:  # as if killed between MLflow's commit and the ledger's
        tx.execute(tracked_runs.delete())
    assert MlflowTracking.open(Plant(workspace, ledger)).ensure_segment_run(segment) == run


def test_after_its_deletion_a_store_gets_all_data_again(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    candidate = add_candidate(workspace, ledger)
    tracking.update_candidate_run(candidate)
    elsewhere = Workspace(workspace.root, type(workspace.config)(mlflow_uri=f"sqlite:///{workspace.root}/other.db"))
    (workspace.root / "other.db").write_bytes((with_store(workspace).root / "mlflow.db").read_bytes())
    again = MlflowTracking.open(Plant(elsewhere, ledger))
    assert again.client.get_run(again.update_candidate_run(candidate)).data.metrics["bpb/code"] == 2.1


def history(tracking: MlflowTracking, run: str, key: str = "loss/all") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in tracking.client.get_metric_history(run, key)]


def test_the_follower_logs_each_step_once_while_the_file_grows(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    segment = add_segment(workspace, ledger)
    path = Path(segment.folder) / "metrics.jsonl"
    follower = tracking.follow_segment(segment)
    assert follower.poll() == 0, "no file yet"
    write_metrics(path, 0, 3)
    torn = metrics_line(3)
    with open(path, "a") as file:
        file.write(torn[:25])
    assert follower.poll() == 3
    with open(path, "a") as file:
        file.write(torn[25:])
    assert (follower.poll(), follower.poll()) == (1, 0)
    run = tracking.ensure_segment_run(segment)
    assert history(tracking, run) == [(s, json.loads(metrics_line(s))["loss"]) for s in range(4)]

    write_metrics(path, 4, 6)
    restarted = MlflowTracking.open(Plant(workspace, ledger)).follow_segment(segment)
    assert restarted.poll() == 2, "a new process goes on where MLflow stands"
    assert [step for step, _ in history(tracking, run, "loss/docs")] == list(range(6))


def test_no_step_is_logged_twice_after_a_resumed_trainer_cut_its_file(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    segment = add_segment(workspace, ledger)
    path = Path(segment.folder) / "metrics.jsonl"
    write_metrics(path, 0, 50)
    follower = tracking.follow_segment(segment)
    assert follower.poll() == 50
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:40]))
    with open(path, "a") as file:  # the same steps at other times, and on beyond the old end of the file
        file.writelines(metrics_line(step).replace("17000", "19000") for step in range(40, 70))
    assert follower.poll() == 20
    assert [step for step, _ in history(tracking, tracking.ensure_segment_run(segment))] == list(range(70))


def test_hostile_metrics_lines_do_not_stop_valid_lines(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    segment = add_segment(workspace, ledger)
    path = Path(segment.folder) / "metrics.jsonl"
    many = {f"loss/domain {i}": float(i) for i in range(2500)}
    rows: list[object] = [
        {"step": 0, "loss": math.nan, "time": math.inf},
        {
            "step": 1,
            "time": 1e308,
            "loss": math.inf,
            "loss/../../etc": 1.0,
            "loss/ü;DROP": 2,
            "note": "text",
            "none": None,
        },
        [1, 2],
        {"step": "two", "loss": 1.0},
        {"step": 2, "loss": 2.0, **many},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "}{ torn\n" + metrics_line(3))
    assert tracking.follow_segment(segment).poll() == 4
    run = tracking.ensure_segment_run(segment)
    values = dict(history(tracking, run))
    assert math.isnan(values[0]) and values[1] > 1e300 and values[2] == 2.0
    metrics = tracking.client.get_run(run).data.metrics
    assert metrics["loss/domain 2499"] == 2499.0 and metrics["overall/_etc"] == 1.0


def test_a_locked_store_never_stops_training_and_is_reported_once(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = add_segment(workspace, ledger)
    write_metrics(Path(segment.folder) / "metrics.jsonl", 0, 10)
    said: list[str] = []
    asked: list[object] = []
    follower = tracking.follow_segment(segment, said.append)
    with sqlite3.connect(workspace.root / "mlflow.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patch:
            patch.setattr(type(tracking.client), "log_batch", lambda *asks, **_: asked.append(asks))
            assert (follower.poll(), follower.poll()) == (0, 0)
        assert asked == [], "a poll gives up after a second, and leaves MLflow alone, which waits for twenty"
        other.rollback()
    assert follower.poll() == 10
    assert len(said) == 2 and "locked" in said[0] and codes(said) == ["outages.away", "outages.back"]


def test_a_candidate_run_has_its_evaluation_once(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    candidate = add_candidate(workspace, ledger)
    run = tracking.update_candidate_run(candidate)
    assert tracking.update_candidate_run(candidate) == run
    data = tracking.client.get_run(run).data
    assert data.metrics["bpb/docs"] == 2.4 and data.metrics["details/baselines/code/trigram"] == 2.9
    assert data.metrics["details/parity/tokenizer/ok"] == 1.0 and data.metrics["cloze/share_right"] == 0.31
    assert len(history(tracking, run, "bpb/code")) == 1
    assert {a.path for a in tracking.client.list_artifacts(run)} >= {"samples.json", "evaluation.json"}
    assert (workspace.mlflow_artifacts / "candidates" / run / "artifacts" / "samples.json").is_file()


def test_a_proposal_run_shows_verdict_evidence_and_report(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    report = workspace.reports / "proposal-1.html"
    report.write_text("<!doctype html><title>1</title>")
    with ledger.begin() as tx:
        tx.execute(
            verdicts.insert().values(
                id=1, gate="patch", subject="proposal:1", against="b" * 40, policy_sha256="y" * 64, subject_sha256="h" * 64, outcome="reject",
                reasons=["no gain", "ü" * 600], evidence={"timing": {"ratio": 1.01}}, created_at=1.7e9,
            )
        )  # fmt: skip
        tx.execute(
            proposals.insert().values(
                number=1, agent="search", target="attention", title="fold the query group", hypothesis="…", predicted_gain=1.2,
                base_commit="b" * 40, branch="factory/search/1-fold", state="rejected", verdict=1, report=str(report), created_at=1.7e9,
            )
        )  # fmt: skip
    run = tracking.update_proposal_run(1)
    data = tracking.client.get_run(run).data
    assert data.tags["verdict"] == "reject" and data.tags["reasons"].startswith("no gain; ü")
    assert len(data.tags["reasons"]) == 500 and data.metrics["timing/ratio"] == 1.01
    assert {a.path for a in tracking.client.list_artifacts(run)} == {"evidence.json", "report.html"}


def test_nested_values_become_flat_keys_that_mlflow_accepts() -> None:
    assert flatten_keys({"a": {"b": [1], "c": None}, "d": 2}) == {"a.b": "[1]", "a.c": None, "d": 2}
    assert _params({"weights": {"*": 0.1}}) == {"weights.others": 0.1}, "MLflow refuses a * in a name"
    assert flatten_numbers({"a": {"b": 1, "c": True, "d": "x", "e": [1]}, "f": 2.5}) == {
        "a/b": 1.0,
        "a/c": 1.0,
        "f": 2.5,
    }
    assert [clean_metric_key(k) for k in ("loss/code", "/x", "a//b", "..", "é$")] == [
        "loss/code",
        "_x",
        "a/b",
        "_",
        "é_",
    ]


def test_only_connections_to_mlflows_store_flush_less(
    tracking: MlflowTracking, ledger: Ledger, workspace: Workspace
) -> None:
    tracking.client.search_experiments()
    assert Ledger.open(ledger.url).select_rows(sa.text("PRAGMA synchronous")) == [{"synchronous": 2}]
    other = sa.create_engine(f"sqlite:///{workspace.root / 'mlflow.db'}")
    with other.connect() as connection:
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2
    with SqlAlchemyStore(workspace.mlflow_uri, workspace.mlflow_artifacts.as_uri()).engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 1
