"""Defines the rows of the ledger's tables as dataclasses. They are read with plain SQL, so that ``factory status`` need not import SQLAlchemy.

    SegmentRow.get(ledger, 3).folder
    SegmentRow.first(ledger, "WHERE kind = :kind AND state = 'done' ORDER BY id DESC", kind="trunk")

    >>> str(Subject("candidate", 7)), Subject.parse("candidate:7").number
    ('candidate:7', 7)

Each function takes an object that reads SQL: a ``Ledger``, or a ``LedgerReader`` (``factory.ledger.reader``), which cannot write.
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


class SqlReader(Protocol):
    """An object that reads SQL from the ledger."""

    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """Return all rows of ``sql`` (``:name`` parameters) as dicts, JSON columns decoded."""


def decode_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its JSON columns decoded. Some databases return these columns as text."""
    for key in JSON_COLUMNS & row.keys():
        if isinstance(row[key], str) and (row[key][:1] in ("{", "[") or row[key] == "null"):
            row[key] = json.loads(row[key])
    if isinstance(row.get("reasons"), list):
        row["reasons"] = [Message.from_json(reason) for reason in row["reasons"]]
    return row


@dataclass(frozen=True)
class Subject:
    """The subject of an event or a verdict. The ledger stores it as text: 'candidate:7'."""

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
    """One row of ``source``. Each field is a column."""

    noun: ClassVar[str]
    source: ClassVar[str]  # the name of a table, or a select with an alias
    key: ClassVar[str] = "id"
    hint: ClassVar[str] = ""  # a sentence of an error, which says how the first row is made

    @classmethod
    def select(cls, db: SqlReader, clauses: str = "", **parameters: object) -> list[Self]:
        """Return the rows that ``clauses`` (WHERE …, ORDER BY …) selects. Without ``clauses``, return all rows, ordered by key."""
        columns = ", ".join(f'"{field.name}"' for field in fields(cls))
        sql = f"SELECT {columns} FROM {cls.source} {clauses or f'ORDER BY {cls.key}'}"
        return [cls(**row) for row in db.read(sql, **parameters)]

    @classmethod
    def find_first(cls, db: SqlReader, clauses: str, **parameters: object) -> Self | None:
        """Return the first row that ``clauses`` selects, or None."""
        return next(iter(cls.select(db, f"{clauses} LIMIT 1", **parameters)), None)

    @classmethod
    def get(cls, db: SqlReader, key: int | str) -> Self:
        """Return the row with this key. Raises: InputError, which lists the known keys, if no row has it."""
        row = cls.find_first(db, f"WHERE {cls.key} = :key", key=key)
        if row is None:
            known = [str(r["key"]) for r in db.read(f"SELECT {cls.key} AS key FROM {cls.source} ORDER BY {cls.key}")]
            if known:
                raise InputError(
                    "rows.unknown_key",
                    "there is no {noun} {key}. The ledger has: {known}",
                    noun=cls.noun,
                    key=key,
                    known=known,
                )
            if not cls.hint:
                raise InputError(
                    "rows.no_rows_yet",
                    "there is no {noun} {key}, because the ledger has no {noun} yet",
                    noun=cls.noun,
                    key=key,
                )
            raise InputError(
                "rows.no_rows",
                "there is no {noun} {key}, because the ledger has no {noun} yet. {how}",
                noun=cls.noun,
                key=key,
                how=cls.hint,
            )
        return row

    def select_fields(self, *names: str) -> dict[str, Any]:
        """Return some of the fields by name, as JSON-ready values. Each of ``names`` may be several names, separated by spaces."""
        return {name: getattr(self, name) for part in names for name in part.split()}


IMPORT = "import"  # the kind of the segment that holds an imported model, and the gate of the verdict that makes the model release 0
ON_CANDIDATES = f"gate IN ('release', '{IMPORT}')"  # selects the verdicts on candidates
WITHOUT_STEPS = ("average", IMPORT)  # kinds of segments that train nothing


