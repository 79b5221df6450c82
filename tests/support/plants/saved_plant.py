"""A plant with one trained trunk that every test of a module finds as it was made, and anomalies and diagnoses as a trainer and the doctor
leave them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.ledger.anomalies import DIAGNOSED
from factory.ledger.ledger import Ledger, anomalies, record
from factory.ledger.rows import Subject
from tests.support.factory.code_loop import make_target
from tests.support.plants.trained_plant import make_plant

KINDS = AnomalyPolicy().kinds


@dataclass(frozen=True)
class SavedPlant:
    """``folder`` holds the workspace and the code; ``copy`` the same as they were made. Paths stay the same: the ledger holds them."""

    workspace: Workspace
    folder: Path
    copy: Path

    @contextmanager
    def restored(self) -> Iterator[tuple[Workspace, Ledger]]:
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder, symlinks=True)
        ledger = Ledger.open(self.workspace.ledger_url)
        try:
            yield self.workspace, ledger
        finally:
            ledger.engine.dispose()


def saved_plant(root: Path) -> SavedPlant:
    """Put back in a fraction of a second."""
    folder, copy = root / "made", root / "copy"
    folder.mkdir()
    workspace, ledger = make_plant(folder, make_target(folder / "target"))
    ledger.engine.dispose()
    shutil.copytree(folder, copy, symlinks=True)
    return SavedPlant(workspace, folder, copy)


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
        record(tx, DIAGNOSED, Subject("anomaly", number), detail)
