"""A factory's past that is drawn: rows of a real ledger and real folders, with no training behind them."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from factory.audit.kept_checkpoints import get_audit_folder, get_kept_checkpoints_folder
from factory.core.workspace import Workspace
from factory.ledger.anomalies import CLOSED, DIAGNOSED
from factory.ledger.ledger import (
    Ledger,
    anomalies,
    candidates,
    checkpoints,
    data_plans,
    record_event,
    releases,
    segments,
    tracked_runs,
    verdicts,
)
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, Subject

DAY = 86_400.0
STEPS = 20


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class History:
    """A factory's past, as its rows and folders: what the model loop would have left."""

    def __init__(self, workspace: Workspace, ledger: Ledger, seed: int) -> None:
        self.workspace, self.ledger, self.rng = workspace, ledger, random.Random(seed)
        self.commits = [f"{self.rng.getrandbits(160):040x}" for _ in range(4)]
        with ledger.begin() as tx:
            tx.execute(data_plans.insert().values(id="p", plan={"token_shards": []}, created_at=0.0))

    def segment(self, kind: str, parent: SegmentRow | None, state: str, first: int, steps: int = STEPS) -> SegmentRow:
        number = len(SegmentRow.select(self.ledger)) + 1
        folder = self.workspace.segments / f"{number:05d}-{kind}"
        ended = time.time() - self.rng.choice([0.0, 1.0, 8.0, 30.0, 400.0]) * DAY
        commit = self.rng.choice(self.commits)
        last = first + steps
        made = [s for s in range(first + 5, last + 1, 5) if state != "planned" or s <= first + 10]
        for step in made:
            self.file(folder / "checkpoints" / step_name(step) / "manifest.json")
        for step in made[:2]:
            self.file(get_kept_checkpoints_folder(self.workspace, number) / step_name(step) / "manifest.json")
        if self.rng.random() < 0.3:
            self.file(folder / "certificate" / "old" / "pair" / "metrics.jsonl")
        if self.rng.random() < 0.2:
            self.file(folder / "checkpoints" / f"bad-{step_name(first + 5)}" / "model.safetensors")
        for name in ("metrics.jsonl", "segment.json"):
            self.file(folder / name)
        self.file(self.workspace.logs / f"segment-{number:05d}.log")
        self.file(self.workspace.worktrees / f"live-{commit[:12]}" / "code.py")
        self.file(self.workspace.root / "cache" / f"code-{commit[:12]}-cpu" / "inductor" / "x.so")
        detail: dict[str, Any] = {"kind": kind, "steps": [first, last]}
        if kind == "average" and parent is not None:
            sources = [
                {
                    "id": "x",
                    "segment": parent.id,
                    "step": s,
                    "path": str(Path(parent.folder) / "checkpoints" / step_name(s)),
                }
                for s in (parent.last_step - 5, parent.last_step)
            ]
            detail["average"] = {"rule": "uniform", "sources": sources}
        with self.ledger.begin() as tx:
            tx.execute(
                segments.insert().values(
                    id=number, kind=kind, parent=parent and parent.id, generation=1, recipe="demo", recipe_sha256="r",
                    recipe_json={"checkpoint_every": 5, "precision": "fp32"}, data_plan="p", code_commit=commit, first_step=first,
                    last_step=last, state=state, folder=self.ledger.to_stored_path(folder),
                    created_at=ended - 100.0, finished_at=None if state == "planned" else ended,
                )
            )  # fmt: skip
            record_event(tx, "segment_planned", Subject("segment", number), detail)
            if state in ("done", "rewound"):
                path = folder / "checkpoints" / step_name(last)
                tx.execute(
                    checkpoints.insert().values(
                        id=f"c{number}", segment=number, step=last, path=str(path), created_at=ended
                    )
                )
        return SegmentRow.get(self.ledger, number)

    def file(self, path: Path, size: int = 5000) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)

    def candidate(self, segment: SegmentRow) -> None:
        export = self.workspace.exports / f"segment-{segment.id:05d}"
        self.file(export / "model.safetensors")
        number = len(CandidateRow.select(self.ledger)) + 1
        run = f"run{number}"
        self.file(self.workspace.mlflow_artifacts / "candidates" / run / "artifacts" / "model" / "model.safetensors")
        outcome = self.rng.choice([None, "promote", "promote", "hold", "reject"])
        with self.ledger.begin() as tx:
            tx.execute(
                candidates.insert().values(
                    id=number, segment=segment.id, checkpoint=f"c{segment.id}", export_path=str(export), export_sha256="e", created_at=time.time()
                )
            )  # fmt: skip
            tx.execute(tracked_runs.insert().values(subject=str(Subject("candidate", number)), run_id=run))
            if outcome is None:
                return
            verdict = tx.execute(
                verdicts.insert().values(
                    gate="release", subject=str(Subject("candidate", number)), policy_sha256="p", subject_sha256="e", outcome=outcome,
                    reasons=["so"], evidence={}, created_at=time.time(),
                ).returning(verdicts.c.id)
            ).scalar_one()  # fmt: skip
            if outcome == "promote" and self.rng.random() < 0.7:
                release = len(ReleaseRow.select(self.ledger)) + 1
                tx.execute(
                    releases.insert().values(
                        number=release, candidate=number, verdict=verdict, state="published", created_at=time.time()
                    )
                )
                record_event(tx, "promoted", Subject("release", release), {"candidate": number})

    def anomaly(self, segment: SegmentRow) -> None:
        with self.ledger.begin() as tx:
            number = tx.execute(
                anomalies.insert().values(
                    segment=segment.id, step=segment.first_step + 7, kind=self.rng.choice(["loss_spike", "plateau"]), detail={}
                ).returning(anomalies.c.id)
            ).scalar_one()  # fmt: skip
            if self.rng.random() < 0.6:
                record_event(tx, DIAGNOSED, Subject("anomaly", number), {"anomalies": [number], "causes": ["unknown"]})
            if self.rng.random() < 0.5:
                record_event(
                    tx, CLOSED, Subject("anomaly", number), {"anomalies": [number], "how": "accepted", "by": "p"}
                )
        self.file(self.workspace.root / "diagnoses" / f"{number:05d}" / "onset" / "manifest.json")

    def audit(self, segment: SegmentRow) -> None:
        first = self.rng.choice([segment.first_step, segment.first_step + 5])
        with self.ledger.begin() as tx:
            record_event(
                tx, "audit_drawn", Subject("segment", segment.id), {"first": first, "last": first + 5, "patches": [1]}
            )
            if self.rng.random() < 0.5:
                tx.execute(
                    verdicts.insert().values(
                        gate="audit", subject=str(Subject("segment", segment.id)), policy_sha256="p", subject_sha256="e",
                        outcome=self.rng.choice(["promote", "hold", "reject"]), reasons=["so"], evidence={}, created_at=0.0,
                    )
                )  # fmt: skip
        for step in (first, first + 5):
            self.file(get_audit_folder(self.workspace, segment.id) / "live" / step_name(step) / "manifest.json")

    def lived(self, trunks: int) -> None:
        """So many trunk segments one after the other, with what may hang off them."""
        rng, trunk = self.rng, None
        for number in range(trunks):
            state = "done"
            if number and rng.random() < 0.15:
                self.segment(
                    "trunk",
                    trunk,
                    rng.choice(["rewound", "uncertified", "failed", "abandoned"]),
                    trunk.last_step if trunk else 0,
                )
            trunk = self.segment("trunk", trunk, state, trunk.last_step if trunk else 0)
            for _ in range(rng.choice([0, 0, 1, 2])):
                anneal = self.segment("anneal", trunk, rng.choice(["done", "done", "done", "rewound"]), trunk.last_step)
                if anneal.state == "done" and rng.random() < 0.9:
                    self.candidate(anneal)
                if rng.random() < 0.3:
                    self.anomaly(anneal)
            if rng.random() < 0.2:
                average = self.segment("average", trunk, rng.choice(["planned", "done"]), trunk.last_step, 0)
                if average.state == "done":
                    self.file(Path(average.folder) / "checkpoints" / step_name(average.last_step) / "manifest.json")
                    self.candidate(average)
            if rng.random() < 0.3:
                self.anomaly(trunk)
            if rng.random() < 0.3:
                self.audit(trunk)
        assert trunk is not None
        if rng.random() < 0.7:
            kind = rng.choice(["trunk", "anneal"])
            self.segment(kind, trunk, rng.choice(["planned", "failed", "uncertified"]), trunk.last_step)
