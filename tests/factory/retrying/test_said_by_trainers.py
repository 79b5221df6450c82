"""A trainer's own report of its end is compared with the facts that the factory can check.

Merged code that falsely reports a full disk, or that somebody stopped it, is tried again and parked like any other code that fails."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from types import SimpleNamespace
from typing import Any

import pytest

from factory.core.errors import DiskFullError, SegmentError
from factory.core.faults import has_room_for
from factory.core.launching import EXIT_DISK_FULL, EXIT_STOPPED, find_trainer_exit_code, remove_exit_code_files
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.retrying.trainer_deaths import KILLED, OUT_OF_MEMORY, REFUSED, TrainerDiedError, classify_trainer_ending
from factory.runs import live_training
from factory.runs.arm import Arm
from factory.runs.live_training import TrainerExit
from factory.runs.trainer_folder import estimate_max_checkpoint_bytes
from factory.sandbox.live_sandbox import RunningCommand
from factory.training.planning import plan_trunk
from factory.training.segment_folder import raise_trainer_failure
from factory.training.training import run_segment
from tests.support.failing.deaths import deaths, plan_row
from tests.support.failing.nights import fill, small_disk
from tests.support.messages import refused, the
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import make_plant
from trainer.contract.recipe import Recipe

RECIPE = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump(mode="json")


def planned(workspace: Workspace, ledger: Ledger) -> SegmentRow:
    folder = workspace.segments / "00001-trunk"
    folder.mkdir(parents=True)
    return plan_row(ledger, folder=str(folder), recipe_json=RECIPE)


def test_an_end_because_of_a_full_disk_does_not_count_as_a_try(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        workspace = Workspace.create(disk / "w", WorkspaceConfig())
        ledger = Ledger.create(workspace.ledger_url)
        row = planned(workspace, ledger)
        fill(disk)
        with pytest.raises(DiskFullError, match=f"egment {row.id}\\b"):
            raise_trainer_failure(Plant(workspace, ledger), row, EXIT_DISK_FULL, None)
        assert SegmentRow.get(ledger, row.id).attempts == 0


@pytest.mark.parametrize(
    ("code", "how", "ended"),
    [(EXIT_DISK_FULL, REFUSED, "retrying.ended.disk_not_full"), (EXIT_STOPPED, KILLED, "retrying.ended.stopped")],
)
def test_a_trainer_with_a_false_exit_code_is_parked(
    workspace: Workspace, ledger: Ledger, code: int, how: str, ended: str
) -> None:
    row = planned(workspace, ledger)
    (workspace.logs / f"segment-{row.id:05d}.log").write_text("trainer: no room\n")
    for parked in (False, False, True):
        with pytest.raises(TrainerDiedError) as raised:
            raise_trainer_failure(Plant(workspace, ledger), SegmentRow.get(ledger, row.id), code, None)
        assert raised.value.parked == parked and raised.value.data["segment"] == row.id
        assert raised.value.code == ("training.trainer_died_parked" if parked else "training.trainer_died")
        ending = raised.value.data["ending"]
        assert (ending.code, ending.data["cause"]) == (ended, ": trainer: no room")
    assert [death["how"] for death in deaths(ledger, row.id)] == [how] * 2


def test_no_trainer_starts_on_a_disk_without_room_for_a_checkpoint(tmp_path: Path, code_repository: Path) -> None:
    """Else a trainer that reports a full disk would be believed, restarted forever, and files removed each time."""
    with small_disk(tmp_path / "disk", "256m") as disk:
        workspace, ledger = make_plant(disk, code_repository)
        number = plan_trunk(Plant(workspace, ledger), 10)
        room = estimate_max_checkpoint_bytes(SegmentRow.get(ledger, number).recipe_json) // 2
        with open(disk / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk_usage(workspace.root).free - room)
        for _ in range(3):
            with pytest.raises(DiskFullError, match=f"egment {number}\\b.* 0.0"):
                run_segment(Plant(workspace, ledger), number)
        assert SegmentRow.get(ledger, number).attempts == 0
        assert not (workspace.logs / f"segment-{number:05d}.log").read_bytes(), "no trainer said anything"
        (disk / "ballast").unlink()
        assert run_segment(Plant(workspace, ledger), number)["last_step"] == SegmentRow.get(ledger, number).last_step


def test_a_rank_that_was_stopped_because_another_failed_is_not_the_cause() -> None:
    """As torchrun prints it."""
    table = "Failures:\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 7)\n  rank      : 1\n  exitcode  : 75 (pid: 8)\n"
    assert classify_trainer_ending(75, "[rank0]: OutOfMemoryError", table.format(1), None).kind == OUT_OF_MEMORY
    assert classify_trainer_ending(75, "", table.format(-11), None).says == "ended with signal SIGSEGV"
    digits = "9" * 5000  # more than Python makes a number of
    assert (
        classify_trainer_ending(75, "", table.format(digits) + f"Signal {digits} (SIGX) received by PID 1", None).kind
        == KILLED
    )
    assert (
        classify_trainer_ending(
            1, "", table.format(f"-{digits}") + f"Signal {digits} (SIGX) received by PID 1", None
        ).kind
        == REFUSED
    )
    assert (
        classify_trainer_ending(75, "", table.format(75), None).kind
        == classify_trainer_ending(75, "", table.format(-15), None).kind
        == KILLED
    )


def test_a_folder_named_as_an_exit_code_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "exit-2").mkdir()
    (tmp_path / "exit-11").touch()
    assert find_trainer_exit_code(1, [tmp_path]) == 11
    remove_exit_code_files(tmp_path)
    assert find_trainer_exit_code(1, [tmp_path]) == 1


def test_room_on_a_disk_is_checked_by_reserving_it(tmp_path: Path) -> None:
    need = estimate_max_checkpoint_bytes(RECIPE)
    with small_disk(tmp_path / "disk", "64m") as disk:
        assert has_room_for(disk, 1 << 20) and has_room_for(disk, need) and not has_room_for(disk, 65 << 20)
        assert not list(disk.iterdir())
        fill(disk)
        assert not has_room_for(disk, 1)


def test_a_file_larger_than_the_users_limit_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    """Free bytes do not show it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert has_room_for(tmp_path, 1 << 20) and not has_room_for(tmp_path, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_free_inodes_has_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m,nr_inodes=4") as disk:
        for name in "abc":
            (disk / name).touch()
        assert not has_room_for(disk, 1)


@dataclass
class Certificate:
    """Two runs of a certificate. Their trainer is a line of shell: ``first``, then ``does``."""

    workspace: Workspace
    does: str
    first: str = ""

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger.create(self.workspace.ledger_url)

    @property
    def folders(self) -> list[Path]:
        return [self.workspace.root / "scratch" / name for name in ("one", "two")]

    def start(self, *_: object, out: Any, **__: object) -> RunningCommand:
        return RunningCommand(subprocess.Popen(["sh", "-c", self.first + self.does], stdout=out, stderr=out))

    def run(self) -> TrainerExit:
        plan: dict[str, Any] = {"token_shards": []}
        spec = {"recipe": RECIPE, "first_step": 0, "last_step": 2, "data_plan": plan, "initial_checkpoint": None}
        commit: Any = SimpleNamespace(folder=Path("commit"))
        arms = {folder: Arm(folder.name, spec, "c0ffee", repeat=n) for n, folder in enumerate(self.folders)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_training, "start_trainer", self.start)
            patch.setattr(live_training, "POLL_SECONDS", 0.05)
            plant = Plant(self.workspace, self.ledger)
            return live_training.train_arms_with_live_code(plant, commit, self.folders[0].parent, arms, "certificate")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (f"exit {EXIT_DISK_FULL}", "reported a full disk"),
        (f"exit {EXIT_STOPPED}", "received SIGTERM from another process"),
        ("kill -9 $$", "was killed by another process"),
        ("kill -15 $$", "was ended by SIGTERM from another process"),
        ("sleep 600", "no first step"),
        ("echo trainer: CUDA out of memory; exit 1", "ran out of memory and ended with exit 1"),
    ],
)
def test_an_end_by_a_possible_machine_fault_fails_a_certificate_only_after_three_in_a_row(
    workspace: Workspace, does: str, says: str
) -> None:
    """No file is removed, and a new result in between counts as progress. ``test_certifying`` has real code of both kinds."""
    (workspace.root / "policies").mkdir(exist_ok=True)
    (workspace.root / "policies" / "retries.yaml").write_text("start_seconds: 0.5\n")
    certificate = Certificate(workspace, does)
    for count, first in ((1, ""), (2, ""), (1, f"touch {certificate.folders[0]}/result.json; "), (2, "")):
        certificate.first = first
        with refused("runs.trainer_ended", SegmentError, title="certificate", ends=count, tries=3) as raised:
            certificate.run()
        assert re.search(says, str(raised.value)) and not isinstance(raised.value, DiskFullError)
    found = certificate.run()
    said = the([found.line], "runs.ended_each_time")
    assert found.code and said.data["times"] == 3 and re.search(says, said), found


def test_a_crash_fails_a_certificate_at_once(workspace: Workspace) -> None:
    assert Certificate(workspace, "echo trainer: no; exit 1").run() == TrainerExit(1, "exit 1: trainer: no")
