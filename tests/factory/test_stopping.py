"""After SIGTERM, Ctrl-C or kill -9 to the factory, even within a step, no process runs ten seconds later, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.runs.live_code import LiveCode, start_trainer, stop_trainer
from factory.training.planning import plan_trunk
from factory.training.segment_folder import write_folder_owner
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import commit_edit, make_plant
from tests.support.stopping import SLOW_STEP, WITHIN, left_of, started_by, wait_for
from trainer.contract import stopping
from trainer.contract.json_lines import read_json_lines

FACTORY = [sys.executable, "-m", "factory"]
GO_ON = "factory: stopped; run the same command again to continue"
STEP = "        recipe, spec = self.recipe, self.spec\n        lr ="


@dataclass
class Slow:
    """A plant whose training step is slow while ``mark`` exists, and its planned segment."""

    workspace: Workspace
    ledger: Ledger
    segment: int

    @property
    def folder(self) -> Path:
        return Path(SegmentRow.get(self.ledger, self.segment).folder)

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    def start(self, *words: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        """(the factory's process while its trainer is within a slow step, all processes that it started)."""
        write_folder_owner(
            self.ledger, SegmentRow.get(self.ledger, self.segment)
        )  # makes the folder, which is this segment's
        for old in self.folder.glob("slow-*"):
            old.unlink()
        self.mark.touch()
        process = factory(*words, "--workspace", str(self.workspace.root))
        wait_for(self.mark.with_name("slow-0"))
        return process, started_by(process.pid)


def factory(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*FACTORY, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it is ignored, and stays so
    )  # fmt: skip


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Slow:
    root = tmp_path_factory.mktemp("stopping")
    code = make_target(root / "code")
    commit_edit(code, "trainer/run.py", STEP, indent(SLOW_STEP, "        ") + STEP)
    workspace, ledger = make_plant(root, code, checkpoint_every=3)
    return Slow(workspace, ledger, plan_trunk(Plant(workspace, ledger), 12))


@pytest.mark.sample("run")
@pytest.mark.slow("a factory and its trainer, stopped in the midst of a step")
@pytest.mark.parametrize(
    ("command", "number"),
    [(("train",), signal.SIGTERM), (("run", "--once"), signal.SIGINT), (("train",), signal.SIGHUP)],
    ids=["train", "run", "a closed terminal"],
)
def test_a_signal_within_a_step_ends_all_processes(
    slow: Slow, command: tuple[str, ...], number: signal.Signals
) -> None:
    process, started = slow.start(*command)
    process.send_signal(number)
    said, _ = process.communicate(timeout=WITHIN)
    assert process.returncode == 128 + number and said.splitlines()[-1] == GO_ON and "Traceback" not in said
    assert len(started) >= 3 and not left_of(started, 0.5)
    row = SegmentRow.get(slow.ledger, slow.segment)
    assert (row.state, row.attempts) == ("planned", 0)


@pytest.mark.slow("a factory and its trainer, stopped in the midst of a step")
def test_a_second_signal_ends_all_processes_at_once(slow: Slow) -> None:
    process, started = slow.start("train")
    process.send_signal(signal.SIGINT)
    time.sleep(2 * stopping.SAME_SECONDS)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=stopping.GRACE_SECONDS / 2)
    assert process.returncode == 130 and said.splitlines()[-1] == GO_ON
    assert not left_of(started, 0.5)


@pytest.mark.slow("a factory and its trainer, killed in the midst of a step")
def test_after_a_kill_of_the_factory_its_processes_end_and_the_segment_finishes_later(slow: Slow) -> None:
    """The last test of this file that stops the segment."""
    process, started = slow.start("train")
    process.kill()
    assert not left_of(started)
    process.communicate()
    slow.mark.unlink()
    before = read_json_lines(slow.folder / "metrics.jsonl")
    run_segment(Plant(slow.workspace, slow.ledger), slow.segment)
    row = SegmentRow.get(slow.ledger, slow.segment)
    assert (row.state, row.attempts) == ("done", 0)
    steps = [line["step"] for line in read_json_lines(slow.folder / "metrics.jsonl")]
    assert steps == list(range(int(str(row.first_step)), int(str(row.last_step))))
    assert all(line["step"] < steps[0] + 12 for line in before)


