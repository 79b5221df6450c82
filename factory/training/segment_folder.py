"""A segment's folder and row: its specification, the lock on it, and how it ends."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from factory.core.errors import SegmentError
from factory.core.file_lock import LockedError, file_lock
from factory.core.launching import (
    EXIT_DISK_FULL,
    EXIT_STOPPED,
    failure_line,
    run_python,
)
from factory.core.stopping import TRAINER_SECONDS
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, anomalies, checkpoints, record, segments
from factory.ledger.rows import SegmentRow, Subject
from factory.training.planning import last_checkpoint, plan_of
from kernels.contract.files import write_atomically

EXPORT, AVERAGE = "trainer.contract.checkpoint.export", "trainer.tools.average"
MOVED = {EXPORT: "trainer.export", AVERAGE: "trainer.average"}  # names before there was trainer/contract
MAX_ATTEMPTS = 3

LOCK_SECONDS = 3 * TRAINER_SECONDS  # for a trainer whose factory was killed, on a busy machine too


def spec_of(ledger: Ledger, row: SegmentRow) -> dict[str, Any]:
    """The content of segment.json, without its kernels (``computing.write_kernels``)."""
    parent = SegmentRow.get(ledger, row.parent) if row.parent else None
    spec = {
        "kind": row.kind, "recipe": row.recipe_json, "data_plan": plan_of(ledger, row), "first_step": row.first_step,
        "last_step": row.last_step, "initial_checkpoint": parent and last_checkpoint(ledger, parent.id)["path"],
        "code_commit": row.code_commit, "kernels": None,
    }  # fmt: skip
    if row.kind == "trunk" and parent and parent.kind == "anneal":
        spec["rewarm"] = True  # left out where it is false: code older than the key can read the spec too
    return spec


def write_spec(folder: Path, spec: dict[str, Any]) -> None:
    write_atomically(folder / "segment.json", json.dumps(spec, indent=1, sort_keys=True))


def failed(workspace: Workspace, ledger: Ledger, row: SegmentRow, code: int) -> NoReturn:
    """Record how a process of a segment ended, with the last line of its log. Raises: SegmentError, always."""
    log = workspace.logs / f"segment-{row.id:05d}.log"
    line = failure_line(log)
    cause = f": {line}" if line else ""
    if code == EXIT_STOPPED:
        raise SegmentError(f"segment {row.id} was stopped; run the same command again to go on")
    if code == EXIT_DISK_FULL:
        raise SegmentError(
            f"segment {row.id}: the disk is full{cause}. Free some space and run the same command again: its last checkpoint is whole"
        )
    final = code == 2 or row.attempts + 1 >= MAX_ATTEMPTS
    with ledger.begin() as tx:
        outcome = {"state": "failed", "finished_at": time.time()} if final else {}
        tx.execute(segments.update().where(segments.c.id == row.id).values(attempts=row.attempts + 1, **outcome))
        kind = "segment_failed" if final else "segment_stumbled"
        record(tx, kind, Subject("segment", row.id), {"exit": code, "said": cause})
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    raise SegmentError(
        f"segment {row.id} ended with {how}{cause} (log: {log}{'' if final else '; the next pass tries again from its last checkpoint'})"
    )


def give_up(ledger: Ledger, row: SegmentRow, why: str) -> None:
    """Mark a segment as failed for good: trying again would not help."""
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == row.id).values(state="failed", finished_at=time.time()))
        record(tx, "segment_failed", Subject("segment", row.id), {"said": why})


def record_done(ledger: Ledger, row: SegmentRow, folder: Path, result: dict[str, Any]) -> None:
    """Write down a segment's end, its checkpoint and its anomalies, all at once."""
    path = Path(result["checkpoint"])
    manifest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    if manifest != result["manifest_sha256"]:
        raise SegmentError(f"segment {row.id}: {path} is not the checkpoint that its result names")
    found = [json.loads(line) for line in _lines(folder / "anomalies.jsonl")]
    with ledger.begin() as tx:
        tx.execute(
            checkpoints.insert().values(
                id=manifest, segment=row.id, step=result["last_step"], path=str(path), created_at=time.time()
            )
        )
        for anomaly in found:
            tx.execute(
                anomalies.insert().values(segment=row.id, step=anomaly["step"], kind=anomaly["kind"], detail=anomaly)
            )
        tx.execute(
            segments.update()
            .where(segments.c.id == row.id)
            .values(state="done", result=result, finished_at=time.time())
        )
        record(tx, "segment_done", Subject("segment", row.id), {"loss": result.get("loss"), "checkpoint": manifest})


def run_tool(code: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` of a segment's code, under the module's older name where that code is from before the move.

    Only where it has no module of today's name: a file of the older name is one that agents may patch.
    """
    name = module if (code / f"{module.replace('.', '/')}.py").is_file() else MOVED[module]
    return run_python(code, "-m", name, *words)


@contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """A lock that the trainer is given too: held while either lives, so that a restarted factory waits for the old trainer to end."""
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(file_lock(folder / "segment.lock", LOCK_SECONDS))
        except LockedError as holder:
            raise SegmentError(
                f"{folder}: a trainer that process {holder} started is still at work there; end it, then try again"
            ) from None
        yield descriptor


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
