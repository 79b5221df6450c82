"""Runs the trainer: once a segment, from the worktree of the live code (DESIGN §2, §5).

The ledger row of a segment is written before its folder, and says all that the folder needs; a killed factory runs the same segment
again and the trainer resumes from its newest good checkpoint. What the trainer says is read from files; its exit ends the segment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import sqlalchemy as sa

from factory.computing import write_kernels
from factory.errors import SegmentError
from factory.exports import folder_sha256
from factory.launching import (
    EXIT_DISK_FULL,
    EXIT_STOPPED,
    die_with,
    ended,
    exit_code,
    forget_exit,
    last_words,
    start_trainer,
    stop_trainer,
)
from factory.ledger import Ledger, anomalies, candidates, checkpoints, record, segments
from factory.planning import check_ranks, last_checkpoint, plan_of
from factory.progress import Progress
from factory.stopping import TRAINER_SECONDS
from factory.workspace import Workspace

MAX_ATTEMPTS = 3
LOCK_SECONDS = 3 * TRAINER_SECONDS  # for a trainer whose factory was killed, on a busy machine too
POLL_SECONDS = 1.0


class Follower(Protocol):
    """Somebody who wants to see metrics while they are written (MLflow)."""

    def poll(self) -> object: ...


# -- running -----------------------------------------------------------------------------------------------------------
def run_segment(
    workspace: Workspace, ledger: Ledger, number: int, progress: Progress, follower: Follower | None = None
) -> dict[str, Any]:
    """Run, or resume, a planned segment to its end; returns what result.json says.

    An average (``factory.averaging``) is made, not trained.

    Raises: NotCertified when the code changed and may not go on (nothing was started); SegmentError when the trainer fails
    (its log is named). A segment that fails ``MAX_ATTEMPTS`` times is marked 'failed'.
    """
    row = ledger.one(sa.select(segments).where(segments.c.id == number))
    assert row is not None, number
    if row["state"] == "done":
        return dict(row["result"])
    if row["kind"] == "average":
        from factory.averaging import run_average

        return run_average(workspace, ledger, row, progress)
    from factory.certifying import ensure_certified
    from trainer.contract.recipe import Recipe

    check_ranks(workspace, Recipe.parse(row["recipe_json"]))  # planned on another number of GPUs, say
    ensure_certified(workspace, ledger, row, progress)
    folder = Path(row["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    write_spec(folder, spec_of(ledger, row) | {"kernels": write_kernels(folder, row["computing"])})
    code = _run_trainer(workspace, row, folder, progress, follower)
    result_path = folder / "result.json"
    if code != 0 or not result_path.exists():
        failed(workspace, ledger, row, code)
    result: dict[str, Any] = json.loads(result_path.read_text())
    record_done(ledger, row, folder, result)
    return result


def spec_of(ledger: Ledger, row: dict[str, Any]) -> dict[str, Any]:
    """What segment.json says of a segment, but for its kernels (``computing.write_kernels``)."""
    start = None if row["parent"] is None else last_checkpoint(ledger, row["parent"])["path"]
    parent = ledger.one(sa.select(segments.c.kind).where(segments.c.id == row["parent"]))
    spec = {
        "kind": row["kind"], "recipe": row["recipe_json"], "data_plan": plan_of(ledger, row), "first_step": row["first_step"],
        "last_step": row["last_step"], "initial_checkpoint": start, "code_commit": row["code_commit"], "kernels": None,
    }  # fmt: skip
    if row["kind"] == "trunk" and parent is not None and parent["kind"] == "anneal":
        spec["rewarm"] = True  # left out where it is false: code older than the key can read the spec too
    return spec


def write_spec(folder: Path, spec: dict[str, Any]) -> None:
    aside = folder / "segment.json.part"
    aside.write_text(json.dumps(spec, indent=1, sort_keys=True))
    os.replace(aside, folder / "segment.json")


def _run_trainer(
    workspace: Workspace, row: dict[str, Any], folder: Path, progress: Progress, follower: Follower | None
) -> int:
    from factory.repository import checkout_live

    code = checkout_live(workspace, row["code_commit"])
    log = workspace.logs / f"segment-{row['id']:05d}.log"
    title = f"{row['kind']} {row['first_step']}–{row['last_step']}"
    with (
        folder_lock(folder) as lock,
        open(log, "ab") as out,
        progress.task(title, row["last_step"] - row["first_step"]) as task,
    ):
        forget_exit(folder)
        process = start_trainer(workspace, code, [str(folder)], out, lock)
        watch = _StepWatch(folder / "metrics.jsonl", row["first_step"])
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


def failed(workspace: Workspace, ledger: Ledger, row: dict[str, Any], code: int) -> NoReturn:
    """Record how a process of a segment ended, with the last line of its log. Raises: SegmentError, always."""
    log = workspace.logs / f"segment-{row['id']:05d}.log"
    words = last_words(log)
    said = f": {words}" if words else ""
    if code == EXIT_STOPPED:
        raise SegmentError(f"segment {row['id']} was stopped; run the same command again to go on")
    if code == EXIT_DISK_FULL:
        raise SegmentError(
            f"segment {row['id']}: the disk is full{said}. Free some space and run the same command again: its last checkpoint is whole"
        )
    final = code == 2 or row["attempts"] + 1 >= MAX_ATTEMPTS
    with ledger.begin() as tx:
        outcome = {"state": "failed", "finished_at": time.time()} if final else {}
        tx.execute(segments.update().where(segments.c.id == row["id"]).values(attempts=row["attempts"] + 1, **outcome))
        record(
            tx, "segment_failed" if final else "segment_stumbled", f"segment:{row['id']}", {"exit": code, "said": said}
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    raise SegmentError(
        f"segment {row['id']} ended with {how}{said} (log: {log}{'' if final else '; the next pass tries again from its last checkpoint'})"
    )


def give_up(ledger: Ledger, row: dict[str, Any], why: str) -> None:
    """Mark a segment as failed for good: trying again would not help."""
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == row["id"]).values(state="failed", finished_at=time.time()))
        record(tx, "segment_failed", f"segment:{row['id']}", {"said": why})


def record_done(ledger: Ledger, row: dict[str, Any], folder: Path, result: dict[str, Any]) -> None:
    """Write down a segment's end, its checkpoint and its anomalies, all at once."""
    path = Path(result["checkpoint"])
    manifest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    if manifest != result["manifest_sha256"]:
        raise SegmentError(f"segment {row['id']}: {path} is not the checkpoint that its result names")
    found = [json.loads(line) for line in _lines(folder / "anomalies.jsonl")]
    with ledger.begin() as tx:
        tx.execute(
            checkpoints.insert().values(
                id=manifest, segment=row["id"], step=result["last_step"], path=str(path), created_at=time.time()
            )
        )
        for anomaly in found:
            tx.execute(
                anomalies.insert().values(segment=row["id"], step=anomaly["step"], kind=anomaly["kind"], detail=anomaly)
            )
        tx.execute(
            segments.update()
            .where(segments.c.id == row["id"])
            .values(state="done", result=result, finished_at=time.time())
        )
        record(tx, "segment_done", f"segment:{row['id']}", {"loss": result.get("loss"), "checkpoint": manifest})


