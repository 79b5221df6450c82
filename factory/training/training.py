"""Runs the trainer: once a segment, from the worktree of the live code (DESIGN §2, §5).

The ledger row of a segment is written before its folder, and holds all that the folder needs; a killed factory runs the same segment
again and the trainer resumes from its newest good checkpoint. Results are read from files that the trainer leaves; its exit ends the segment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from factory.computing.computing import write_kernels
from factory.core.launching import (
    ended,
    exit_code,
    forget_exit,
    start_trainer,
    stop_trainer,
)
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.planning import check_ranks
from factory.training.segment_folder import failed, folder_lock, record_done, spec_of, write_spec

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
    write_spec(folder, spec_of(ledger, row) | {"kernels": write_kernels(folder, row.computing)})
    code = _run_trainer(workspace, row, folder, progress, follower)
    result_path = folder / "result.json"
    if code != 0 or not result_path.exists():
        failed(workspace, ledger, row, code)
    result: dict[str, Any] = json.loads(result_path.read_text())
    record_done(ledger, row, folder, result)
    return result


def _run_trainer(
    workspace: Workspace, row: SegmentRow, folder: Path, progress: Progress, follower: Follower | None
) -> int:
    from factory.git.repository import checkout_live

    code = checkout_live(workspace, row.code_commit)
    log = workspace.logs / f"segment-{row.id:05d}.log"
    title = f"{row.kind} {row.first_step}–{row.last_step}"
    with (
        folder_lock(folder) as lock,
        open(log, "ab") as out,
        progress.task(title, row.last_step - row.first_step) as task,
    ):
        forget_exit(folder)
        process = start_trainer(workspace, code, [str(folder)], out, lock)
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
    if follower:
        follower.poll()
    return exit_code(process, [folder])


class _StepWatch:
    """Moves a progress bar from the last whole line of metrics.jsonl."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path, self.done = path, first_step

    def report(self, task: Any) -> None:
        last = last_metrics(self.path)
        if last and last["step"] + 1 > self.done:
            words = [f"loss {last['loss']:.3f}"] if isinstance(last.get("loss"), float) else []
            words += [f"{last['tokens_per_s'] / 1000:.1f}k tok/s"] if last.get("tokens_per_s") else []
            task.advance(last["step"] + 1 - self.done, " ".join(words))
            self.done = last["step"] + 1


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The newest whole line of a metrics.jsonl, or None."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - 16384))
            lines = handle.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "step" in found:
            return found
    return None
