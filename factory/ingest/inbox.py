"""The inbox: files that people put there are ingested once they are complete, and then moved away."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, shards

SETTLE_SECONDS = 2.0  # a file that changed more recently may be incomplete
PARTIAL = (".part", ".tmp", ".crdownload")
LONGEST_NAME = 200
Refused = frozenset[tuple[str, int]]  # (name, modification time in ns) of files that could not be ingested


def arrived(workspace: Workspace, settle: float = SETTLE_SECONDS, refused: Refused = frozenset()) -> list[Path]:
    """Complete files of the inbox, by name: regular, not hidden, not named as partial, unchanged for ``settle`` seconds."""
    found = []
    workspace.inbox.mkdir(exist_ok=True)
    for entry in sorted(os.scandir(workspace.inbox), key=lambda e: e.name):
        if entry.name.startswith(".") or entry.name.endswith(PARTIAL) or not entry.is_file(follow_symlinks=False):
            continue
        try:
            changed = entry.stat().st_mtime_ns
        except FileNotFoundError:
            continue
        if (settle == 0 or abs(time.time() - changed / 1e9) >= settle) and (entry.name, changed) not in refused:
            found.append(Path(entry.path))
    return found


def ingest_arrived(workspace: Workspace, ledger: Ledger, path: Path, progress: Progress) -> None:
    """Ingest a file of the inbox, then move it to ``shards/raw/`` or ``quarantine/``.

    After a kill between the two the next call recognises the content and only moves the file. Another file that got the
    same name meanwhile is moved back.
    """
    from factory.ingest.chain import ingest_shard
    from trainer.contract.data.token_shard import file_sha256

    report = ingest_shard(workspace, ledger, path, progress)
    progress.line(describe_shard(report.name, report.state, report.rows, report.counts, report.reason))
    folder = workspace.quarantine if report.state == "quarantined" else workspace.shards / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{report.sha256[:16]}-{path.name[-LONGEST_NAME:]}"
    with ledger.begin() as tx:
        tx.execute(shards.update().where(shards.c.sha256 == report.sha256).values(path=str(place)))
    shutil.move(path, place)
    if file_sha256(place) != report.sha256:
        shutil.move(place, workspace.inbox / f"{time.time_ns()}-{path.name[-LONGEST_NAME:]}")


def describe_shard(name: str, state: str, rows: int, counts: dict[str, object] | None, reason: str | None) -> str:
    """One line for people."""
    counts = counts or {}
    words = [f"{counts.get('train', 0):,} to train on, {counts.get('held_out', 0):,} held out"]
    dropped = counts.get("dropped")
    if isinstance(dropped, dict) and dropped:
        by_rule = ", ".join(f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1]))
        words.append(f"{sum(dropped.values()):,} dropped ({by_rule})")
    if state == "quarantined":
        words = [f"QUARANTINED: {reason}"] + words[1:]
    return f"  {name}: {rows:,} documents; {'; '.join(words)}"
