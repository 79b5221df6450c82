"""Trains arms with live code.

One trainer (``python -m trainer --wait``) trains all arms of one commit in sequence, so it imports, compiles and reads the data once. If each arm
needs only one device, the arms are divided among as many trainers as there are devices.

A restarted factory continues: an arm with a result is not trained again, and an unfinished arm resumes. A pause stops all arms.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from factory.core import devices
from factory.core.errors import PersonNeededError, SegmentError
from factory.core.faults import is_machine_fault, is_temporary_read_failure
from factory.core.launching import (
    EXIT_DISK_FULL,
    LOG_BYTES,
    count_ranks,
    find_failure_line,
    find_trainer_exit_code,
    remove_exit_code_files,
)
from factory.core.path_removal import remove_path
from factory.core.progress import ProgressTask
from factory.core.untrusted_trainer_files import count_lines, read_json_object, read_tail
from factory.ledger.plant import Plant
from factory.retrying.daemon_requests import refuse_while_paused
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import (
    HUNG,
    KILLED,
    OUT_OF_MEMORY,
    TrainerFailure,
    classify_exceeded_limit,
    classify_trainer_ending,
    count_oom_kills,
)
from factory.retrying.watchdog import UsualDurations, Watchdog
from factory.runs.arm import Arm, Spec
from factory.runs.live_code import (
    LiveCode,
    list_paths_read_by_trainer,
    start_trainer,
    stop_trainer,
    wait_for_process_end,
)
from factory.runs.trainer_folder import (
    check_disk_space,
    estimate_max_checkpoint_bytes,
    lock_trainer_folder,
    remove_links_and_pipes,
    write_spec,
)
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

POLL_SECONDS = 1.0
NO_USUAL_TIMES = UsualDurations()
POSSIBLE_MACHINE_FAULTS = (HUNG, KILLED, OUT_OF_MEMORY)  # such an end says nothing about the code, unless it repeats


@dataclass(frozen=True)
class TrainerExit:
    """How a trainer ended: its exit code and last line. With code 0, every arm has a result."""

    code: int = 0
    line: str = ""


def train_arms_with_live_code(
    plant: Plant,
    code: LiveCode,
    home: Path,
    arms: Mapping[Path, Arm],
    title: str,
    usual: UsualDurations = NO_USUAL_TIMES,
) -> TrainerExit:
    """Train ``arms``, each in its folder below ``home``. All must have the same number of ranks. Returns how the first failed trainer ended.

    ``usual``: measured times of earlier trainers. Raises: PausedError while training is paused; SegmentError if a trainer was stopped or killed,
    hung, had too little memory, or found the disk full. After ``tries`` (``policies/retries.yaml``) such ends without a new result, the last end is
    returned instead.
    """
    refuse_while_paused(plant.ledger)
    home.mkdir(parents=True, exist_ok=True)
    (count,) = {arm.ranks for arm in arms.values()}
    alone = (count_ranks(plant.workspace) if count is None else count) == 1
    lanes = _lanes(arms, len(devices.list_device_names()) if alone and len(arms) > 1 else 1)
    with lock_trainer_folder(home) as lock:  # the trainer of a killed factory may still write its last checkpoint
        remove_links_and_pipes(home, plant.progress)
        specs = {folder: prepare_arm_folder(home, folder, arm) for folder, arm in arms.items()}
        if all((folder / "result.json").exists() for folder in arms):
            return TrainerExit()
        steps = sum(arm.last_step - arm.first_step for arm in arms.values())
        with plant.progress.task(title, steps) as task:
            run = lambda lane: _Lane(plant, code, home, {folder: specs[folder] for folder in lane}, title, count, usual)
            if len(lanes) == 1:
                endings = [run(lanes[0]).train(task, lock)]
            else:
                endings = devices.run_in_parallel([_on_one(run(lane), task, lock) for lane in lanes])
    return next((ending for ending in endings if ending.code), TrainerExit())


def _lanes(arms: Mapping[Path, Arm], count: int) -> list[list[Path]]:
    """Divide the arms' folders among ``count`` trainers."""
    folders = list(arms)
    return [lane for number in range(count) if (lane := folders[number::count])]


def _on_one(lane: _Lane, task: ProgressTask, lock: int) -> Callable[[], TrainerExit]:
    """Return a job that waits for a free device and trains on it."""

    def job() -> TrainerExit:
        with devices.hold_device():
            return lane.train(task, lock)

    return job


