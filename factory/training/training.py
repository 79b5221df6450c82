"""Runs the trainer of a segment from the worktree of the live code (DESIGN §2, §5).

The ledger row of a segment is written before its folder, and has all values that the folder needs. After a kill, the factory runs the
same segment again, and the trainer resumes from its newest good checkpoint. The segment ends when the trainer exits. The results are in
the trainer's files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from factory.computing.compute_settings import write_kernels_file
from factory.core.errors import SegmentError
from factory.core.launching import (
    EXIT_DISK_FULL,
    EXIT_STOPPED,
    check_ranks_fit,
    find_trainer_exit_code,
    remove_exit_code_files,
)
from factory.core.untrusted_trainer_files import parse_json, read_tail
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, SegmentRow
from factory.retrying.daemon_requests import refuse_rewound_segment, refuse_while_paused
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import HUNG, REFUSED, TrainerFailure, classify_exceeded_limit, count_oom_kills
from factory.retrying.watchdog import Watchdog, find_usual_durations, record_duration_of_first_step
from factory.runs.live_code import (
    LiveCode,
    list_paths_read_by_trainer,
    start_trainer,
    stop_trainer,
    wait_for_process_end,
)
from factory.runs.live_training import ignore_machine_faults
from factory.runs.trainer_folder import (
    check_disk_space,
    lock_trainer_folder,
    read_result,
    remove_links_and_pipes,
    write_spec,
)
from factory.sandbox.live_sandbox import RunningCommand
from factory.training.segment_folder import (
    claim_segment_folder,
    make_segment_spec,
    raise_trainer_failure,
    record_segment_done,
)
from kernels.contract.message import Message

POLL_SECONDS = 1.0
ENDED = (0, EXIT_STOPPED, EXIT_DISK_FULL)  # exit codes that a damaged input does not cause
KILL_SECONDS = 120.0  # a killed trainer frees its memory in this time, however large


class SegmentFollower(Protocol):
    """Reads the metrics of a segment while the trainer writes them, to send them to MLflow."""

    def poll(self) -> object: ...


def run_segment(
    plant: Plant,
    number: int,
    follower: SegmentFollower | None = None,
    repair_inputs: Callable[[bool], bool] = lambda check_all: False,
) -> dict[str, Any]:
    """Run or resume a planned segment to its end; returns the content of result.json. An average is made by
    ``factory.training.averaging``, and an imported model is read by ``factory.training.importing``.

    ``repair_inputs(check_all)``: repairs the trainer's inputs, and returns True if any was damaged. ``check_all`` is False at the start (look
    at files that changed), and True after the trainer failed (look at all files). After a repair the trainer runs again.

    Raises: NotCertifiedError if the code changed and no certificate allows it (nothing was started); PausedError while training is paused;
    WorkInvalidatedError if the segment was rewound meanwhile; SegmentError, naming the log, if the trainer fails. A segment whose trainer dies
    repeatedly without a new checkpoint is parked: its state is 'failed'.
    """
    row = SegmentRow.get(plant.ledger, number)
    if row.state == "done":
        return dict(row.result or {})
    refuse_while_paused(plant.ledger)
    refuse_rewound_segment(plant.ledger, number)
    if row.kind == "average":
        from factory.training.averaging import run_average

        return run_average(plant, row)
    if row.kind == IMPORT:
        from factory.training.importing import run_import

        return run_import(plant, row)
    from factory.training.certifying import ensure_certified
    from trainer.contract.recipe import Recipe

    check_ranks_fit(
        plant.workspace, Recipe.parse(row.recipe_json)
    )  # the number of GPUs may differ from that at planning
    folder = claim_segment_folder(plant, row)
    ensure_certified(plant, row)
    repair_inputs(not all(path.exists() for path in list_paths_read_by_trainer(make_segment_spec(plant.ledger, row))))
    while True:
        kills = count_oom_kills()
        code, killed = run_trainer(plant, row, folder, follower)
        if killed or code in ENDED or not repair_inputs(True):
            break  # else an input was damaged and is repaired
    if killed or code != 0 or not (folder / "result.json").exists():
        raise_trainer_failure(plant, row, code, kills, killed)
    try:
        result = read_result(folder, row.last_step)
        record_segment_done(plant.ledger, row, folder, result)
    except SegmentError as error:
        said = Message(
            "training.result_refused",
            "ended with exit code {code}, but the factory refused its result: {error}",
            code=code,
            error=error,
        )
        raise_trainer_failure(plant, row, code, kills, TrainerFailure(REFUSED, said))
    return result


def run_trainer(
    plant: Plant, row: SegmentRow, folder: Path, follower: SegmentFollower | None
) -> tuple[int, TrainerFailure | None]:
    """Run a segment's trainer in ``folder``, from the newest checkpoint there. Returns (exit code, the ending if the factory killed it, else None).

    A trainer that hangs or exceeds a limit of the sandbox is killed.
    Raises: PausedError if a pause stopped the trainer; WorkInvalidatedError if the segment was rewound.
    """
    code = LiveCode.check_out_commit(plant, row.code_commit)
    log = plant.workspace.logs / f"segment-{row.id:05d}.log"
    title = f"{row.kind} {row.first_step}–{row.last_step}"
    with (
        lock_trainer_folder(folder) as lock,
        open(log, "ab") as out,
        plant.progress.task(title, row.last_step - row.first_step) as task,
    ):
        remove_links_and_pipes(folder, plant.progress)  # files of a trainer that was killed together with its factory
        remove_exit_code_files(folder)
        spec = make_segment_spec(plant.ledger, row) | {"kernels": write_kernels_file(folder, row.computing)}
        write_spec(folder, spec)
        reads = list_paths_read_by_trainer(spec | {"kernels": None})
        check_disk_space(folder, row.recipe_json, f"segment {row.id}")
        policy, usual = (
            RetryPolicy.load(plant.workspace.policy_path("retries.yaml")),
            find_usual_durations(plant.ledger, row),
        )
        watch = _StepWatch(folder / "metrics.jsonl", row.first_step)
        process = start_trainer(
            plant.workspace, code, [str(folder)], writable=[folder], readonly=reads, out=out, lock=lock
        )
        dog = Watchdog(policy, usual, process.pid, folder)
        task.advance(0, Message("training.starting", "starting; the first start compiles the model"))
        hung, number = "", process.find_command_process()
        try:
            while not hung and not wait_for_process_end(process, POLL_SECONDS):
                begins, number = dog.steps is None, process.find_command_process()
                watch.report(task)
                hung = dog.find_hang(watch.made)
                with ignore_machine_faults():
                    if begins and dog.steps is not None:
                        record_duration_of_first_step(plant.ledger, row, number, dog.clock() - dog.started)
                    refuse_while_paused(plant.ledger)
                    if row.state == "planned":  # else a finished segment is replayed
                        refuse_rewound_segment(plant.ledger, row.id)
                    if follower:
                        follower.poll()
            watch.report(task)
        except BaseException:
            stop_trainer(process)
            raise
        if hung:
            _kill(process, row, number, hung)
        remove_links_and_pipes(folder, plant.progress)
    if follower:
        follower.poll()
    ending = Message(
        "training.hung", "hung: {hung}. The factory killed its process {process}", hung=hung, process=number
    )
    exit_code = find_trainer_exit_code(process.wait(), [folder])
    return exit_code, TrainerFailure(HUNG, ending) if hung else classify_exceeded_limit(
        exit_code, process.exceeded_limit
    )


def _kill(process: RunningCommand, row: SegmentRow, number: int, hung: str) -> None:
    """Kill a trainer that hung. Raises: SegmentError if the process does not end."""
    try:
        process.kill(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        raise SegmentError(
            "training.hung_unkillable",
            "The trainer of segment {segment} hung: {hung}. The factory killed its process {process}, but the process does not end: "
            "it waits in the kernel for a disk or a driver. The segment continues when the process has ended. If it never ends, "
            "restart the machine.", segment=row.id, hung=hung, process=number,
        ) from None  # fmt: skip


class _StepWatch:
    """Moves a progress bar to the last whole line of metrics.jsonl, and counts the steps of a trainer since its start."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path, self.done, self.made = path, first_step, 0
        last = read_last_metrics(path)  # of an earlier trainer; a trainer that resumes first cuts off the later lines
        self._last = last["step"] if last else first_step - 1

    def report(self, task: Any) -> None:
        last = read_last_metrics(self.path)
        if not last:
            return
        self.made += max(0, last["step"] - self._last)
        self._last = last["step"]
        if last["step"] + 1 > self.done:
            shown = [f"loss {last['loss']:.3f}"] if isinstance(last.get("loss"), float) else []
            shown += (
                [f"{last['tokens_per_s'] / 1000:.1f}k tok/s"] if isinstance(last.get("tokens_per_s"), float) else []
            )
            task.advance(last["step"] + 1 - self.done, " ".join(shown))
            self.done = last["step"] + 1


def read_last_metrics(path: Path) -> dict[str, Any] | None:
    """The newest whole line of a metrics.jsonl, or None."""
    for line in reversed(read_tail(path, 16384).split(b"\n")[:-1]):
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    return None
