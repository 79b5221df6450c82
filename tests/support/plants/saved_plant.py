"""A plant with one trained trunk that every test of a module finds as it was made, and anomalies and diagnoses as a trainer and the doctor
leave them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.ledger.anomalies import DIAGNOSED
from factory.ledger.ledger import Ledger, anomalies, record_event
from factory.ledger.rows import Subject
from tests.support.factory.code_loop import make_target
from tests.support.plants.trained_plant import make_plant

KINDS = AnomalyPolicy().kinds


Stamp = tuple[int, ...]  # of a file: what no change leaves as it was; nothing of a folder


@dataclass(frozen=True)
class SavedPlant:
    """``folder`` holds the workspace and the code; ``copy`` the same as they were made. Paths stay the same: the ledger holds them."""

    workspace: Workspace
    folder: Path
    copy: Path
    stamps: dict[str, Stamp] = field(default_factory=dict)  # of what was put back last

    @contextmanager
    def restored(self) -> Iterator[tuple[Workspace, Ledger]]:
        self.put_back()
        ledger = Ledger.open(self.workspace.ledger_url)
        try:
            yield self.workspace, ledger
        finally:
            ledger.engine.dispose()

    def put_back(self) -> None:
        """What was changed alone: nine hundred files take a third of a second of a core where as many were removed just before."""
        there, wanted = stamps(self.folder), stamps(self.copy)
        for name, stamp in there.items():
            if name not in wanted or self.stamps.get(name) != stamp:
                path = self.folder / name
                path.unlink(missing_ok=True) if stamp else shutil.rmtree(path, ignore_errors=True)
        for name, stamp in wanted.items():
            path = self.folder / name
            if not stamp:
                path.mkdir(exist_ok=True)
            elif not path.is_symlink() and not path.exists():
                shutil.copy2(self.copy / name, path, follow_symlinks=False)
        for name in [name for name, stamp in wanted.items() if not stamp]:
            shutil.copystat(self.copy / name, self.folder / name)
        self.remember()

    def remember(self) -> None:
        young = (
            time.time_ns() - 50_000_000
        )  # a change within one tick of the clock would not be seen; nor one by a mapping
        put = stamps(self.folder).items()
        self.stamps.clear()
        self.stamps.update((n, s) for n, s in put if not s or (s[2] < young and ".db" not in n))


def stamps(folder: Path) -> dict[str, Stamp]:
    """Of all below it by their names in it, folders before what they hold."""
    found: dict[str, Stamp] = {}
    for inside, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(inside, name)
            seen = os.lstat(path)
            is_folder = stat.S_ISDIR(seen.st_mode)
            found[path[len(str(folder)) + 1 :]] = () if is_folder else (seen.st_ino, seen.st_size, seen.st_ctime_ns)
    return found


def saved_plant(root: Path) -> SavedPlant:
    """Put back in a fraction of a second."""
    folder, copy = root / "made", root / "copy"
    folder.mkdir()
    workspace, ledger = make_plant(folder, make_target(folder / "target"))
    ledger.engine.dispose()
    shutil.copytree(folder, copy, symlinks=True)
    made = SavedPlant(workspace, folder, copy)
    made.remember()
    return made


def note(ledger: Ledger, segment: int, step: int, kind: str = "loss_spike") -> int:
    """An anomaly as a finished segment leaves it."""
    with ledger.begin() as tx:
        made = tx.execute(
            anomalies.insert().values(segment=segment, step=step, kind=kind, detail={}).returning(anomalies.c.id)
        )
        return int(made.scalar_one())


def diagnosed(
    ledger: Ledger,
    number: int,
    segment: int,
    causes: list[str],
    guilty: list[str],
    undo: Sequence[int] = (),
    override: dict[str, Any] | None = None,
    noted: tuple[int, int] | None = None,
) -> None:
    detail = {
        "anomalies": [number], "segment": segment, "kind": "loss_spike", "onset": 12, "last": 12,
        "noted": [12, 12] if noted is None else list(noted), "causes": causes, "guilty": guilty, "triggers": guilty,
        "why": "so it was", "arms": [], "report": "", "undo": list(undo), "override": override,
    }  # fmt: skip
    with ledger.begin() as tx:
        record_event(tx, DIAGNOSED, Subject("anomaly", number), detail)