@dataclass(frozen=True)
class _Lane:
    """Arms that one trainer trains in sequence."""

    plant: Plant
    code: LiveCode
    home: Path
    specs: Mapping[Path, Spec]
    title: str
    count: int | None  # number of ranks
    usual: UsualDurations

    def train(self, task: ProgressTask, lock: int) -> TrainerExit:
        """Train the arms. Returns how the trainer ended. Raises: PausedError, SegmentError."""
        plant, folders = self.plant, list(self.specs)
        log = self.home / f"{folders[0].name}.log"
        for folder in folders:
            remove_exit_code_files(folder)
        largest = max((spec["recipe"] for spec in self.specs.values()), key=estimate_max_checkpoint_bytes)
        check_disk_space(self.home, largest, self.title)
        policy = RetryPolicy.load(plant.workspace.policy_path("retries.yaml"))
        kills = count_oom_kills()
        with open(log, "wb") as out:
            process = start_trainer(
                plant.workspace, self.code, ["--wait", *map(str, folders)], writable=folders,
                readonly=sorted({path for spec in self.specs.values() for path in list_paths_read_by_trainer(spec)}), out=out, lock=lock,
                count=self.count,
            )  # fmt: skip
            dog = Watchdog(policy, self.usual, process.pid, self.home, starts_often=len(folders) > 1)
            done = made = 0
            over, hung = False, ""
            try:
                while not over and not hung:
                    over = wait_for_process_end(process, POLL_SECONDS)
                    now = sum(count_lines(folder / "metrics.jsonl") for folder in folders)
                    task.advance(now - done, self.code.folder.name[:12])
                    made, done = made + max(0, now - done), now
                    hung = "" if over else dog.find_hang(made)
                    with ignore_machine_faults():
                        refuse_while_paused(plant.ledger)
            except BaseException:
                stop_trainer(process)
                raise
            if hung:
                stop_trainer(process)
        for folder in folders:
            remove_links_and_pipes(folder, plant.progress)
        status, line = find_trainer_exit_code(process.wait(), folders), find_failure_line(log)
        ending = classify_trainer_ending(status, line, read_tail(log, LOG_BYTES).decode(errors="replace"), kills)
        if beyond := classify_exceeded_limit(status, process.exceeded_limit):
            ending, line = beyond, beyond.says
        if hung:
            ending = TrainerFailure(HUNG, f"hung and was killed: {hung}")
        if status == EXIT_DISK_FULL:
            check_disk_space(self.home, largest, self.title, line)
        if ending.kind in POSSIBLE_MACHINE_FAULTS or status == EXIT_DISK_FULL:
            ends = _count_end(log.with_suffix(".ends"), folders)
            if ends < policy.tries:
                raise SegmentError(
                    "runs.trainer_ended",
                    "{title}: the trainer {ending} (log: {log}). Run the same command again to continue. {ends} of {tries} allowed tries ended "
                    "without a new result.",
                    title=self.title, ending=ending.says, log=log, ends=ends, tries=policy.tries,
                )  # fmt: skip
            repeated = Message(
                "runs.ended_each_time",
                "in each of {times} tries, the trainer {ending}",
                times=policy.tries,
                ending=ending.says,
            )
            return TrainerExit(status or 1, repeated)
        if status == 0 and not all((folder / "result.json").exists() for folder in folders):
            return TrainerExit(1, Message("runs.no_result", "the trainer ended without a result"))
        return TrainerExit(status, f"exit {status}: {line or 'nothing'}" if status else "")


@contextmanager
def ignore_machine_faults() -> Iterator[None]:
    """Ignore faults of the machine in a ``with`` block: a locked, full or missing ledger or disk must not stop a trainer."""
    try:
        yield
    except PersonNeededError:
        raise
    except Exception as error:
        if not is_machine_fault(error):
            raise


def _count_end(path: Path, folders: Sequence[Path]) -> int:
    """Count one more end that may be the machine's fault. Returns how many such ends in a row brought no new result."""
    results = sum((folder / "result.json").exists() for folder in folders)
    try:
        before = read_json_object(path)
        count = before["count"] if before["results"] == results else 0
    except (SegmentError, LookupError):
        count = 0
    write_atomically(path, json.dumps({"results": results, "count": count + 1}))
    return int(count) + 1


def prepare_arm_folder(home: Path, folder: Path, arm: Arm) -> Spec:
    """Make the folder of an arm, with a copy of the checkpoint from which it resumes. A folder with the same specification is kept.

    Returns the specification.
    """
    kernels = home / f"{arm.key}.yaml" if arm.kernels else None
    if kernels is not None:
        write_atomically(kernels, arm.kernels)
    spec = arm.make_spec(kernels)
    try:
        known = json.loads((folder / "segment.json").read_text())
    except (OSError, ValueError) as error:
        if is_temporary_read_failure(error):
            raise
        known = None
    if known != spec:
        remove_path(folder)
        folder.mkdir(parents=True)
        if arm.resumed_checkpoint is not None:
            shutil.copytree(arm.resumed_checkpoint, folder / "checkpoints" / arm.resumed_checkpoint.name)
        write_spec(folder, spec)
    return spec