# -- export ------------------------------------------------------------------------------------------------------------
def export_candidate(workspace: Workspace, ledger: Ledger, segment: int) -> int:
    """Turn a segment's last checkpoint into an HF-format export and a candidate row; returns the candidate's id. Idempotent."""
    from factory.ingest.tokenizer import Tokenizer
    from factory.repository import checkout_live

    known = ledger.one(sa.select(candidates.c.id).where(candidates.c.segment == segment))
    if known:
        return int(known["id"])
    row = ledger.one(sa.select(segments).where(segments.c.id == segment))
    checkpoint = last_checkpoint(ledger, segment)
    assert row is not None, segment
    target, aside = workspace.exports / f"segment-{segment:05d}", workspace.exports / f".writing-{segment:05d}"
    if not target.exists():
        _remove(aside)
        code = checkout_live(workspace, row["code_commit"])
        done = run_tool(code, "-m", "trainer.contract.checkpoint.export", checkpoint["path"], str(aside))
        if done.returncode:
            raise SegmentError(f"the export of {checkpoint['path']} failed: {done.stderr.strip().splitlines()[-1:]}")
        Tokenizer.load(workspace.tokenizer).copy_to(aside)
        os.rename(aside, target)
    with ledger.begin() as tx:
        number = (tx.execute(sa.select(sa.func.max(candidates.c.id))).scalar() or 0) + 1
        tx.execute(
            candidates.insert().values(
                id=number,
                segment=segment,
                checkpoint=checkpoint["id"],
                export_path=str(target),
                export_sha256=folder_sha256(target),
                created_at=time.time(),
            )
        )
        record(tx, "candidate", f"candidate:{number}", {"segment": segment})
    return int(number)


def run_tool(code: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a short Python program of that code (``-m trainer.contract.checkpoint.export …``); it dies with the factory."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=code,
        env=os.environ | {"PYTHONPATH": str(code)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=die_with(os.getpid()),
    )


# -- small parts -------------------------------------------------------------------------------------------------------
@contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """A lock that the trainer inherits: held while either lives, so that a restarted factory waits for the old trainer to end."""
    handle = os.open(folder / "segment.lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SegmentError(
                        f"{folder}: a trainer of an earlier run is still at work there; end it, then try again"
                    ) from None
                time.sleep(0.2)
        yield handle
    finally:
        os.close(handle)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
