"""Lists the folders and files of a workspace that retention may remove. It finds them by name, so a row in the ledger is not necessary."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject

Kind = Literal[
    "checkpoint", "ladder", "runs", "audit", "diagnosis", "export", "model", "worktree", "compiled", "log", "run"
]
TRAINING = "training"  # MLflow's experiment with the runs of segments
NUMBERED = re.compile(r"(\d{5})")
STEP = re.compile(r"(bad-)?step-(\d+)")
# Folders that a certificate, a preflight or an export makes in a segment's folder. They remain only after a kill.
RUNS = ("certificate", "preflight", "export")


@dataclass(frozen=True)
class StoredFolder:
    """A folder, a file, or a run of MLflow. The path of a run is the folder of its artifacts, which may not exist.

    ``number``: the number of the segment; for a diagnosis, of the anomaly. ``step``: the step of a checkpoint; −1 for a damaged checkpoint that
    was set aside. ``made_at``: the time of a file without a segment, in seconds since 1970.
    """

    kind: Kind
    path: Path
    number: int = 0
    step: int = 0
    commit: str = ""  # the first twelve digits of the hash
    made_at: float | None = None

    def measure_size_on_disk(self) -> int:
        """Return its size in bytes, with all files below it."""
        if not self.path.is_dir():
            return _size(self.path)
        return sum(_size(Path(folder) / name) for folder, _, names in os.walk(self.path) for name in names)


def list_stored_folders(plant: Plant) -> list[StoredFolder]:
    """Return all stored folders, in a fixed order."""
    kinds = (_of_candidates(plant), _of_nothing(plant), _runs(plant))
    return [*_of_segments(plant.workspace), *_of_commits(plant.workspace), *(what for kind in kinds for what in kind)]


def _of_segments(workspace: Workspace) -> Iterator[StoredFolder]:
    for number, folder in _numbered(workspace.segments):
        for path in sorted((folder / "checkpoints").glob("*")):
            if path.is_dir() and (named := STEP.fullmatch(path.name)):
                yield StoredFolder("checkpoint", path, number, -1 if named[1] else int(named[2]))
        for name in RUNS:
            if (folder / name).is_dir():
                yield StoredFolder("runs", folder / name, number)
    for kind, place in (("ladder", "ladder"), ("audit", "audits"), ("diagnosis", "diagnoses")):
        for number, folder in _numbered(workspace.root / place):
            yield StoredFolder(kind, folder, number)  # type: ignore[arg-type]
    for path in sorted(workspace.logs.glob("segment-*.log")):
        if named := NUMBERED.search(path.name):
            yield StoredFolder("log", path, int(named[1]))


def _of_candidates(plant: Plant) -> Iterator[StoredFolder]:
    for path in sorted(plant.workspace.exports.glob("segment-*")):
        if (named := NUMBERED.search(path.name)) and path.is_dir() and not path.is_symlink():
            yield StoredFolder("export", path, int(named[1]))
    rows = plant.ledger.read("SELECT id, segment FROM candidates ORDER BY id")
    runs = {row["subject"]: row["run_id"] for row in plant.ledger.read("SELECT subject, run_id FROM tracked_runs")}
    for row in rows:
        run = runs.get(str(Subject("candidate", row["id"])))
        path = plant.workspace.mlflow_artifacts / "candidates" / str(run) / "artifacts" / "model"
        if run and path.is_dir():
            yield StoredFolder("model", path, row["segment"])


def _of_commits(workspace: Workspace) -> Iterator[StoredFolder]:
    for path in sorted(workspace.worktrees.glob("live-*")):
        yield StoredFolder("worktree", path, commit=path.name.removeprefix("live-"))
    for path in sorted((workspace.root / "cache").glob("code-*")):
        yield StoredFolder("compiled", path, commit=path.name.split("-")[1])


def _of_nothing(plant: Plant) -> Iterator[StoredFolder]:
    """Yield logs that belong to no segment, and the exchanges with language models that MLflow has a copy of."""
    unsent = {
        row["file"] for row in plant.ledger.read("SELECT file FROM exchanges WHERE trace IS NULL AND file IS NOT NULL")
    }
    for place in ("torchrun", "exchanges"):
        for path in sorted((plant.workspace.logs / place).glob("*")):
            if str(path) not in unsent:
                yield StoredFolder("log", path, made_at=_changed(path))


def _runs(plant: Plant) -> Iterator[StoredFolder]:
    of_segments = "SELECT subject, run_id FROM tracked_runs WHERE subject LIKE 'segment:%' ORDER BY subject"
    for row in plant.ledger.read(of_segments):
        number = Subject.parse(row["subject"]).number
        yield StoredFolder("run", plant.workspace.mlflow_artifacts / TRAINING / row["run_id"], number)


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted(folder.glob("[0-9][0-9][0-9][0-9][0-9]*")):
        if path.is_dir() and not path.is_symlink():
            yield int(path.name[:5]), path


def _changed(path: Path) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return time.time()  # another process removed the file


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0  # another process removed the file