@pytest.mark.sample("sandbox")
@pytest.mark.slow("a factory and its trainer, stopped in the midst of a step")
@pytest.mark.parametrize("isolated", [True, False], ids=["sandbox", "outside"])
def test_code_that_ignores_the_signal_is_killed_with_its_children(
    tmp_path: Path, workspace: Workspace, isolated: bool
) -> None:
    """As code of an older commit, whose step is slow."""
    (tmp_path / "trainer").mkdir()
    segment = tmp_path / "segment"
    segment.mkdir()
    (tmp_path / "trainer" / "__main__.py").write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1], 'started').touch()\n"
        "while True: time.sleep(300)\n"
    )
    with open(tmp_path / "log", "wb") as log:
        code, words = LiveCode(tmp_path, tmp_path / "cache", isolated), [str(segment)]
        process = start_trainer(workspace, code, words, writable=[segment], readonly=[], out=log, lock=log.fileno())
    wait_for(segment / "started")
    started = started_by(process.pid)
    began = time.monotonic()
    stop_trainer(process)
    assert time.monotonic() - began < WITHIN and process.returncode == -signal.SIGKILL
    assert len(started) >= 1 and not left_of(started, 0.5)


@pytest.mark.slow("a factory and its trainer, stopped in the midst of a step")
def test_make_demo_passes_sigterm_on(tmp_path: Path) -> None:
    """In a complete virtual environment, make starts the factory itself, and ends with it."""
    venv, demo = tmp_path / "venv", tmp_path / "demo"
    (venv / "bin").mkdir(parents=True)
    command = venv / "bin" / "factory"
    command.write_text(f"#!{sys.executable}\nfrom factory.cli import main\nmain()\n")
    command.chmod(0o755)
    (venv / ".ready").touch()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FACTORY_HOME": str(demo)}
    words = ["make", "-C", str(ROOT), f"VENV={venv}", "demo"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    wait_for(demo / "ledger.db")
    wait_for_pool(process.pid)
    started = started_by(process.pid)
    process.terminate()
    said, _ = process.communicate(timeout=WITHIN)
    assert GO_ON in said and "Traceback" not in said, said
    assert process.returncode != 0 and len(started) >= 2 and not left_of(started, 0.5)


def wait_for_pool(process: int) -> None:
    """Until ingest has its workers: each is a child of the factory, which is make's."""
    deadline = time.monotonic() + 120
    while len(started_by(process)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


STUBBORN = """
import signal, subprocess, sys, time
from factory.core import stop_signals
BEFORE
end_if_stopped = stop_signals.install_stop_signal_handlers()
try:
    words = ["sh", "-c", "sleep 300 & echo begun; wait"]
    subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
    print("ready", flush=True)
    time.sleep(300)
except stop_signals.StopInterrupt:
    if sys.argv[1] == "orderly":
        end_if_stopped()
finally:
    time.sleep(300)
"""


def stubborn(how: str, before: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", STUBBORN.replace("BEFORE", before), how]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["orderly", "twice", "late"])
def test_a_signal_leaves_no_process_whatever_the_main_thread_does(how: str) -> None:
    """After one signal, the process may clean up for some seconds. Two signals at almost the same time count as one."""
    process = stubborn(how, "stop_signals.UNWIND_SECONDS = 1.0" if how == "late" else "")
    started = started_by(process.pid)
    process.terminate()
    process.terminate()
    if how == "twice":
        time.sleep(2 * stopping.SAME_SECONDS)
        assert process.poll() is None
        process.terminate()
    _, errors = process.communicate(timeout=5)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, GO_ON + "\n")
    assert len(started) == 2 and not left_of(started, 0.5)


HALF_AN_IMPORT = """
from factory.cli import app, main
@app.app.command()
def imports():
    try:
        print("ready", flush=True)
        __import__("time").sleep(300)
    finally:
        raise AttributeError("partially initialized module")
main()
"""


def test_a_failure_after_an_interrupt_is_not_reported_as_a_bug() -> None:
    words = [sys.executable, "-c", HALF_AN_IMPORT, "imports"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WITHIN)
    assert (process.returncode, errors) == (128 + signal.SIGINT, GO_ON + "\n")


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As under nohup, or in the background of a shell."""
    process = stubborn("orderly", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM
