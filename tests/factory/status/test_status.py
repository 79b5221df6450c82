"""``factory status`` and the metrics, from a real ledger, a lock held by a real process, real files and a real GET."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.anomalies import ASKED, DIAGNOSED
from factory.ledger.file_events import HELD
from factory.ledger.ledger import (
    Ledger,
    anomalies,
    candidates,
    data_plans,
    exchanges,
    proposals,
    record_event,
    releases,
    segments,
    verdicts,
)
from factory.ledger.rows import Subject
from factory.retention.disk import EVERY_SECONDS, SAMPLES_FILE
from factory.status.daemon_state import read_daemon_facts
from factory.status.metrics import format_prometheus_text, serve_metrics
from factory.status.status import format_status_lines, read_status_facts
from factory.status.waiting import list_items_waiting_for_person
from kernels.contract.message import Message
from tests.support.factory.command import factory
from tests.support.messages import refused, the
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

NOW = time.time()


def put(ledger: Ledger, table: Any, **values: Any) -> None:
    with ledger.begin() as tx:
        tx.execute(table.insert().values(**values))


def segment(workspace: Workspace, ledger: Ledger, number: int, state: str, **changed: Any) -> Path:
    folder = workspace.segments / f"{number:05d}-trunk"
    folder.mkdir()
    values = {
        "id": number, "kind": "trunk", "generation": 1, "recipe": "r", "recipe_json": {"precision": "fp32"}, "recipe_sha256": "r",
        "data_plan": "p", "code_commit": "c", "first_step": 100, "last_step": 200, "state": state, "folder": str(folder),
        "created_at": NOW - 600,
    }  # fmt: skip
    put(ledger, segments, **values | changed)
    return folder


@pytest.fixture
def plant(workspace: Workspace, ledger: Ledger) -> tuple[Workspace, Ledger]:
    put(ledger, data_plans, id="p", plan={"token_shards": []}, created_at=0.0)
    return workspace, ledger


def shown(workspace: Workspace) -> str:
    return "\n".join(format_status_lines(read_status_facts(workspace)))


def line_of(workspace: Workspace, code: str) -> Message:
    """The only line of the screen with that code."""
    found = the(format_status_lines(read_status_facts(workspace)), code)
    assert isinstance(found, Message)
    return found


# -- the daemon --------------------------------------------------------------------------------------------------------
HOLDER = """
import sys, time
from pathlib import Path
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.status.daemon_log import LoggedProgress
workspace = Workspace.open(Path(sys.argv[1]))
with workspace.hold_lock("model-loop"):
    with LoggedProgress(workspace, SILENT).task("trunk 100–200", 100):
        print("held", flush=True)
        sys.stdin.readline()
