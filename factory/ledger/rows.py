"""The nouns of the ledger as typed rows, read with plain SQL: ``factory status`` must not wait for SQLAlchemy's import (0.2 s).

    SegmentRow.get(ledger, 3).folder
    SegmentRow.first(ledger, "WHERE kind = :kind AND state = 'done' ORDER BY id DESC", kind="trunk")

    >>> str(Subject("candidate", 7)), Subject.parse("candidate:7").number
    ('candidate:7', 7)

Each function takes whatever reads SQL: a ``Ledger``, or a ``Reader`` (``factory.ledger.reader``) where nothing is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self

from factory.core.errors import InputError
from kernels.contract.message import Message

JSON_COLUMNS = frozenset(
    {
        "counts", "domains", "result", "summary", "reasons", "evidence", "detail", "plan", "content", "recipe_json",
        "computing", "moved", "facts", "filter", "change", "arm",
    }
)  # fmt: skip


class Reads(Protocol):
    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """All rows of ``sql`` (``:name`` parameters) as dicts, JSON columns decoded."""


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose JSON columns are values, also where the database gave them as text."""
    for key in JSON_COLUMNS & row.keys():
        if isinstance(row[key], str) and (row[key][:1] in ("{", "[") or row[key] == "null"):
            row[key] = json.loads(row[key])
    if isinstance(row.get("reasons"), list):
        row["reasons"] = [Message.from_json(reason) for reason in row["reasons"]]
    return row