# ``factory.ledger.ledger`` documents the columns.
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

    @property
    def has_steps(self) -> bool:
        """False for an average of checkpoints and for an imported model, which no trainer made."""
        return self.kind not in WITHOUT_STEPS

    @classmethod
    def read_lineage(cls, db: SqlReader, segment: int) -> list[Self]:
        """Return a segment and its ancestors, oldest first."""
        chain = [cls.get(db, segment)]
        while parent := chain[0].parent:
            chain.insert(0, cls.get(db, parent))
        return chain


@dataclass(frozen=True)
class RunRow(LedgerRow):
    noun, source = "run", "runs"
    hint = Message("rows.how_runs", "The factory makes runs for certificates, preflights, audits, diagnoses and gates")

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
    hint = Message("rows.how_candidates", "'factory run' makes candidates as soon as the ledger has shards")

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
    def find_newest(cls, db: SqlReader, candidate: int) -> Self | None:
        """Return a candidate's newest evaluation on held-out documents, or None. Evaluations on one task (suite 'task:…') do not count."""
        which = "WHERE candidate = :candidate AND suite_sha256 NOT LIKE 'task:%' ORDER BY id DESC"
        return cls.find_first(db, which, candidate=candidate)


@dataclass(frozen=True)
class VerdictRow(LedgerRow):
    """A verdict. Its ``evidence`` can be long and is read only when needed."""

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
    def subject_number(self) -> int:
        """The number of the candidate, proposal or segment that was judged."""
        return Subject.parse(self.subject).number

    def read_evidence(self, db: SqlReader) -> dict[str, Any]:
        return dict(db.read("SELECT evidence FROM verdicts WHERE id = :id", id=self.id)[0]["evidence"])

    def read_with_evidence(self, db: SqlReader) -> dict[str, Any]:
        """Return all fields and the evidence, as JSON-ready values."""
        return vars(self) | {"evidence": self.read_evidence(db)}

    @classmethod
    def find_newest_on_candidate(cls, db: SqlReader, candidate: int) -> Self | None:
        """Return the newest verdict of the release gate on a candidate, or the one that made an imported model release 0."""
        which = f"WHERE {ON_CANDIDATES} AND subject = :subject ORDER BY id DESC"
        return cls.find_first(db, which, subject=str(Subject("candidate", candidate)))

    @classmethod
    def find_newest(cls, db: SqlReader, gate: str, subject: Subject) -> Self | None:
        which = "WHERE gate = :gate AND subject = :subject ORDER BY id DESC"
        return cls.find_first(db, which, gate=gate, subject=str(subject))


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


UNDO_TARGET = "undo"  # a proposal that reverts proposal N has the target 'undo:N'


@dataclass(frozen=True)
class ProposalRow(LedgerRow):
    """A proposal, with its verdict if it has one."""

    noun, key = "proposal", "number"
    source = (
        "(SELECT p.*, v.outcome, v.reasons, v.gate, v.subject_sha256 AS judged_sha256 FROM proposals p "
        "LEFT JOIN verdicts v ON v.id = p.verdict) AS proposals"
    )
    hint = Message("rows.how_proposals", "To make a proposal, run 'factory propose'")

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
        """Return the commit of the patch. Raises: InputError if the patch was never committed, because it is out of scope or the factory was
        killed."""
        if self.commit is None:
            raise InputError(
                "rows.no_commit",
                "Proposal {proposal} has no commit, because its patch was never written to its branch",
                proposal=self.number,
            )
        return self.commit

    def read_evidence(self, db: SqlReader) -> dict[str, Any]:
        """Return the evidence of the proposal's verdict, or {} if there is no verdict."""
        return VerdictRow.get(db, self.verdict).read_evidence(db) if self.verdict else {}


def find_champion(db: SqlReader) -> ReleaseRow | None:
    """Return the champion: the release of the newest 'promoted' or 'rolled_back' event, or None before the first release.

    MLflow's alias and the served folder follow the champion.
    """
    newest = db.read("SELECT subject FROM events WHERE kind IN ('promoted', 'rolled_back') ORDER BY id DESC LIMIT 1")
    return ReleaseRow.get(db, Subject.parse(newest[0]["subject"]).number) if newest else None
