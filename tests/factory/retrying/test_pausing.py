"""``factory pause`` and ``factory resume``: their records, their effect on duties, and on a trainer within a step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.duties.runner import run_daemon
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.retrying.daemon_requests import (
    EVERYTHING,
    TRAINING,
    PausedError,
    find_current_pause,
    pause_daemon,
    resume_daemon,
)
from factory.training.planning import plan_trunk
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import Running, command_here, factory
from tests.support.failing.deaths import make_mortal, strike
from tests.support.messages import codes, refused
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import make_plant


def test_the_newest_pause_is_in_force_until_a_resume(workspace: Workspace, ledger: Ledger) -> None:
    assert find_current_pause(ledger) is None
    with refused("retrying.not_paused", InputError):
        resume_daemon(ledger, "bo")
    with refused("retrying.cannot_pause", InputError, what="lunch"):
        pause_daemon(ledger, "lunch", "bo")
    before = time.time()
    pause_daemon(ledger, TRAINING, "ada", "the GPU is lent")
    found = find_current_pause(ledger)
    assert found and (found.what, found.by, found.why) == (TRAINING, "ada", "the GPU is lent") and before <= found.at
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.at))
    assert found.message.code == "retrying.paused" and found.message.data["since"] == since
    assert "(the GPU is lent)" in str(found) and "'factory resume'" in str(found)
    pause_daemon(ledger, EVERYTHING, "bo")
    with refused("retrying.paused", PausedError, what=EVERYTHING, person="bo"):
        run_daemon(Plant(workspace, ledger), once=True)
    assert resume_daemon(ledger, "ada").by == "bo" and find_current_pause(ledger) is None
    run_daemon(Plant(workspace, ledger), once=True)


def test_the_commands_pause_and_resume_the_daemon(workspace: Workspace, ledger: Ledger) -> None:
    run = lambda *words: command_here(*words, home=workspace)
    said = run("pause", "--why", "a lunch").stdout
    assert " paused training on " in said and "(a lunch)" in said
    status = run("status").stdout
    assert "training" in status and "paused" in status and "factory resume" in status
    assert json.loads(run("status", "--json").stdout)["paused"]["why"] == "a lunch"
    error = run("train").exception
    assert isinstance(error, PausedError) and (error.code, error.data["what"]) == ("retrying.paused", TRAINING)
    assert json.loads(run("resume", "--json").stdout)["resumed"]["what"] == TRAINING
    assert codes([run("resume").exception]) == ["retrying.not_paused"]
    assert "paused" not in run("status").stdout


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow("a daemon that is paused in the midst of a segment and goes on")
def test_a_pause_stops_the_trainer_cleanly_and_a_resume_continues(tmp_path: Path) -> None:
    code = make_target(tmp_path / "code")
    make_mortal(code)
    workspace, ledger = make_plant(tmp_path, code)
    number = plan_trunk(Plant(workspace, ledger), 12)
    folder = Path(SegmentRow.get(ledger, number).folder)
    strike(ledger, number, "always-linger-25")
    where = ("--workspace", str(workspace.root))
    log = tmp_path / "said"
    daemon = Running("run", "--workspace", str(workspace.root), log=log)
    try:
        wait_until(lambda: (folder / "lingers").exists())
        factory("pause", *where)
        wait_until(lambda: " paused training on " in log.read_text())
        row = SegmentRow.get(ledger, number)
        assert (row.state, row.attempts) == ("planned", 0) and not (folder / "result.json").exists()
        assert log.read_text().count(" paused training on ") == 1
        (folder / "always-linger-25").unlink()
        factory("resume", *where)
        wait_until(lambda: SegmentRow.get(ledger, number).state == "done")
    finally:
        daemon.terminate()
        daemon.wait(timeout=PATIENCE_S)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(20, 32)), "nothing was trained twice"
    assert "Traceback" not in log.read_text()


@pytest.mark.slow("a daemon whose segment is rewound in the midst of it")
def test_the_trainer_of_a_rewound_segment_is_ended_and_another_segment_replaces_it(tmp_path: Path) -> None:
    code = make_target(tmp_path / "code")
    make_mortal(code)
    workspace, ledger = make_plant(tmp_path, code)
    number = plan_trunk(Plant(workspace, ledger), 12)
    folder = Path(SegmentRow.get(ledger, number).folder)
    strike(ledger, number, "always-linger-25")
    log = tmp_path / "said"
    daemon = Running("run", "--workspace", str(workspace.root), log=log)
    try:
        wait_until(lambda: (folder / "lingers").exists())
        factory("rewind", str(number), "--workspace", str(workspace.root))
        wait_until(lambda: f"egment {number} was rewound meanwhile" in log.read_text())
        wait_until(lambda: SegmentRow.find_first(ledger, "WHERE id > :id", id=number) is not None)
    finally:
        daemon.terminate()
        daemon.wait(timeout=PATIENCE_S)
    ended = SegmentRow.get(ledger, number)
    assert (ended.state, ended.attempts) == ("rewound", 0) and not (folder / "result.json").exists()
    follower = SegmentRow.find_first(ledger, "WHERE id > :id ORDER BY id", id=number)
    assert follower and follower.parent == ended.parent, "the new segment has the parent of the rewound segment"
    assert "Traceback" not in log.read_text()
