"""Real trainers that are killed, crash, hang or run out of memory at a given step: the factory distinguishes the causes and finishes the segment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from factory.core.errors import SegmentError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.retrying.trainer_deaths import HUNG, KILLED, OUT_OF_MEMORY, TrainerDiedError, abandon_segment
from factory.runs.trainer_folder import lock_trainer_folder
from factory.sandbox.live_sandbox import RunningCommand
from factory.training.planning import plan_trunk
from factory.training.training import _kill, run_segment
from tests.support.factory.code_loop import make_target
from tests.support.factory.command import factory
from tests.support.factory.errands import next_due
from tests.support.failing.deaths import deaths, make_mortal, plan_row, strike
from tests.support.messages import codes, refused
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import make_plant

Opened = tuple[Workspace, Ledger]
STEPS = 20


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A trunk of 20 steps, whose next segments have a checkpoint every fourth step."""
    root = tmp_path_factory.mktemp("dying")
    code = make_target(root / "code")
    make_mortal(code)
    workspace, ledger = make_plant(root, code, checkpoint_every=4, keep_checkpoints=9)
    return workspace, ledger


@pytest.fixture
def segment(plant: Opened) -> Iterator[int]:
    """A planned segment of twenty steps. Afterwards no segment is parked or open, and the policy is the shipped one."""
    workspace, ledger = plant
    number = plan_trunk(Plant(workspace, ledger), STEPS)
    yield number
    (workspace.root / "policies" / "retries.yaml").unlink(missing_ok=True)
    for path in Path(SegmentRow.get(ledger, number).folder).glob("*-*-*"):
        path.unlink()
    if SegmentRow.get(ledger, number).state == "failed":
        abandon_segment(ledger, number, "ada")
    elif SegmentRow.get(ledger, number).state == "planned":
        run_segment(Plant(workspace, ledger), number)


def policy(workspace: Workspace, **keys: float) -> None:
    (workspace.root / "policies" / "retries.yaml").write_text(yaml.safe_dump(keys))


def first_of(ledger: Ledger, segment: int) -> int:
    return int(SegmentRow.get(ledger, segment).first_step)


def steps_of(ledger: Ledger, segment: int) -> list[int]:
    path = Path(SegmentRow.get(ledger, segment).folder) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.slow("a trainer that dies five times before its segment is done")
def test_a_segment_that_progresses_with_every_try_finishes(plant: Opened, segment: int) -> None:
    workspace, ledger = plant
    first = first_of(ledger, segment)
    strike(ledger, segment, *(f"fault-kill-{first + step}" for step in (5, 9, 13, 17, 18)))
    for step in (4, 8, 12, 16):
        said = {"segment": segment, "step": first + step, "attempts": 1, "tries": 3}
        with refused("training.trainer_died", TrainerDiedError, **said) as raised:
            run_segment(Plant(workspace, ledger), segment)
        assert codes([raised.value.data["ending"]]) == ["retrying.ended.killed"]
    with refused("training.trainer_died", TrainerDiedError, step=first + 16, attempts=2, tries=3):
        run_segment(Plant(workspace, ledger), segment)
    assert [death["how"] for death in deaths(ledger, segment)] == [KILLED] * 5
    run_segment(Plant(workspace, ledger), segment)
    assert SegmentRow.get(ledger, segment).state == "done"
    assert steps_of(ledger, segment) == list(range(first, first + STEPS)), "each step once"


@pytest.mark.slow("a trainer that dies three times at one step, and one that ends")
def test_a_segment_without_progress_is_parked_and_no_other_trunk_begins(plant: Opened, segment: int) -> None:
    workspace, ledger = plant
    first = first_of(ledger, segment)
    folder = strike(ledger, segment, f"always-raise-{first + 7}")
    for tries in (1, 2):
        with refused("training.trainer_died", TrainerDiedError, attempts=tries, tries=3) as raised:
            run_segment(Plant(workspace, ledger), segment)
        assert codes([raised.value.data["ending"]]) == ["retrying.ended.exit"] and "the weather is bad" in str(
            raised.value
        )
    with pytest.raises(TrainerDiedError, match="the weather is bad") as last:
        run_segment(Plant(workspace, ledger), segment)
    assert last.value.parked and next_due(Plant(workspace, ledger), endless=True) == ""
    before = ledger.read("SELECT count(*) AS n FROM segments")
    parked = f"{segment} (trunk, steps {first}–{first + STEPS}) is parked at step {first + 4}"
    for command, code in ((("train",), 2), (("anneal",), 2), (("run", "--once"), 5)):
        done = factory(*command, "--workspace", str(workspace.root))
        assert done.returncode == code and parked in done.stderr and f"'factory retry {segment}'" in done.stderr, (
            done.stderr
        )
    assert ledger.read("SELECT count(*) AS n FROM segments") == before
    assert parked in factory("status", "--workspace", str(workspace.root)).stdout
    (folder / f"always-raise-{first + 7}").unlink()
    done = factory("retry", str(segment), "--workspace", str(workspace.root))
    assert f"egment {segment} from step {first + 4} " in done.stdout
    assert next_due(Plant(workspace, ledger)) == f"train {segment}"
    run_segment(Plant(workspace, ledger), segment)
    assert steps_of(ledger, segment) == list(range(first, first + STEPS))