@dataclass(frozen=True)
class Subject:
    """What an event or a verdict is about. The ledger stores ``str(subject)``: 'candidate:7'."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"

    @classmethod
    def parse(cls, words: str) -> Self:
        kind, _, number = words.partition(":")
        return cls(kind, int(number))


@dataclass(frozen=True)
class LedgerRow:
    """One row of ``source``: a field a column."""

    noun: ClassVar[str]
    source: ClassVar[str]  # a table, or a select with an alias
    key: ClassVar[str] = "id"
    how: ClassVar[str] = ""  # a message's end: how a person makes the first one

    @classmethod
    def select(cls, db: Reads, which: str = "", **parameters: object) -> list[Self]:
        """The rows that ``which`` (WHERE …, ORDER BY …) selects; all of them, by their key, without it."""
        columns = ", ".join(f'"{field.name}"' for field in fields(cls))
        sql = f"SELECT {columns} FROM {cls.source} {which or f'ORDER BY {cls.key}'}"
        return [cls(**row) for row in db.read(sql, **parameters)]

    @classmethod
    def first(cls, db: Reads, which: str, **parameters: object) -> Self | None:
        return next(iter(cls.select(db, f"{which} LIMIT 1", **parameters)), None)

    @classmethod
    def get(cls, db: Reads, key: int | str) -> Self:
        """Raises: InputError that lists the keys there are, when there is no such row."""
        row = cls.first(db, f"WHERE {cls.key} = :key", key=key)
        if row is None:
            known = [str(r["key"]) for r in db.read(f"SELECT {cls.key} AS key FROM {cls.source} ORDER BY {cls.key}")]
            there = f"are: {', '.join(known)}" if known else f"is none yet{cls.how}"
            raise InputError(f"no {cls.noun} {key}; there {there}")
        return row

    def only(self, names: str) -> dict[str, Any]:
        """Some of the fields, as JSON for programs."""
        return {name: getattr(self, name) for name in names.split()}


# The columns are documented at the tables, in ``factory.ledger.ledger``.
@dataclass(frozen=True)
class SegmentRow(LedgerRow):
    noun, source = "segment", "segments"

    id: int
    kind: str
    parent: int | None
    generation: int
    recipe: str
    recipe_json: dict[str, Any]
    recipe_sha256: str
    data_plan: str
    code_commit: str
    first_step: int
    last_step: int
    state: str
    attempts: int
    folder: str
    computing: dict[str, Any] | None
    result: dict[str, Any] | None
    created_at: float
    finished_at: float | None

    @classmethod
    def lineage(cls, db: Reads, segment: int) -> list[Self]:
        """A segment and all that it goes on from, the first one first."""
        chain = [cls.get(db, segment)]
        while parent := chain[0].parent:
            chain.insert(0, cls.get(db, parent))
        return chain


@dataclass(frozen=True)
class RunRow(LedgerRow):
    noun, source = "run", "runs"
    how = ": a certificate, a preflight, an audit, a diagnosis or a gate makes them"

    id: str
    purpose: str
    subject: str
    arm: dict[str, Any]
    state: str
    folder: str
    started_at: float
    finished_at: float | None
    ended: str | None


@dataclass(frozen=True)
class CandidateRow(LedgerRow):
    noun, source = "candidate", "candidates"
    how = ": 'factory run' makes one once there are shards to train on"

    id: int
    segment: int
    checkpoint: str
    export_path: str
    export_sha256: str
    created_at: float


@dataclass(frozen=True)
class EvaluationRow(LedgerRow):
    noun, source = "evaluation", "evaluations"

    id: int
    candidate: int
    suite_sha256: str
    summary: dict[str, Any]
    created_at: float

    @classmethod
    def newest(cls, db: Reads, candidate: int) -> Self | None:
        """On held-out documents; those of single tasks (``factory.tasks``) have a suite of their own, 'task:…'."""
        which = "WHERE candidate = :candidate AND suite_sha256 NOT LIKE 'task:%' ORDER BY id DESC"
        return cls.first(db, which, candidate=candidate)


@dataclass(frozen=True)
class VerdictRow(LedgerRow):
    """``evidence`` is read where it is needed: it can be long."""

    noun, source = "verdict", "verdicts"

    id: int
    gate: str
    subject: str
    against: str | None
    policy_sha256: str
    subject_sha256: str
    outcome: str
    reasons: list[str]
    created_at: float

    @property
    def number(self) -> int:
        """Of the candidate, proposal or segment that was judged."""
        return Subject.parse(self.subject).number

    def evidence(self, db: Reads) -> dict[str, Any]:
        return dict(db.read("SELECT evidence FROM verdicts WHERE id = :id", id=self.id)[0]["evidence"])

    def with_evidence(self, db: Reads) -> dict[str, Any]:
        """As JSON for programs."""
        return vars(self) | {"evidence": self.evidence(db)}

    @classmethod
    def newest(cls, db: Reads, gate: str, subject: Subject) -> Self | None:
        which = "WHERE gate = :gate AND subject = :subject ORDER BY id DESC"
        return cls.first(db, which, gate=gate, subject=str(subject))


@dataclass(frozen=True)
class ReleaseRow(LedgerRow):
    """A release with the export of its candidate."""

    noun, key = "release", "number"
    source = (
        "(SELECT r.*, c.export_path, c.export_sha256, c.segment FROM releases r "
        "JOIN candidates c ON c.id = r.candidate) AS releases"
    )

    number: int
    candidate: int
    verdict: int
    state: str
    mlflow_version: str | None
    report: str | None
    approved_by: str | None
    created_at: float
    export_path: str
    export_sha256: str
    segment: int


UNDO = "undo"  # of a proposal that takes another back: its target is undo:<number of that>


@dataclass(frozen=True)
class ProposalRow(LedgerRow):
    """A proposal with its verdict, once it has one."""

    noun, key = "proposal", "number"
    source = (
        "(SELECT p.*, v.outcome, v.reasons, v.gate, v.subject_sha256 AS judged_sha256 FROM proposals p "
        "LEFT JOIN verdicts v ON v.id = p.verdict) AS proposals"
    )
    how = ": run 'factory propose'"

    number: int
    agent: str
    target: str
    title: str
    hypothesis: str
    predicted_gain: float | None
    base_commit: str
    branch: str
    commit: str | None
    patch_sha256: str | None
    state: str
    verdict: int | None
    report: str | None
    created_at: float
    outcome: str | None
    reasons: list[str] | None
    gate: str | None
    judged_sha256: str | None

    @property
    def patch_commit(self) -> str:
        """Raises: InputError when the patch was never committed: it was out of scope, or the factory was killed."""
        if self.commit is None:
            raise InputError(f"proposal {self.number} has no commit: its patch was never written to its branch")
        return self.commit

    def evidence(self, db: Reads) -> dict[str, Any]:
        """Of its verdict; empty without one."""
        return VerdictRow.get(db, self.verdict).evidence(db) if self.verdict else {}


def champion(db: Reads) -> ReleaseRow | None:
    """The release of the newest 'promoted' or 'rolled_back' event; None before the first. MLflow's alias and the served folder follow it."""
    newest = db.read("SELECT subject FROM events WHERE kind IN ('promoted', 'rolled_back') ORDER BY id DESC LIMIT 1")
    return ReleaseRow.get(db, Subject.parse(newest[0]["subject"]).number) if newest else None
