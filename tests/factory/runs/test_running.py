"""Real trainers train arms: each arm once, and all arms of one commit in one process. Results are bit-identical everywhere."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from factory.core import devices
from factory.core.errors import InputError, SegmentError
from factory.core.faults import NO_FILE_HANDLES, find_fault_in
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.ledger import runs as ledger_runs
from factory.ledger.plant import Plant
from factory.ledger.rows import RunRow, Subject
from factory.retrying.daemon_requests import TRAINING, PausedError, pause_daemon, resume_daemon
from factory.runs import live_training, sandboxed_training
from factory.runs.arm import Arm
from factory.runs.arm_runner import ArmRunner, format_run, list_runs
from factory.runs.distance import have_same_bits
from factory.runs.live_code import LiveCode
from factory.runs.sandboxed_training import ArmRunEnd
from factory.runs.trace import RunTrace, read_live_checkpoint, read_step_lines_in_open_folder
from factory.runs.trainer_folder import write_spec_into_open_folder
from factory.runs.untrusted_files import UntrustedFileError
from tests.support.factory.command import command_here
from tests.support.failing.limits import few_handles
from tests.support.gates.reasons import expect, tells
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.trainer.segments import make_documents, plan_of, recipe_with, train_here
from trainer.contract.checkpoint.format import format_checkpoint_name
from trainer.contract.data.token_shard import write_token_shard

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("data")
    shard = write_token_shard(root / "shard", make_documents(1, {"code": 60}), vocab_size=512, tokenizer_sha256="")
    recipe = recipe_with(checkpoint_every=2, keep_checkpoints=9, mixture__weights={"*": 1.0})
    plan = json.loads(plan_of(shard, weights={"*": 1.0}).to_json())
    spec = {"kind": "trunk", "recipe": recipe.model_dump(), "data_plan": plan, "first_step": 0, "last_step": STEPS}
    return {**spec, "initial_checkpoint": None, "code_commit": "0" * 40}


@pytest.fixture
def arm(base: dict[str, Any]) -> Arm:
    return Arm("straight", base, "here", ranks=1)


@pytest.fixture
def runs(workspace: Workspace, ledger: Ledger) -> ArmRunner:
    return ArmRunner(Plant(workspace, ledger), workspace.root / "compared", "audit", Subject("segment", 3))


@pytest.fixture
def code(workspace: Workspace) -> LiveCode:
    return LiveCode(ROOT, workspace.root / "cache" / "code", True)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """The calls of a function, which goes on doing what it does."""
    calls: list[Any] = []
    function: Callable[..., Any] = getattr(module, name)

    def called(*words: Any, **keys: Any) -> Any:
        calls.append(words)
        return function(*words, **keys)

    monkeypatch.setattr(module, name, called)
    return calls


def here(root: Path, arm: Arm) -> RunTrace:
    """The same arm, trained in this process."""
    root.mkdir(exist_ok=True)
    live_training.prepare_arm_folder(root, root / arm.key, arm)
    assert train_here(root / arm.key) == (0, "")
    return RunTrace(root / arm.key, arm.first_step, arm.last_step)


def test_arms_of_one_code_share_a_trainer_and_are_trained_once(
    runs: ArmRunner, code: LiveCode, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = counted(monkeypatch, live_training, "start_trainer")
    again = replace(arm, name="again", repeat=1)
    low = replace(arm, name="low rate", recipe={"optimizer.lr": 1e-5})
    (runs.home / "gone").mkdir(parents=True)
    gone = [{"id": "gone", "path": str(runs.home / "gone"), "generation": 0}]
    bad = replace(arm, name="no data", plan={"token_shards": gone})
    done = runs.train_with_live_code(code, [arm, again, low, bad], "four arms")
    assert len(started) == 1 and done.code == 2 and "gone" in done.line
    assert runs.train_with_live_code(code, [arm, again, low], "three arms").code == 0 and len(started) == 1
    straight = runs.open_arm_trace(arm)
    assert have_same_bits(
        straight.final_checkpoint, runs.open_arm_trace(again).final_checkpoint
    ) and not have_same_bits(straight.final_checkpoint, runs.open_arm_trace(low).final_checkpoint)
    assert have_same_bits(straight.final_checkpoint, here(tmp_path / "here", arm).final_checkpoint), (
        "as a process of its own"
    )
    losses = straight.collect_metric_series(["loss", "nothing"])
    assert list(losses) == ["loss"] and len(losses["loss"]) == STEPS and None not in losses["loss"]
    assert straight.result["last_step"] == STEPS and straight.weights_differing_between_ranks == []
    assert runs.train_with_live_code(code, [replace(arm, name="asked for by another name")], "the same arm").code == 0
    assert len(started) == 1, "what was trained is not trained again"
    resumed = replace(arm, name="resumed", start=straight.final_checkpoint_path.with_name(format_checkpoint_name(2)))
    assert runs.train_with_live_code(code, [resumed], "one more").code == 0 and len(started) == 2
    assert have_same_bits(
        straight.final_checkpoint, runs.open_arm_trace(resumed).final_checkpoint
    ) and runs.open_arm_trace(resumed).metric_lines_by_step.keys() == {2, 3}
    rows = {run["arm"]["name"]: run for run in list_runs(runs.plant.ledger)}
    assert {name: run["state"] for name, run in rows.items()} == dict.fromkeys(
        ("straight", "again", "low rate", "resumed"), "done"
    ) | {"no data": "failed"}
    assert rows["no data"]["ended"] == done.line and format_run(rows["no data"]).data["state"] == "failed"
    assert format_run(rows["no data"]).data["why"].startswith(": exit 2")
    assert {(run["subject"], run["purpose"]) for run in rows.values()} == {("segment:3", "audit")}
    assert rows["low rate"]["arm"]["recipe"] == {"optimizer.lr": 1e-5} and rows["low rate"]["steps"] == STEPS
    assert Path(rows["straight"]["folder"]) == runs.find_arm_folder(arm)


def test_arms_run_in_parallel_if_there_are_several_devices(
    runs: ArmRunner, code: LiveCode, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for _ in range(2):
        free.put("")  # the CPU, twice
    monkeypatch.setattr(devices, "list_device_names", lambda: ["", ""])
    monkeypatch.setattr(devices, "_free", lambda: free)
    started = counted(monkeypatch, live_training, "start_trainer")
    arms = [replace(arm, name=f"seed {seed}", seed=seed) for seed in range(3)]
    assert runs.train_with_live_code(code, arms, "three arms").code == 0
    assert len(started) == 2
    for one in arms:
        assert have_same_bits(runs.open_arm_trace(one).final_checkpoint, here(tmp_path / "here", one).final_checkpoint)


def test_the_row_of_a_stopped_arm_says_that_it_was_stopped(
    runs: ArmRunner, code: LiveCode, arm: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise SegmentError("stopped by a person")

    monkeypatch.setattr("factory.runs.arm_runner.train_arms_with_live_code", stopped)
    with pytest.raises(SegmentError):
        runs.train_with_live_code(code, [arm], "straight")
    row = RunRow.get(runs.plant.ledger, arm.key)
    assert (row.state, row.ended) == ("stopped", "stopped by a person")
    line = {
        "key": arm.key,
        "purpose": "audit",
        "number": "3",
        "arm": "straight",
        "first": 0,
        "last": 4,
        "state": "stopped",
    }
    assert format_run(list_runs(runs.plant.ledger)[0]).data.items() >= (line | {"why": ": stopped by a person"}).items()
    with refused("runs.unknown_recipe_key", InputError, key="optimizer.lrr"):
        runs.train_with_live_code(code, [replace(arm, recipe={"optimizer.lrr": 1})], "a slip")
    home = runs.plant.workspace
    (shown,) = json.loads(command_here("runs", "--json", home=home).stdout)
    assert (shown["key"], shown["state"], shown["there"]) == (arm.key, "stopped", False)
    assert f"{arm.key}  audit of segment 3" in command_here("runs", home=home).stdout


def test_a_pause_stops_the_arms_and_they_continue_afterwards(
    runs: ArmRunner, code: LiveCode, arm: Arm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, start = runs.plant.ledger, live_training.start_trainer

    def paused(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        pause_daemon(ledger, TRAINING, "ada")
        return process

    monkeypatch.setattr(live_training, "start_trainer", paused)
    for _ in range(2):  # while it trains, and before it begins
        with pytest.raises(PausedError):
            runs.train_with_live_code(code, [arm], "straight")
        assert "ada paused training" in format_run(list_runs(ledger)[0])
    monkeypatch.undo()
    resume_daemon(ledger, "ada")
    assert (
        runs.train_with_live_code(code, [arm], "straight").code == 0
        and runs.open_arm_trace(arm).final_checkpoint.step == STEPS
    )


def test_a_run_whose_process_is_gone_is_shown_as_stopped(runs: ArmRunner, arm: Arm) -> None:
    """The process was killed, or an older factory recorded none, or another process now has its number."""
    with pytest.raises(SegmentError), runs.record_arm_states({runs.find_arm_folder(arm): arm}):
        assert (list_runs(runs.plant.ledger)[0]["state"], list_runs(runs.plant.ledger)[0]["ended"]) == ("running", None)
        raise SegmentError("stopped")
    killed = subprocess.Popen(["true"])
    killed.wait()
    process = "process {} of " + socket.gethostname()
    for ended in (None, process.format(killed.pid), process.format(os.getpid())):
        with runs.plant.ledger.begin() as tx:
            tx.execute(ledger_runs.update().values(state="running", ended=ended, started_at=1.0))
        stopped = format_run(list_runs(runs.plant.ledger)[0]).data
        assert (stopped["state"], stopped["why"]) == ("stopped", ": its process ended")


def test_a_run_on_another_machine_counts_as_running_while_it_writes(runs: ArmRunner, arm: Arm) -> None:
    with runs.record_arm_states({runs.find_arm_folder(arm): arm}) as ends:
        with runs.plant.ledger.begin() as tx:
            tx.execute(ledger_runs.update().values(ended="process 1 of node-7", started_at=1.0))
        written = runs.find_arm_folder(arm) / "metrics.jsonl"
        written.parent.mkdir(parents=True)
        written.touch()
        assert list_runs(runs.plant.ledger)[0]["state"] == "running"
        for path in (written, written.parent):
            os.utime(path, (time.time() - 2 * 3600,) * 2)
        stopped = list_runs(runs.plant.ledger)[0]
        assert stopped["state"] == "stopped" and stopped["ended"].endswith("on node-7")
        ends[arm.key] = ""


def test_a_sandboxed_trainer_waits_for_the_next_arm(
    runs: ArmRunner, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = counted(monkeypatch, sandboxed_training.sandbox, "run_in_sandbox")
    low = replace(arm, name="low rate", recipe={"optimizer.lr": 1e-5})
    expected = here(tmp_path / "here", arm)
    resumed = replace(arm, name="resumed", start=expected.final_checkpoint_path.with_name(format_checkpoint_name(2)))
    half = replace(arm, name="half of it", until=2)  # it would go on: its process ends with it
    arms = {runs.home / "trainer" / str(number): one for number, one in enumerate((arm, low, resumed, half))}
    left = []
    with closing(runs.train_sandboxed(runs.home / "trainer", ROOT, arms, PATIENCE_S)) as trained:
        for (folder, one), ended in zip(arms.items(), trained, strict=True):
            assert (ended.folder, ended.failed) == (folder, "") and ended.cpu and 0 < ended.cpu.thread < ended.cpu.tree
            assert sum((path / "segment.json").exists() for path in arms) == len(left) + 1, "the next is not shown yet"
            left.append(read_live_checkpoint(ended.opened, one.last_step, expected.final_checkpoint.model))
    assert len(began) == 1 and left[3].state["step"] == 2
    assert have_same_bits(left[0], expected.final_checkpoint) and have_same_bits(left[2], expected.final_checkpoint)
    assert not have_same_bits(left[1], expected.final_checkpoint)
    assert {run["state"] for run in list_runs(runs.plant.ledger)} == {"done"}


def code_of(tmp_path: Path, script: str) -> Path:
    (tmp_path / "code" / "trainer").mkdir(parents=True)
    (tmp_path / "code" / "trainer" / "__main__.py").write_text(script)
    return tmp_path / "code"


WAITS = """
import os, pathlib, sys, time
mine, next_ = map(pathlib.Path, sys.argv[2:4])
(mine / "ready").touch()
(next_ / "ready").touch()
while not (mine / "segment.json").exists():
    time.sleep(0.01)