@pytest.mark.slow("a trainer that hangs twice, and one that ends")
def test_a_hung_trainer_is_killed_and_its_segment_continues(plant: Opened, segment: int) -> None:
    workspace, ledger = plant
    first = first_of(ledger, segment)
    policy(workspace, hung_seconds=8.0, start_seconds=600.0)
    strike(ledger, segment, f"fault-hang-{first + 5}")
    with refused("training.trainer_died", TrainerDiedError, segment=segment, step=first + 4) as raised:
        run_segment(Plant(workspace, ledger), segment)
    ending = raised.value.data["ending"]
    assert ending.code == "training.hung" and ending.data["hung"].code == "retrying.hung"
    number = ending.data["process"]
    assert not psutil.pid_exists(number) and deaths(ledger, segment)[-1]["how"] == HUNG
    begun = ledger.read("SELECT detail FROM events WHERE kind = 'trainer_begun' ORDER BY id DESC LIMIT 1")[0]["detail"]
    assert begun["process"] == number and begun["seconds"] > 0
    run_segment(Plant(workspace, ledger), segment)
    assert steps_of(ledger, segment) == list(range(first, first + STEPS))


def limited_group() -> Path | None:
    """A child control group with a memory limit of 3 GiB; None where the machine allows none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version_1 = "memory" in controllers.split(",")
        if not version_1 and controllers:
            continue
        folder = Path("/sys/fs/cgroup" + ("/memory" if version_1 else "")) / path.lstrip("/") / f"test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(3 << 30))
            return folder
        except OSError:
            if folder.exists():
                folder.rmdir()
    return None


def end_group(group: Path) -> None:
    """Remove the control group. The kernel refuses for a moment after the last process has ended; one that lives is named."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)
    living = [psutil.Process(int(one)).cmdline() for one in (group / "cgroup.procs").read_text().split()]
    raise AssertionError(f"still in {group}: {living}")


@pytest.mark.slow("a trainer that eats three gigabytes and is killed for it by the kernel")
def test_the_report_of_a_death_for_want_of_memory_names_it(plant: Opened, segment: int) -> None:
    group = limited_group()
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    workspace, ledger = plant
    strike(ledger, segment, f"fault-memory-{first_of(ledger, segment) + 4}")
    program = (
        f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -m factory train --steps 3 --workspace {workspace.root}"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, env=environment)
    finally:
        end_group(group)
    assert done.returncode == SegmentError.exit_code, done.stderr
    assert "out of memory" in done.stderr or "OOM killer" in done.stderr  # the limit of live code, or the group's
    assert deaths(ledger, segment)[-1]["how"] == OUT_OF_MEMORY


@contextmanager
def frozen(processes: list[int]) -> Iterator[None]:
    """Freeze processes in the kernel until the block ends, so that SIGKILL has no effect, as with a lost disk."""
    folder = Path(f"/sys/fs/cgroup/freezer/test-{os.getpid()}")
    folder.mkdir()
    try:
        for process in processes:
            (folder / "cgroup.procs").write_text(str(process))
        (folder / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (folder / "freezer.state").write_text("THAWED")
        psutil.wait_procs([psutil.Process(one) for one in processes if psutil.pid_exists(one)], timeout=PATIENCE_S)
        folder.rmdir()


def test_a_trainer_that_survives_sigkill_is_named(tmp_path: Path, ledger: Ledger) -> None:
    """The next try fails on the folder's lock and names the process that holds it."""
    if not os.access("/sys/fs/cgroup/freezer", os.W_OK):
        pytest.skip("this machine can freeze no process")
    row = plan_row(ledger, folder=str(tmp_path / "00001-trunk"))
    with lock_trainer_folder(Path(row.folder)) as lock:
        process = subprocess.Popen(["sleep", "600"], pass_fds=[lock])
    with pytest.MonkeyPatch.context() as patch, frozen([process.pid]):
        patch.setattr("factory.training.training.KILL_SECONDS", 0.5)
        patch.setattr("factory.runs.trainer_folder.LOCK_SECONDS", 0.5)
        with refused("training.hung_unkillable", SegmentError, process=process.pid, hung="no step", segment=row.id):
            _kill(RunningCommand(process), row, process.pid, "no step")
        with (
            pytest.raises(SegmentError, match=rf"process {process.pid}\b"),
            lock_trainer_folder(Path(row.folder)),
        ):
            pass
    process.wait()
    with lock_trainer_folder(Path(row.folder)):
        pass
