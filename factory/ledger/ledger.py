"""The ledger: the only source of truth. It consists of SQL tables to which the factory mostly appends rows (DESIGN §5).

A ``Ledger`` has ``begin()`` (one write transaction) and ``read()``. Paths are stored relative to the workspace (``factory.ledger.stored_paths``).
Tables are SQLAlchemy Core objects. The package that owns a table (``ingest``, ``training`` …) has the statements on it. The default database is
an SQLite file (WAL, full sync, foreign keys on). A PostgreSQL URL (``postgresql://user:password@host/database``) works the same. A write
transaction waits until the previous one has ended.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import WorkspaceError
from factory.core.faults import find_fault_in
from factory.ledger.engine import ROW_NUMBER, NulSafeText, check_ledger_exists, get_sqlite_file, make_engine
from factory.ledger.journal import append_to_newest_backup, create_triggers
from factory.ledger.rows import Subject
from factory.ledger.snapshot import Snapshot
from factory.ledger.stored_paths import to_stored_path
from factory.ledger.version import GONE, SCHEMA_VERSION, SERVER_ADVICE, check_version

metadata = sa.MetaData()
T, N, F, J, C = NulSafeText, sa.BigInteger, sa.Float, sa.JSON, sa.Column

# keys: 'schema' (version of the tables), 'identity' (the ledger's random name), 'ingest_index' (parameters of the hashes of documents)
meta = sa.Table("meta", metadata, C("key", T, primary_key=True), C("value", T))

events = sa.Table(
    "events",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("at", F, nullable=False),  # seconds since 1970
    C("kind", T, nullable=False),  # 'ingested', 'segment_done', 'promoted', …
    C("subject", T, nullable=False),  # what the event is about: a Subject ('segment:3'), 'shard:ab12…', 'daemon'
    C("detail", J),
)

# -- data --------------------------------------------------------------------------------------------------------------
shards = sa.Table(
    "shards",
    metadata,
    C("sha256", T, primary_key=True),
    C("name", T, nullable=False),  # the file's name when it arrived
    C("path", T, nullable=False),  # the file's current path
    C("bytes", N, nullable=False),
    C("state", T, nullable=False),  # 'ingested' | 'quarantined'
    C("reason", T),  # why the shard was quarantined, for a person
    C("rows", N, nullable=False, default=0),  # number of rows, good and bad
    C("counts", J),  # {"train": n, "held_out": n, "dropped": {rule: n}, "pii": n, "trimmed": n}
    C("domains", J),  # {domain: {"documents": n, "tokens": n, "supervised_tokens": n}} of the training documents
    C("tokens", N, nullable=False, default=0),
    C("ingested_at", F, nullable=False),
)

HAS_GROUP = sa.text("group_key IS NOT NULL")
documents = sa.Table(
    "documents",
    metadata,
    C("key", T, primary_key=True),  # '<first 16 hex of the shard's sha256>:<row number>'
    C("id", T, nullable=False, index=True),  # the id in the user's row, else the key
    C("shard", T, sa.ForeignKey("shards.sha256"), nullable=False, index=True),
    C("row", N, nullable=False),
    C("domain", T, nullable=False),
    C("source", T),
    C("license", T),
    C("content_sha256", T, index=True),  # hash of the normalised content; null for a row that could not be read
    # 'train' | 'held_out' | 'dropped' | 'quarantined' (trained on before, masked now) | 'removed' (by a person: factory.ledger.removals)
    C("fate", T, nullable=False),
    C("rule", T),  # the rule that dropped the row, or the removal
    C("matched", T),  # key of the document that the row duplicates or shares words with
    C("detail", T),  # one line for a person
    C("releasable", sa.Boolean, nullable=False, default=True),  # whether its licence allows the release of a model
    C("tokens", N, nullable=False, default=0),
    C("supervised_tokens", N, nullable=False, default=0),
    C("token_shard", T),
    C("group_key", T),  # documents of one group are not independent; null: the document is its own group
    # {"url-host": …, "conversation": …, "path": …}: other values of the row that can serve as a group
    C("facts", J(none_as_null=True)),
    sa.Index("documents_by_group", "group_key", sqlite_where=HAS_GROUP, postgresql_where=HAS_GROUP),
)

held_out = sa.Table(
    "held_out",
    metadata,
    C("key", T, sa.ForeignKey("documents.key"), primary_key=True),
    C("domain", T, nullable=False),
    C("group_key", T, nullable=False),  # the document's group, else its key
    C(
        "sealed", sa.Boolean, nullable=False
    ),  # true: only the release gate reads it; false: the dev half, for all other uses
    C("content", J, nullable=False),  # {"text": …} or {"messages": […]}, as normalised
)

relabels = sa.Table(  # a person gave documents another domain, source, licence or group (factory.data.relabelling)
    "relabels",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("at", F, nullable=False),
    C("who", T, nullable=False),
    C("why", T, nullable=False),
    C("filter", J, nullable=False),  # {"domain": [name], "source": […], "license": […], "shard": […], "key": […]}
    C("change", J, nullable=False),  # {"domain": name, "source": name, "license": name, "group": kind}
    C("counts", J, nullable=False),  # {"documents": n, "held_out": n, "token_shards": n, …}
)

tokenizers = sa.Table(
    "tokenizers",
    metadata,
    C("sha256", T, primary_key=True),  # of tokenizer.json
    C("path", T, nullable=False),
    C("vocab_size", N, nullable=False),
    C("created_at", F, nullable=False),
)

token_shards = sa.Table(
    "token_shards",
    metadata,
    C("id", T, primary_key=True),  # content address
    C("shard", T, sa.ForeignKey("shards.sha256"), nullable=False),
    C("path", T, nullable=False),
    C("tokenizer", T, nullable=False),
    C("documents", N, nullable=False),
    C("tokens", N, nullable=False),
    C("domains", J, nullable=False),  # the same form as shards.domains
    C("created_at", F, nullable=False),
    # {domain: rows} of relabelled documents, as in later data plans (PlannedShard.moved)
    C("moved", J(none_as_null=True)),
)

# -- model loop --------------------------------------------------------------------------------------------------------
data_plans = sa.Table(
    "data_plans", metadata, C("id", T, primary_key=True), C("plan", J, nullable=False), C("created_at", F)
)

segments = sa.Table(
    "segments",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    # 'trunk' | 'anneal' | 'average' (of checkpoints) | 'import' (of a model that was trained elsewhere); the last two have no training steps
    C("kind", T, nullable=False),
    C("parent", N),  # the segment from whose last checkpoint this segment starts
    C(
        "generation", N, nullable=False
    ),  # number of distinct sets of shards on which the trunk was trained so far, from 1
    C("recipe", T, nullable=False),
    C("recipe_json", J, nullable=False),  # the whole recipe, as trained
    C("recipe_sha256", T, nullable=False),
    C("data_plan", T, sa.ForeignKey("data_plans.id"), nullable=False),
    C("code_commit", T, nullable=False),
    C("first_step", N, nullable=False),
    C("last_step", N, nullable=False),  # the step after which the segment ends
    # 'planned' | 'done' | 'failed' (parked: a person retries or abandons it) | 'abandoned' (no segment continues it) |
    # 'uncertified' (not started: its code has no certificate) | 'rewound' (no segment continues it)
    C("state", T, nullable=False),
    C(
        "attempts", N, nullable=False, default=0
    ),  # deaths of its trainer since its newest checkpoint; stops do not count
    C("folder", T, nullable=False),
    C("computing", J(none_as_null=True)),  # precision, kernels, machine; null: an older factory planned it
    C("result", J),  # the content of result.json, when done
    C("created_at", F, nullable=False),
    C("finished_at", F),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    C("id", T, primary_key=True),  # SHA-256 of its manifest
    C("segment", N, sa.ForeignKey("segments.id"), nullable=False),
    C("step", N, nullable=False),
    C("path", T, nullable=False),
    C("created_at", F, nullable=False),
)

runs = sa.Table(  # training runs outside the segments, for comparisons (``factory.runs``)
    "runs",
    metadata,
    C("id", T, primary_key=True),  # ``Arm.key``: a hash of the arm, so that the same arm has the same row
    C("purpose", T, nullable=False),  # 'certificate' | 'preflight' | 'audit' | 'diagnosis' | …
    C("subject", T, nullable=False),  # the subject of its newest use: 'segment:3', 'anomaly:7'
    C("arm", J, nullable=False),  # ``Arm.to_json``
    # 'running' | 'done' | 'failed' (it left no checkpoint) | 'stopped' (the next request continues it)
    C("state", T, nullable=False),
    C("folder", T, nullable=False),  # its folder, which may be removed after its use
    C("started_at", F, nullable=False),
    C("finished_at", F),
    C("ended", T),  # why the run failed, for a person; null if it did not. During the run: the process that trains it
)

candidates = sa.Table(
    "candidates",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("segment", N, sa.ForeignKey("segments.id"), nullable=False, unique=True),
    C("checkpoint", T, nullable=False),
    C("export_path", T, nullable=False),
    C("export_sha256", T, nullable=False),
    C("created_at", F, nullable=False),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("candidate", N, sa.ForeignKey("candidates.id"), nullable=False),
    C("suite_sha256", T, nullable=False),  # hash of the held-out items and task versions; 'task:<sha256>' for one task
    C("summary", J, nullable=False),  # {"bpb": {domain: x}, "cloze": …, "baselines": {…}, "parity": {…} …}
    C("created_at", F, nullable=False),
    sa.UniqueConstraint("candidate", "suite_sha256"),
)

eval_items = sa.Table(
    "eval_items",
    metadata,
    C("evaluation", N, sa.ForeignKey("evaluations.id"), nullable=False, index=True),
    C("task", T, nullable=False),  # 'bpb' | 'cloze' | 'chat' | '<task>/<metric>'
    C("item", T, nullable=False),
    C("domain", T, nullable=False),
    C("cluster", T, nullable=False),
    C("value", F, nullable=False),  # bpb: nats of the item; cloze, chat: 0 or 1; else a score from 0 to 1, or a cost
    C("weight", F, nullable=False),  # bpb: UTF-8 bytes; else 1
)

verdicts = sa.Table(
    "verdicts",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    # 'release' | 'patch' | 'recipe' | 'code' (a certificate) | 'preflight' | 'import' (no gate: the rule that makes a model release 0) | …
    C("gate", T, nullable=False),
    C("subject", T, nullable=False),  # 'candidate:2' | 'proposal:1' | 'segment:3'
    C("against", T),  # 'candidate:1' (the champion) | base commit | the commit of the previous segment
    C("policy_sha256", T, nullable=False),
    C("subject_sha256", T, nullable=False),  # hash of the judged export or patch; an approval counts for this hash only
    C("outcome", T, nullable=False),  # 'promote' | 'hold' | 'reject' | 'imported'
    C("reasons", J, nullable=False),  # [{"code", "text", "data"}, …]; older factories: [text, …]
    C("evidence", J, nullable=False),
    C("created_at", F, nullable=False),
)

releases = sa.Table(
    "releases",
    metadata,
    C("number", N, primary_key=True),
    C("candidate", N, sa.ForeignKey("candidates.id"), nullable=False, unique=True),
    C("verdict", N, sa.ForeignKey("verdicts.id"), nullable=False),
    C("state", T, nullable=False),  # 'decided' → 'published'
    C("mlflow_version", T),
    C("report", T),
    C("approved_by", T),
    C("created_at", F, nullable=False),
)

anomalies = sa.Table(
    "anomalies",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("segment", N, sa.ForeignKey("segments.id"), nullable=False),
    C("step", N, nullable=False),
    C("kind", T, nullable=False),
    C("detail", J),
)

# -- code loop ---------------------------------------------------------------------------------------------------------
profiles = sa.Table(
    "profiles",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("code_commit", T, nullable=False),
    C("path", T, nullable=False),  # profile.json
    C("summary", J, nullable=False),  # the values in profile.json that are texts, numbers or booleans
    C("created_at", F, nullable=False),
)

proposals = sa.Table(
    "proposals",
    metadata,
    C("number", N, primary_key=True),
    C("agent", T, nullable=False),
    C("target", T, nullable=False),
    C("title", T, nullable=False),
    C("hypothesis", T, nullable=False),
    C("predicted_gain", F),  # step time of the baseline / of the candidate; bits per byte if the target is 'quality:…'
    C("base_commit", T, nullable=False),
    C("branch", T, nullable=False),
    C("commit", T),
    C("patch_sha256", T),
    # 'drafted' (→ 'written': it waits for the daemon) → 'judged' → 'approved' (→ 'reverted') | 'rejected' | 'superseded' |
    # 'merged-with' (a sum that contains it was merged); 'failed'
    C("state", T, nullable=False),
    C("verdict", N, sa.ForeignKey("verdicts.id")),
    C("report", T),
    C("created_at", F, nullable=False),
)

agent_runs = sa.Table(  # runs of a language model on a proposal or a diagnosis; their state is in agents.db
    "agent_runs",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("agent", T, nullable=False),
    C("asked", T, nullable=False),  # the target that a person named, or ''
    C("base_commit", T, nullable=False),
    C("profile", N, nullable=False),
    C("state", T, nullable=False),  # 'running' → 'proposed' | 'worded' | 'declined' | 'nothing' | 'abandoned'
    C("proposal", N),
    C("why", T),
    C("created_at", F, nullable=False),
)

exchanges = sa.Table(  # all requests to language models, each recorded before it is sent
    "exchanges",
    metadata,
    C("id", ROW_NUMBER, primary_key=True),
    C("at", F, nullable=False, index=True),
    C("run", N, nullable=False, index=True),  # the id in agent_runs
    C("label", T, nullable=False),
    C("state", T, nullable=False),  # 'reserved' → 'done' | 'failed'
    C("tokens", N, nullable=False),  # at first the largest possible number, later the real one
    C("usd", F, nullable=False),
    C("file", T),  # the whole exchange as JSON
    C("trace", T),  # the id of its trace in MLflow
)

tracked_runs = sa.Table("tracked_runs", metadata, C("subject", T, primary_key=True), C("run_id", T, nullable=False))


class Ledger:
    """An open ledger of the workspace ``root`` (default: the folder of its SQLite file). It has only a connection pool, so it is cheap to make."""

    def __init__(self, url: str, root: Path | None = None) -> None:
        self.url = url
        self.file = get_sqlite_file(url)
        self.root = root or (self.file.parent if self.file else None)
        self.journaled = bool(self.file)
        self.engine = make_engine(url)

    @classmethod
    def create(cls, url: str, root: Path | None = None) -> Ledger:
        """Make the tables that do not exist yet, and return the open ledger. A second call changes nothing."""
        ledger = cls(url, root)
        with ledger.begin() as tx:
            metadata.create_all(tx)
            create_triggers(tx, metadata)
            if tx.execute(sa.select(meta.c.value).where(meta.c.key == "schema")).scalar() is None:
                first = {"schema": SCHEMA_VERSION, "identity": uuid.uuid4().hex}
                tx.execute(meta.insert(), [{"key": key, "value": value} for key, value in first.items()])
        return ledger

    @classmethod
    def open(cls, url: str, root: Path | None = None) -> Ledger:
        """Open a ledger. Raises: WorkspaceError when it is missing, damaged or of another version; DBAPIError for a fault of the machine."""
        ledger = cls(url, root)
        if ledger.file and ledger.root:
            check_ledger_exists(ledger.file, ledger.root)
        check_version(ledger.read_version(), f"the ledger at {ledger.engine.url!r}")
        return ledger

    @property
    def identity(self) -> str:
        """Return the ledger's random name. A file in each segment's folder has this name, which marks the ledger as the folder's owner."""
        return str((self.select_first(sa.select(meta.c.value).where(meta.c.key == "identity")) or {}).get("value"))

    def to_stored_path(self, place: str | os.PathLike[str]) -> str:
        """Return a path as the ledger stores it."""
        return to_stored_path(self.root, place)

    def read_version(self) -> str | None:
        """Return the version of the ledger's tables. Raises: the errors of ``open``."""
        try:
            found = self.select_first(sa.select(meta.c.value).where(meta.c.key == "schema"))
        except sa.exc.DBAPIError as error:
            if self.file and find_fault_in(error):
                raise
            raise WorkspaceError(
                "ledger.unreadable",
                "the ledger at {url} cannot be read: {why}. {advice}",
                url=repr(self.engine.url),
                why=str(error.orig),
                advice=GONE if self.file else SERVER_ADVICE,
            ) from error
        return found["value"] if found else None

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Begin a write transaction. It commits at the end of the block, and rolls back on any exception."""
        with self.engine.begin() as connection:
            yield connection
        if self.journaled and self.file and self.root:
            append_to_newest_backup(self.file, self.root)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Begin a read transaction. All its reads see the ledger at one moment, while other processes may write."""
        with self.engine.connect().execution_options(reads_only=True) as connection:
            yield Snapshot(connection, self.root)

    def select_rows(self, statement: sa.Executable, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return all rows of a select as dicts."""
        with self.snapshot() as db:
            return db.select_rows(statement, parameters or {})

    def select_first(self, statement: sa.Executable) -> dict[str, Any] | None:
        """Return the first row of a select as a dict, or None."""
        return next(iter(self.select_rows(statement)), None)

    def read(self, sql: str, **parameters: object) -> list[dict[str, Any]]:
        """Return all rows of ``sql``, which must be valid for both databases (``factory.ledger.rows.SqlReader.read``)."""
        with self.snapshot() as db:
            return db.read(sql, **parameters)


def record_event(tx: sa.Connection, kind: str, subject: Subject | str, detail: dict[str, Any] | None = None) -> None:
    """Append an event in the caller's transaction."""
    tx.execute(events.insert().values(at=time.time(), kind=kind, subject=subject, detail=detail))
