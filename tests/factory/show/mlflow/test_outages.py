"""If MLflow is damaged, hangs or is away, nothing waits for it. The outage is printed once, and missing data is sent later."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from factory.backups.backups import make_backup
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, SegmentRow, find_champion
from factory.release.published_link import read_publication_record
from factory.repairs.repairing import repair_all_damage
from factory.show.mlflow import outages
from factory.show.mlflow.outages import TrackingError, show_unless_outage
from factory.show.mlflow.registry import CHAMPION, MODEL
from factory.show.mlflow.runs import MlflowTracking
from factory.show.mlflow.store import open_client
from factory.show.unshown_items import show_unshown_items
from tests.support.factory.shown import reconcile, release
from tests.support.messages import codes, refused
from tests.support.plants.release_scene import add_candidate, add_verdict, approval, with_store
from tests.support.said import Said


@pytest.fixture
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """Takes connections and never answers."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)


def damage(workspace: Workspace) -> None:
    (workspace.root / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 9000)
    for ending in ("-wal", "-shm"):
        (workspace.root / f"mlflow.db{ending}").unlink(missing_ok=True)


def test_a_server_that_does_not_answer_costs_one_time_limit_and_then_is_not_asked(
    workspace: Workspace,
    ledger: Ledger,
    silent_server: tuple[str, list[socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, taken = silent_server
    monkeypatch.setitem(outages._servers, uri, outages.TrackingServer(request_limit=0.5))
    workspace = replace(workspace, config=replace(workspace.config, mlflow_uri=uri))
    number = add_candidate(workspace, ledger)
    tracking, said = MlflowTracking.open(Plant(workspace, ledger)), Said()
    for _ in range(20):
        assert show_unless_outage(said.line, lambda: tracking.update_candidate_run(number)) is None
    assert len(taken) == 1, "it is asked once and then left alone"
    assert codes(said.lines) == ["outages.away"]
    with refused("outages.no_answer", TrackingError):
        tracking.update_candidate_run(number)
    server = outages._servers[uri]
    assert server.request_limit == 1.0 and server.pause_until > time.monotonic()
    server.pause_until = 0.0  # the time has passed
    assert show_unless_outage(said.line, lambda: tracking.update_candidate_run(number)) is None
    assert len(taken) == 2 and server.request_limit == 2.0


def test_a_release_does_not_wait_for_a_damaged_store_and_the_alias_comes_later(
    workspace: Workspace, ledger: Ledger
) -> None:
    approval(with_store(workspace), "automatic")
    make_backup(Plant(workspace, ledger))
    first = add_candidate(workspace, ledger)
    verdict = add_verdict(ledger, first)
    damage(workspace)
    said = Said()
    plant = Plant(workspace, ledger, said)
    number = release(plant, verdict)
    row = ReleaseRow.get(ledger, number)
    assert (row.state, row.mlflow_version) == ("published", None)
    best = find_champion(ledger)
    assert best and best.number == number and (read_publication_record(workspace) or {})["release"] == number
    outage = [line for line in said.lines if codes([line]) == ["outages.away"]]
    assert len(outage) == 1 and outage[0].data["reason"].data["advice"].code == "outages.damaged"
    assert reconcile(Plant(workspace, ledger, said)) == []
    assert len([line for line in said.lines if codes([line]) == ["outages.away"]]) == 1
    done = repair_all_damage(workspace, False, said)
    show_unshown_items(plant)
    assert any(line.startswith("mlflow: repaired") for line in done), done
    assert any("is restored from backup" in line for line in said.lines)
    client = open_client(workspace)
    version = client.get_model_version_by_alias(MODEL, CHAMPION)
    assert version.tags["candidate"] == str(first)
    assert ReleaseRow.get(ledger, number).mlflow_version == str(version.version)
    assert "outages.back" in codes(said.lines)


def test_a_version_without_its_release_tag_gets_the_tag_later(workspace: Workspace, ledger: Ledger) -> None:
    """A disk that was full during the registration of a release leaves such a version."""
    approval(with_store(workspace), "automatic")
    candidate = add_candidate(workspace, ledger)
    number = release(Plant(workspace, ledger, Said()), add_verdict(ledger, candidate))
    client = open_client(workspace)
    version = client.get_model_version_by_alias(MODEL, CHAMPION)
    client.delete_model_version_tag(MODEL, version.version, "release")
    reconcile(Plant(workspace, ledger, Said()))
    assert client.get_model_version(MODEL, version.version).tags["release"] == str(number)
    assert reconcile(Plant(workspace, ledger, Said())) == []


def test_a_lost_store_is_filled_again_from_the_ledger(workspace: Workspace, ledger: Ledger) -> None:
    with_store(workspace)
    number = add_candidate(workspace, ledger)
    with ledger.begin() as tx:
        tx.execute(segments.update().values(state="done"))
    show_unshown_items(Plant(workspace, ledger))
    run = MlflowTracking.open(Plant(workspace, ledger)).ensure_segment_run
    segment = SegmentRow.get(ledger, 1)
    first = run(segment)
    assert len(open_client(workspace).get_metric_history(first, "loss/all")) == 100
    damage(workspace)
    said = Said()
    show_unshown_items(Plant(workspace, ledger, said))
    assert said.lines == [], "what it has been shown is not looked for"
    (workspace.root / "backups").mkdir(exist_ok=True)
    repair_all_damage(workspace, False, said)
    show_unshown_items(Plant(workspace, ledger, said))
    second = run(segment)
    client = open_client(workspace)
    assert second != first and len(client.get_metric_history(second, "loss/all")) == 100
    assert client.get_run(second).info.status == "FINISHED"
    assert number == 1


def test_a_moved_workspace_still_finds_its_artifacts(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    approval(with_store(workspace), "automatic")
    number = release(Plant(workspace, ledger), add_verdict(ledger, add_candidate(workspace, ledger)))
    ledger.engine.dispose()
    shutil.move(workspace.root, tmp_path / "there")
    moved = Workspace.open(tmp_path / "there")
    client = open_client(moved)
    version = client.get_model_version_by_alias(MODEL, CHAMPION)
    assert Path(version.source.removeprefix("file://")).is_relative_to(moved.root)
    run = client.get_run(version.run_id)
    assert run.info.artifact_uri.startswith(moved.mlflow_artifacts.as_uri())
    assert "report.html" in {one.path for one in client.list_artifacts(version.run_id)}
    again = Ledger.open(moved.ledger_url, moved.root)
    assert reconcile(Plant(moved, again)) == [] and (read_publication_record(moved) or {})["release"] == number


def test_errors_of_another_kind_are_not_taken_for_an_outage(workspace: Workspace, ledger: Ledger) -> None:
    tracking = MlflowTracking.open(Plant(with_store(workspace), ledger))
    act: Callable[[], object] = lambda: tracking.update_candidate_run(9)
    with pytest.raises(Exception, match="no candidate 9"):
        show_unless_outage(print, act)