"""


def test_status_finds_the_running_daemon_by_its_lock(plant: tuple[Workspace, Ledger]) -> None:
    workspace, _ = plant
    assert read_daemon_facts(workspace) == {"running": False}
    assert line_of(workspace, "status.no_daemon").startswith("daemon ")
    command = [sys.executable, "-c", HOLDER, str(workspace.root)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        found = read_daemon_facts(workspace)
        assert found["running"] and found["process"] == holder.pid and found["doing"] == "trunk 100–200"
        said = line_of(workspace, "status.daemon_runs").data
        assert said["process"] == holder.pid and said["command"].startswith("python")
        assert said["doing"].startswith("; now trunk 100–200, for ")
    finally:
        holder.kill()
        holder.communicate()
    assert read_daemon_facts(workspace) == {"running": False}, "the lock file is left, but its process is gone"


# -- training ----------------------------------------------------------------------------------------------------------
def lines(folder: Path, steps: range, seconds: float, **last: object) -> None:
    begun = time.time() - seconds * len(steps) - 30
    rows = [
        {"step": s, "loss": 4.0 - s / 1000, "tokens_per_s": 1000.0 + s, "time": begun + seconds * n}
        for n, s in enumerate(steps)
    ]
    rows[-1] |= last
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')


def test_the_segment_in_training_shows_step_loss_rate_and_time_left(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    folder = segment(workspace, ledger, 4, "planned", attempts=1)
    said = shown(workspace)
    assert "segment 4 (trunk): step 100 of 200" in said
    assert re.search(r", planned \d+ min ago, 1 try failed", said)
    lines(folder, range(100, 150), seconds=2.0)
    row = read_status_facts(workspace)["training"]
    assert row["step"] == 150 and row["loss"] == pytest.approx(3.851) and row["step_seconds"] == pytest.approx(2.0)
    assert row["eta_seconds"] == pytest.approx(100.0) and row["tokens_per_s"] == pytest.approx(1134.0, abs=1.0)
    assert 30 <= row["seconds_since_step"] < 300
    assert "step 150 of 200, loss 3.851, 1,13" in shown(workspace) and " tokens/s, 2 min left, newest step " in shown(
        workspace
    )
    lines(folder, range(100, 150), seconds=2.0, mfu=0.4125)
    assert " tokens/s, MFU 41.2 %, 2 min left" in shown(workspace)


def test_a_finished_segment_shows_its_rate_and_the_time_of_its_first_step(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    speed: dict[str, object] = {"tokens_per_s": 26_004.6, "flops_per_s": 9e13, "first_step_s": 35.04}
    segment(workspace, ledger, 1, "done", result={"loss": 2.5, "speed": speed})
    assert re.search(r"segment 1 .*, 26,005 tokens/s, ", shown(workspace))
    assert re.search(r"segment 1 .*, first step 35.0 s\n", shown(workspace))
    segment(workspace, ledger, 2, "done", result={"loss": 2.5, "speed": speed | {"mfu": 0.168}})
    assert re.search(r"segment 2 .*, MFU 16.8 %, first ", shown(workspace))
    for number, wrong in enumerate((None, [], {"mfu": "x"}, {"mfu": float("nan"), "first_step_s": -1.0}), start=3):
        segment(workspace, ledger, number, "done", result={"loss": 2.5, "speed": wrong})
        assert re.search(rf"segment {number} .*, loss 2.500\n", shown(workspace)), wrong


def test_status_ignores_invalid_metrics_of_a_trainer(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    folder = segment(workspace, ledger, 4, "planned")
    rows = [
        "null",
        "[]",
        "{}",
        '{"step": 1e9, "time": 1}',
        '{"step": 5, "time": "x"}',
        '{"step": 7, "time": 1.0, "loss": NaN}',
        "{",
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    row = read_status_facts(workspace)["training"]
    assert row["step"] == 8 and row["loss"] is None and row["eta_seconds"] is None
    assert shown(workspace)
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    assert read_status_facts(workspace)["training"]["step"] == 100


def test_status_shows_how_many_tokens_training_needs(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    with ledger.begin() as tx:
        record_event(tx, "trunk_ahead", "daemon", {"steps": 0, "new_shards": 1, "wanted": 20, "missing_tokens": 12345})
    assert line_of(workspace, "status.little_data").data == {"tokens": 12345}


# -- what waits --------------------------------------------------------------------------------------------------------
def candidate(ledger: Ledger, number: int, segment: int, outcome: str, created_at: float = NOW) -> None:
    put(
        ledger,
        candidates,
        id=number,
        segment=segment,
        checkpoint="c",
        export_path="e",
        export_sha256="e",
        created_at=NOW,
    )
    put(
        ledger, verdicts, id=number, gate="release", subject=f"candidate:{number}", policy_sha256="p", subject_sha256="e",
        outcome=outcome, reasons=["so"], evidence={}, created_at=created_at,
    )  # fmt: skip


def test_each_line_that_waits_for_a_person_names_the_command(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    assert list_items_waiting_for_person(workspace, ledger) == []
    segment(workspace, ledger, 1, "done")
    segment(workspace, ledger, 2, "failed", parent=1)
    candidate(ledger, 1, 1, "promote")
    put(
        ledger, proposals, number=3, agent="search", target="t", title="faster", hypothesis="h", base_commit="b", branch="x",
        state="judged", verdict=1, created_at=NOW,
    )  # fmt: skip
    put(ledger, anomalies, id=7, segment=1, step=105, kind="loss_spike", detail={})
    with ledger.begin() as tx:
        record_event(
            tx, DIAGNOSED, Subject("anomaly", 7), {"anomalies": [7], "causes": ["rate"], "why": "so", "guilty": []}
        )
        record_event(tx, ASKED, Subject("anomaly", 7), {"anomalies": [7], "diagnosis": 1})
        record_event(tx, "paused", "daemon", {"what": "training", "by": "ann", "why": "move"})
        record_event(tx, "disk_low", "daemon", {"free": 10, "floor": 20})
        for name in ("here.jsonl", "gone.jsonl"):
            record_event(tx, HELD, f"inbox:{name}", {"name": name, "stamp": [1], "why": "close it", "refused": False})
    (workspace.inbox / "here.jsonl").touch()
    found = list_items_waiting_for_person(workspace, ledger)
    what = [one["what"] for one in found]
    assert the(what, "waiting.paused").data == {"what": "training", "person": "ann"}
    assert the(what, "waiting.candidate").data == {"candidate": 1}
    assert the(what, "waiting.proposal").data == {"proposal": 3, "title": "faster"}
    assert the(what, "waiting.diagnosis").data == {"anomaly": 7}
    assert the(what, "waiting.disk_low").data == {"free": 1e-8, "floor": 2e-8}
    assert [word for one in found for word in re.findall(r"factory [a-z]+(?: [a-z]+)? \d+", one["command"])] == [
        "factory retry 2", "factory abandon 2", "factory releases approve 1", "factory releases reject 1", "factory proposals approve 3",
        "factory anomalies show 7", "factory anomalies accept 7", "factory anomalies reject 7",
    ]  # fmt: skip
    assert found[0]["command"] == "factory resume" and found[-1]["command"] == "close it"
    said = shown(workspace)
    assert " → factory resume" in said and " → factory retry 2" in said
    assert read_status_facts(workspace)["open_verdicts"] == ["candidate 1: promote", "proposal 3: promote"]
    assert read_status_facts(workspace)["open_anomalies"] == 1


def test_the_champion_follows_the_order_of_events_even_if_the_clock_was_set_back(
    plant: tuple[Workspace, Ledger],
) -> None:
    workspace, ledger = plant
    for number, at in ((1, NOW), (2, NOW - 9e6)):  # the clock was set back
        segment(workspace, ledger, number, "done")
        candidate(ledger, number, number, "promote", created_at=at)
        put(ledger, releases, number=number, candidate=number, verdict=number, state="published", created_at=at)
        with ledger.begin() as tx:
            record_event(tx, "promoted", Subject("release", number), {"candidate": number})
    assert read_status_facts(workspace)["champion"]["number"] == 2 and "champion  release 2, released 20" in shown(
        workspace
    )
    assert not [one for one in list_items_waiting_for_person(workspace, ledger) if "candidate" in one["what"]]


def test_status_shows_errors_spending_and_disk_space(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    with ledger.begin() as tx:
        detail = {"what": "judge 3", "error": "no room", "failures": 2, "again_in_s": 40.0}
        record_event(tx, "action_failed", "daemon", detail)
    for at, usd in ((time.time(), 0.5), (NOW - 3 * 86400, 2.0)):
        put(ledger, exchanges, at=at, run=1, label="l", state="done", tokens=100, usd=usd)
    sample = {
        "at": time.time() - 2 * EVERY_SECONDS,
        "free": os.statvfs(workspace.root).f_bavail * os.statvfs(workspace.root).f_frsize + 10**10,
    }
    (workspace.logs / SAMPLES_FILE).write_text(json.dumps(sample) + "\n")
    said = shown(workspace)
    failed = line_of(workspace, "status.last_error").data
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", failed["at"]) and re.fullmatch(r"\d+ s", failed["ago"])
    assert (failed["what"], failed["error"]) == ("judge 3", "no room")
    assert "failing   judge 3 since 20" in said
    assert line_of(workspace, "status.spend").data == {
        "usd_today": 0.5, "tokens_today": 100, "usd": 2.5, "tokens": 200,
    }  # fmt: skip
    disk = read_status_facts(workspace)["disk"]
    assert disk["hours_left"] == pytest.approx(
        (disk["free"] - disk["floor"]) / 10**10 * 2 * EVERY_SECONDS / 3600, rel=0.05
    )
    assert line_of(workspace, "status.disk_shrinks").data["floor"] == 1.0


def test_json_times_have_a_time_zone(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    segment(workspace, ledger, 1, "done", finished_at=NOW)
    found = json.loads(factory("status", "--json", "-w", str(workspace.root)).stdout)
    (row,) = found["segments"]
    assert abs(datetime.fromisoformat(row["finished_at"]).timestamp() - NOW) < 1
    assert datetime.fromisoformat(found["at"]).tzinfo is not None


def test_watch_prints_the_status_again(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    often = "import sys\nfrom factory.cli import look, main\nlook.WATCH_SECONDS = 0.1\nsys.exit(main())"
    command = [sys.executable, "-c", often, "status", "--watch", "--json", "-w", str(workspace.root)]
    watching = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert watching.stdout
    giving_up = threading.Timer(PATIENCE_S, watching.kill)
    giving_up.start()
    try:
        count = (line for line in watching.stdout if line.startswith('  "waiting_in_inbox"'))
        assert "0" in next(count)
        (workspace.inbox / "new.jsonl").touch()
        assert any("1" in line for line in count), "it is looked at again"  # else until it is killed
        ledger_file = workspace.root / "ledger.db"
        ledger_file.rename(away := ledger_file.with_name("away.db"))  # as in the middle of a restore
        assert watching.stderr and "ledger.db" in next(line for line in watching.stderr if "ledger.db" in line)
        away.rename(ledger_file)
        assert next(count), "it goes on"
    finally:
        giving_up.cancel()
        watching.terminate()
        watching.communicate()


# -- numbers -----------------------------------------------------------------------------------------------------------
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_prometheus_metrics_equal_the_ledger_s_numbers(tmp_path: Path) -> None:
    port = free_port()
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(metrics_port=port))
    ledger = Ledger.create(workspace.ledger_url)
    put(ledger, data_plans, id="p", plan={"token_shards": []}, created_at=0.0)
    lines(segment(workspace, ledger, 3, "planned"), range(100, 120), seconds=1.0)
    segment(workspace, ledger, 2, "done")
    with serve_metrics(Workspace.open(workspace.root)):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            said, kind = answer.read().decode(), answer.headers["Content-Type"]
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other")
        assert missing.value.code == 404
        with (
            refused("metrics.port_in_use", ConfigError, port=port, reason="Address already in use"),
            serve_metrics(workspace),
        ):
            pass
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    rows = dict(line.rsplit(" ", 1) for line in said.splitlines() if not line.startswith("#"))
    assert rows["factory_segment_step"] == "120" and float(rows["factory_segment_loss"]) == pytest.approx(3.881)
    assert rows['factory_segments{state="done"}'] == "1" and rows['factory_segments{state="planned"}'] == "1"
    assert rows["factory_champion_release"] == "0" and rows["factory_daemon_running"] == "0"
    assert all(re.fullmatch(r'factory_\w+(\{\w+="[^"]*"\})?', name) for name in rows)
    assert {line.split()[2] for line in said.splitlines() if line.startswith("# TYPE")} == {
        name.split("{")[0] for name in rows
    }
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")  # over with the daemon


def test_metrics_are_not_served_by_default_and_a_bad_port_is_refused(workspace: Workspace, ledger: Ledger) -> None:
    with serve_metrics(workspace) as port:
        assert port == 0
    assert "factory_disk_free_bytes " in format_prometheus_text(read_status_facts(workspace))
    (workspace.root / "factory.yaml").write_text("metrics_port: 70000\n")
    assert "error[workspace.bad_port]" in factory("status", "-w", str(workspace.root)).stderr


def test_a_metrics_label_is_escaped(workspace: Workspace, ledger: Ledger) -> None:
    found = read_status_facts(workspace) | {"domains": {'a"b\\c\nd': {"tokens": 5}}}
    assert 'factory_tokens{domain="a\\"b\\\\c\\nd"} 5\n' in format_prometheus_text(found)


def test_the_option_version_prints_the_commit() -> None:
    said = factory("--version")
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert said.returncode == 0 and said.stdout == f"llm-factory 0.1.0 ({head})\n" if head else said.stdout
