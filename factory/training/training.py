"""Runs the trainer: once a segment, from the worktree of the live code (DESIGN §2, §5).

The ledger row of a segment is written before its folder, and holds all that the folder needs; a killed factory runs the same segment
again and the trainer resumes from its newest good checkpoint. Results are read from files that the trainer leaves; its exit ends the segment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from factory.computing.computing import write_kernels
from factory.core.errors import SegmentError
from factory.core.launching import exit_code, forget_exit
from factory.core.left_files import parse_json, read_tail
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.live_code import LiveCode, ended, read_by, start_trainer, stop_trainer
from factory.training.planning import check_ranks
from factory.training.segment_folder import clear, failed, folder_lock, record_done, result_of, spec_of, write_spec

POLL_SECONDS = 1.0


class Follower(Protocol):
    """Reads metrics while they are written (MLflow)."""

    def poll(self) -> object: ...


def run_segment(
    workspace: Workspace, ledger: Ledger, number: int, progress: Progress, follower: Follower | None = None
) -> dict[str, Any]:
    """Run, or resume, a planned segment to its end; returns the content of result.json.

    An average (``factory.training.averaging``) is made, not trained.

    Raises: NotCertified when the code changed and may not go on (nothing was started); SegmentError when the trainer fails
    (its log is named). A segment that fails ``MAX_ATTEMPTS`` times is marked 'failed'.
    """
    row = SegmentRow.get(ledger, number)
    if row.state == "done":
        return dict(row.result or {})
    if row.kind == "average":
        from factory.training.averaging import run_average

        return run_average(workspace, ledger, row, progress)
    from factory.training.certifying import ensure_certified
    from trainer.contract.recipe import Recipe

    check_ranks(workspace, Recipe.parse(row.recipe_json))  # planned on another number of GPUs, say
    ensure_certified(workspace, ledger, row, progress)
    folder = Path(row.folder)
    folder.mkdir(parents=True, exist_ok=True)
    code = _run_trainer(workspace, ledger, row, folder, progress, follower)
    if code != 0 or not (folder / "result.json").exists():
        failed(workspace, ledger, row, code)
    try:
        result = result_of(folder, row.last_step)
        record_done(ledger, row, folder, result)
    except SegmentError as error:
        failed(workspace, ledger, row, code, str(error))
    return result


def _run_trainer(
    workspace: Workspace, ledger: Ledger, row: SegmentRow, folder: Path, progress: Progress, follower: Follower | None
) -> int:
    code = LiveCode.of(workspace, ledger, row.code_commit, progress)
    log = workspace.logs / f"segment-{row.id:05d}.log"
    title = f"{row.kind} {row.first_step}–{row.last_step}"
    with (
        folder_lock(folder) as lock,
        open(log, "ab") as out,
        progress.task(title, row.last_step - row.first_step) as task,
    ):
        clear(folder, progress)  # what a trainer left that was cut short with its factory
        forget_exit(folder)
        spec = spec_of(ledger, row) | {"kernels": write_kernels(folder, row.computing)}
        write_spec(folder, spec)
        reads = read_by(spec | {"kernels": None})
        words = [str(folder)]
        process = start_trainer(workspace, code, words, writable=[folder], readonly=reads, out=out, lock=lock)
        watch = _StepWatch(folder / "metrics.jsonl", row.first_step)
        task.advance(0, "starting (the first time, the model is compiled)")
        try:
            while not ended(process, POLL_SECONDS):
                watch.report(task)
                if follower:
                    follower.poll()
            watch.report(task)
        except BaseException:
            stop_trainer(process)
            raise
        clear(folder, progress)
    if follower:
        follower.poll()
    return exit_code(process.wait(), [folder])


class _StepWatch:
    """Moves a progress bar from the last whole line of metrics.jsonl."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path, self.done = path, first_step

    def report(self, task: Any) -> None:
        last = last_metrics(self.path)
        if last and last["step"] + 1 > self.done:
            words = [f"loss {last['loss']:.3f}"] if isinstance(last.get("loss"), float) else []
            words += (
                [f"{last['tokens_per_s'] / 1000:.1f}k tok/s"] if isinstance(last.get("tokens_per_s"), float) else []
            )
            task.advance(last["step"] + 1 - self.done, " ".join(words))
            self.done = last["step"] + 1


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The newest whole line of a metrics.jsonl, or None."""
    for line in reversed(read_tail(path, 16384).split(b"\n")[:-1]):
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            return found
    return None