"""
HOSTILE = """
os.symlink("VICTIM", mine / "checkpoints")
os.symlink("VICTIM", next_ / "checkpoints")
(next_ / "result.json").write_text("{}")
(mine / "metrics.jsonl").symlink_to("VICTIM/secret")
(mine / "result.json").symlink_to("VICTIM/secret")
time.sleep(600)
"""


def test_code_in_the_sandbox_cannot_redirect_the_next_arm(runs: ArmRunner, arm: Arm, tmp_path: Path) -> None:
    victim, code = tmp_path / "victim", code_of(tmp_path, WAITS + HOSTILE.replace("VICTIM", str(tmp_path / "victim")))
    victim.mkdir()
    (victim / "secret").write_text('{"step": 0}\n')
    output = runs.home / "trainer"
    arms = {output / "1": arm, output / "2": replace(arm, name="again", repeat=1)}
    with closing(runs.train_sandboxed(output, code, arms, PATIENCE_S)) as trained:
        first = next(trained)
        assert not first.failed, "it says that it is done"
        trace = RunTrace(first.folder, 0, STEPS)
        for read in (
            lambda: trace.final_checkpoint, lambda: trace.metric_lines_by_step, lambda: trace.result,
            lambda: read_live_checkpoint(first.opened, STEPS, {}), lambda: read_step_lines_in_open_folder(first.opened, "metrics.jsonl"),
        ):  # fmt: skip
            with pytest.raises(UntrustedFileError):
                read()
        # what is there before an arm is asked for is not its result
        (second,) = trained
        assert second.folder == output / "2" and tells([second.failed], expect("runs.not_begun", error="File exists"))
    assert [path.name for path in victim.iterdir()] == ["secret"]
    assert RunRow.get(runs.plant.ledger, arms[output / "2"].key).state == "failed"


def test_a_machine_fault_while_an_arm_is_handed_over_is_raised_and_not_blamed_on_the_code(
    runs: ArmRunner, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_handles(folder: int, spec: Any) -> None:
        with few_handles():
            write_spec_into_open_folder(folder, spec)

    monkeypatch.setattr(sandboxed_training, "write_spec_into_open_folder", without_handles)
    arms = {runs.home / str(number): replace(arm, repeat=number) for number in range(2)}
    with pytest.raises(OSError) as error:
        list(runs.train_sandboxed(runs.home, code_of(tmp_path, WAITS), arms, PATIENCE_S))
    assert find_fault_in(error.value) == NO_FILE_HANDLES
    assert [run["state"] for run in list_runs(runs.plant.ledger)] == ["stopped"]


def test_a_resumed_arm_does_not_need_the_segments_first_checkpoint(runs: ArmRunner, arm: Arm, tmp_path: Path) -> None:
    start = tmp_path / format_checkpoint_name(2)
    start.mkdir()
    (start / "manifest.json").write_text("{}")
    gone = replace(arm, base={**arm.base, "initial_checkpoint": str(tmp_path / "gone")}, start=start)
    (found,) = runs.train_sandboxed(runs.home, code_of(tmp_path, QUICK), {runs.home / "1": gone}, PATIENCE_S)
    assert not found.failed


QUICK = """
import pathlib, sys
(pathlib.Path(sys.argv[1]) / "result.json").write_text("{}")
"""


def test_the_wait_for_a_free_device_does_not_count_as_training_time(
    runs: ArmRunner, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found, code = [0.0], list[ArmRunEnd](), code_of(tmp_path, QUICK)
    monkeypatch.setattr(sandboxed_training, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    train = lambda: found.extend(
        sandboxed_training.train_sandboxed(runs.home, code, {runs.home / "1": arm}, PATIENCE_S)
    )
    waiting = threading.Thread(target=train)
    with devices.hold_device():
        waiting.start()
        while not (runs.home / "1" / "segment.json").exists():
            pass
        clock[0] = 1000.0
    waiting.join(PATIENCE_S)
    assert [(one.failed, one.seconds) for one in found] == [("", 0.0)]


def test_an_arm_over_its_time_limit_is_stopped_and_a_finished_arm_is_not_trained_again(
    runs: ArmRunner, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = runs.train_in_own_sandbox(arm, ROOT, "00003-trunk", 0.1)
    assert found.out_of_time and "exceeded its wall limit" in found.failed
    began = counted(monkeypatch, sandboxed_training.sandbox, "run_in_sandbox")
    found = runs.train_in_own_sandbox(arm, ROOT, "00003-trunk", PATIENCE_S)
    assert found == runs.train_in_own_sandbox(arm, ROOT, "00003-trunk", PATIENCE_S) and len(began) == 1
    assert (
        found.folder == runs.find_arm_folder(arm) / "00003-trunk"
        and RunTrace(found.folder, 0, STEPS).final_checkpoint.state["step"] == STEPS
    )
