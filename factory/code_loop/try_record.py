"""Keeps what agents tried, and why they declined a target, as events of the ledger. Later runs on the target read both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from agents.core.untrusted import fold_to_one_line
from agents.core.workbench import EarlierProposal
from factory.ledger.ledger import agent_runs, events, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from kernels.contract.message import Message

TRIED = "tried"  # event: {"key", "stage", "name", "target", …}
LESSON = "lesson"  # event: {"target", "reason"}: why an agent declined a target
CHECK, ALONE, STEP = "check", "alone", "step"  # the stages of a try


@dataclass
class TryRecord:
    """What one run of an agent tried: events of the ledger, or a list for work without a run."""

    plant: Plant
    run: int | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        """Return the details of all results, oldest first."""
        if self.run is None:
            return self.memory
        which = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id"
        rows = self.plant.ledger.read(which, kind=TRIED, subject=str(Subject("agent_run", self.run)))
        return [row["detail"] for row in rows]

    def find(self, key: str, stage: str) -> dict[str, Any] | None:
        return next((one for one in self.read() if (one["key"], one["stage"]) == (key, stage)), None)

    def add(self, details: Sequence[dict[str, Any]]) -> None:
        """Store the results of one stage, all or none."""
        if self.run is None:
            self.memory += details
        elif details:
            with self.plant.ledger.begin() as tx:
                for detail in details:
                    record_event(tx, TRIED, Subject("agent_run", self.run), detail)

    @property
    def timed_variants(self) -> set[str]:
        """The keys of the variants that were timed."""
        return {one["key"] for one in self.read() if one["stage"] != CHECK}

    @property
    def timing_seconds(self) -> float:
        return sum(one.get("seconds", 0.0) for one in self.read())


def list_earlier_tries(plant: Plant, target: str, most: int) -> list[Message]:
    """Return what earlier runs tried on a target, newest last: a line for each variant, with the result of its last stage."""
    which = sa.select(events.c.detail).where(events.c.kind == TRIED).order_by(events.c.id)
    newest: dict[str, dict[str, Any]] = {}
    for row in plant.ledger.select_rows(which):
        if row["detail"].get("target") == target:
            newest[row["detail"]["key"]] = newest.pop(row["detail"]["key"], {}) | row["detail"]
    return [
        Message(
            "code_loop.earlier_try",
            "tried: {name}: {result}",
            name=one["name"],
            result=fold_to_one_line(str(_summarize(one)), 300),
        )
        for one in list(newest.values())[-most:]
    ]


def _summarize(detail: Mapping[str, Any]) -> str:
    said = [str(Message.from_json(one)) for one in (detail.get("problems") or detail.get("lines") or ())]
    return "; ".join(said) or Message("code_loop.correct", "its results are correct")


def list_lessons(plant: Plant, target: str, base: str) -> list[EarlierProposal]:
    """Return why agents declined a target, oldest first. A target that was declined on the commit ``base`` is closed."""
    agent_runs.create(plant.ledger.engine, checkfirst=True)  # a ledger may be older than this table
    which = "SELECT e.detail, r.base_commit FROM events e JOIN agent_runs r ON e.subject = 'agent_run:' || r.id WHERE e.kind = :kind ORDER BY e.id"
    title = Message("code_loop.declined_title", "an agent left this target without a proposal")
    return [
        EarlierProposal("", "declined", row["detail"]["reason"], title, row["base_commit"] == base)
        for row in plant.ledger.read(which, kind=LESSON)
        if row["detail"].get("target") == target
    ]
