"""Ingests one shard: from a file to a token shard and ledger rows (DESIGN §5). Start reading here.

    read rows ─► analyse (workers) ─► decide (here) ─► finish (workers) ─► token shard ─► one transaction
                 validate, normalise,  duplicates,      trim, tokenise,
                 filter, PII, hashes   held-out,        round trip
                                       contamination

First, new items of evaluation tasks are recorded, so that training data that contain them are found (``task_hashes``). All other work is done before
the transaction, which is the only step that stores the shard in the ledger. After a kill, the next call starts again and ends with the same rows,
because every step is a function of the shard, the policy and the ledger. A killed run leaves a spool, which the next run removes, or a token shard
that no ledger row names. The next run uses that token shard, because the name of a token shard is the hash of its content.

The caller holds the workspace's ``model-loop`` lock, so two shards are never ingested at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace
from factory.ingest import ledger_rows
from factory.ingest.decisions import ShardDecisions, decide_document_fates
from factory.ingest.document import BadRow, Row
from factory.ingest.document_index import PARAMETERS, DocumentIndex
from factory.ingest.filing import ASKED, make_stored_file_name
from factory.ingest.hash_index import write_hashes
from factory.ingest.policy_and_code_hash import compute_policy_and_code_hash
from factory.ingest.readers import RawRow, ShardProblem, read_rows
from factory.ingest.reading.rows import UNREADABLE_ROW_RULES
from factory.ingest.reading.streams import make_unreadable_file_error
from factory.ingest.rules.licence_claims import CONFLICT_EVENT
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.row_counts import RowCounts, find_missing_columns, refuse_missing_columns
from factory.ingest.task_hashes import record_task_ngrams
from factory.ingest.tokenizer import Tokenizer, find_structure, has_template_with_tool_calls, list_special_tokens
from factory.ingest.vocabulary import load_or_train_tokenizer
from factory.ingest.worker import (
    AnalysedChunk,
    FinishedDocument,
    IngestJob,
    WorkerPool,
    analyse_chunk,
    count_row_columns,
    finish_chunk,
)
from factory.ledger.file_events import SHARD_FILED
from factory.ledger.ledger import Ledger, meta, record_event, shards, token_shards
from factory.ledger.plant import Plant
from factory.retrying.policy import RetryPolicy
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, hash_file, write_token_shard

_CHUNK_BYTES = 1 << 19
_CHUNK_ROWS = 1000
_WORTH_WORKERS = 4 << 20  # bytes; for a larger shard, worker processes save more time than their start takes


@dataclass(frozen=True)
class ShardReport:
    """The result of an ingest: the shard's row in the ledger's table ``shards``."""

    sha256: str
    name: str
    state: str  # 'ingested' | 'quarantined'
    reason: str | None
    rows: int
    # {"train", "held_out", "dropped": {rule: n}, "pii", "pii_kinds": {kind: n}, "trimmed"}; "groups": for ``describe_grouping``
    counts: dict[str, Any]
    domains: dict[str, dict[str, int]]  # of the documents to train on
    tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ingest_shard(
    plant: Plant,
    path: Path,
    *,
    workers: int | None = None,
    again: bool = False,
    other_files: Sequence[Path] = (),
    whole: Callable[[], Iterator[RawRow]] | None = None,
    quarantines: bool = True,
) -> ShardReport:
    """Ingest one file, and return its report. A file with the same content is never ingested twice: the second call returns the recorded report.

    A quarantined file is tried again if its name, the data policy or the code that reads it has changed, or with ``again``.

    workers: the number of processes for the per-document work; 0: no processes; None: one for each core, and none for a small shard.
    other_files: files that are ingested after this one. The first ingest trains the tokenizer on their text too.
    whole: yields all rows of the file that this shard is a part of. Mapped columns that the part lacks are looked up in these rows.
    quarantines: if False, an unusable file leaves no trace and raises ShardProblem.

    Raises: InputError if the path is not a readable file, if the file changes during the ingest, or if a task file cannot be read; ConfigError for a
    bad policy; WorkerDiedError; TooLittleTextError if the text is too short to train the tokenizer; FactoryError if the disk is full. Faults *inside*
    the file end in the report: a rule drops each bad row, and a file that is unusable as a whole is quarantined.
    """
    policy = DataPolicy.load(plant.workspace.policy_path("data.yaml"))
    before, sha256 = _identify(path)
    if known := find_finished_report(plant, path, sha256, again):
        return known
    index = DocumentIndex(plant.ledger, policy.licences)
    parameters = index.check_parameters(policy)
    record_task_ngrams(plant, policy.decontamination.ngram)
    spool = plant.workspace.shards / f".ingest-{sha256[:16]}"
    try:
        for left in (
            *plant.workspace.shards.glob(".ingest-*"),
            *plant.workspace.shards.glob(".writing-*"),
        ):  # of runs that were killed
            shutil.rmtree(left)
        spool.mkdir(parents=True)
        is_small = before.st_size < _WORTH_WORKERS and workers is None
        retries = RetryPolicy.load(plant.workspace.policy_path("retries.yaml"))
        with WorkerPool(0 if is_small else workers, spool, retries) as pool:
            found = _run(plant, path, sha256, policy, index, spool, pool, is_small, other_files, whole)
        _refuse_changed(path, before)
        if isinstance(found, ShardProblem):
            if not quarantines:
                raise found
            _copy_to_quarantine(plant.workspace, path, sha256)
        else:
            compared = (
                ledger_rows.collect_document_hashes(found.rows, found.decided, found.finished) if found.decided else ()
            )
            write_hashes(plant.workspace.root, f"shard:{sha256[:16]}", compared)
        with plant.ledger.begin() as tx:
            _store(
                tx,
                plant.ledger,
                path,
                before.st_size,
                sha256,
                found,
                parameters,
                compute_policy_and_code_hash(plant.workspace),
            )
    except OSError as error:
        _refuse_changed(path, before)  # a changed file may be the cause
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
            raise
        raise FactoryError(
            "ingest.stopped",
            "the ingest of {file} stopped, and nothing was stored: {error} ({where})",
            file=path.name,
            error=error.strerror,
            where=error.filename,
        ) from error
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    stored = read_shard_report(plant.ledger, sha256)
    assert stored
    return stored


def find_finished_report(plant: Plant, path: Path, sha256: str, again: bool) -> ShardReport | None:
    """Return the recorded report of a file that does not need an ingest; None: the file needs an ingest.

    A file does not need an ingest if it was ingested. It does not need one either if it was quarantined, and since then neither its name nor the
    policy nor the code that reads it has changed, and no person asked for another try.
    """
    known = read_shard_report(plant.ledger, sha256)
    if known and (known.state == "ingested" or not (again or _may_be_readable(plant, path, sha256))):
        return known
    return None


def quarantine_shard(plant: Plant, path: Path, sha256: str, problem: ShardProblem) -> ShardReport:
    """Record a file that is unusable as a whole, copy it to the quarantine, and return its report."""
    _copy_to_quarantine(plant.workspace, path, sha256)
    with plant.ledger.begin() as tx:
        _store(
            tx,
            plant.ledger,
            path,
            path.stat().st_size,
            sha256,
            problem,
            "",
            compute_policy_and_code_hash(plant.workspace),
        )
    stored = read_shard_report(plant.ledger, sha256)
    assert stored
    return stored


def read_shard_report(ledger: Ledger, sha256: str) -> ShardReport | None:
    """Return the recorded report of a shard; None: there is no report."""
    row = ledger.select_first(sa.select(shards).where(shards.c.sha256 == sha256))
    if row is None:
        return None
    return ShardReport(**{name: row[name] for name in ShardReport.__dataclass_fields__})


@dataclass(frozen=True)
class ProcessedShard:
    """A shard that is ready to be stored."""

    rows: list[Row]
    decided: ShardDecisions | None  # None if every row was dropped before the comparison with other documents
    finished: dict[str, FinishedDocument]  # by key, without the token arrays
    tokenizer: Tokenizer | None
    token_shard: TokenShard | None
    row_notes: RowCounts
    held_back: dict[str, dict[str, Any]]  # see ``ledger_rows.count_release_blockers``


def _run(
    plant: Plant,
    path: Path,
    sha256: str,
    policy: DataPolicy,
    index: DocumentIndex,
    spool: Path,
    pool: WorkerPool,
    is_small: bool,
    other_files: Sequence[Path],
    whole: Callable[[], Iterator[RawRow]] | None,
) -> ProcessedShard | ShardProblem:
    of_tokenizer = (
        not has_template_with_tool_calls(plant.workspace.tokenizer),
        list_special_tokens(plant.workspace.tokenizer),
        find_structure(plant.workspace.tokenizer),
    )
    job = IngestJob(policy, spool, sha256[:16], path.name, *of_tokenizer)
    told = RowCounts()
    analysed: list[AnalysedChunk] = []
    try:
        with plant.progress.task(f"{path.name}: read, filter, hash") as task:
            for one in pool.map(
                analyse_chunk,
                ((job, *chunk) for chunk in split_rows_into_chunks(read_rows(path, policy.limits), policy)),
            ):
                analysed.append(one)
                told.add_counts(one.row_counts)
                task.advance(len(one.rows))
    except ShardProblem as problem:
        return problem
    if whole:
        _look_in_the_whole(whole(), told, policy, path.name)
    refuse_missing_columns(told, policy.fields, path.name)
    rows = [row for one in analysed for row in one.rows]
    if bad := find_unreadable_rows_problem(rows, policy.limits.max_bad_rows):
        return bad
    if not any(one.undecided for one in analysed):
        return ProcessedShard(rows, None, {}, None, None, told, {})

    decided = decide_document_fates(analysed, index, policy, spool)
    if not any(decided.tasks):
        return ProcessedShard(rows, decided, {}, None, None, told, {})
    tokenizer = load_or_train_tokenizer(plant, policy, decided.tasks, spool, path, other_files)

    if is_small and not tokenizer.is_own:
        pool.start(1)  # the tokenizer is of another maker, so a document may end the process that tokenises it
    by_key = {row.key: row for row in rows}
    finished: dict[str, FinishedDocument] = {}
    with plant.progress.task(f"{path.name}: tokenise", total=sum(map(len, decided.tasks))) as task:

        def train_documents() -> Iterator[TokenizedDocument]:
            calls = ((job, chunk, tasks, tokenizer.folder) for chunk, tasks in enumerate(decided.tasks) if tasks)
            planned = [tasks for tasks in decided.tasks if tasks]
            for tasks, results in zip(planned, pool.map(finish_chunk, calls)):
                for one, result in zip(tasks, results, strict=True):
                    row = by_key[one.key]
                    document = _settle(row, result)
                    finished[row.key] = FinishedDocument(
                        result.place, sampled=result.sampled, trimmed=result.trimmed, content=result.content
                    )
                    if document:
                        yield document
                task.advance(len(tasks))

        token_shard = write_token_shard(
            plant.workspace.shards,
            train_documents(),
            vocab_size=max(policy.tokenizer.vocab_size, tokenizer.vocab_size),
            tokenizer_sha256=tokenizer.sha256,
        )
    if token_shard.manifest["documents"] == 0:
        shutil.rmtree(token_shard.path)
        return ProcessedShard(rows, decided, finished, tokenizer, None, told, {})
    return ProcessedShard(
        rows, decided, finished, tokenizer, token_shard, told, ledger_rows.count_release_blockers(rows, policy.licences)
    )


def _settle(row: Row, result: FinishedDocument) -> TokenizedDocument | None:
    """Set the row's fate. Returns the tokenised document if it is training data, else None."""
    if result.dropped:
        row.fate = ""  # a held-out document may be dropped too, if it does not decode to the same text
        row.drop(*result.dropped, matched=row.matched)
        return None
    row.tokens, row.supervised_tokens = len(result.tokens), int(result.loss_mask.sum())
    if row.fate == "held_out":
        return None
    row.fate, row.trimmed = "train", result.trimmed
    if result.trimmed:
        row.detail = Message(
            "ingest.trimmed",
            "{count:,|character was|characters were} cut out, because they quote a held-out document",
            count=result.trimmed,
        )
    return TokenizedDocument(
        row.key, row.id, row.domain, row.source or "", row.license or "", result.tokens, result.loss_mask
    )


def _look_in_the_whole(rows: Iterator[RawRow], told: RowCounts, policy: DataPolicy, name: str) -> None:
    """Look for mapped columns that this part lacks in the rows of the whole file, until every column is found."""
    with contextlib.suppress(ShardProblem):  # the ingest of the part with the problem reports it
        while find_missing_columns(told, policy.fields) and (row := next(rows, None)) is not None:
            count_row_columns(policy, row, name, told)


def split_rows_into_chunks(raw_rows: Iterator[RawRow], policy: DataPolicy) -> Iterator[tuple[int, int, list[RawRow]]]:
    """Yield (number of the chunk, number of its first row, rows). Raises: ShardProblem for too many rows."""
    chunk, first, size = 0, 0, 0
    rows: list[RawRow] = []
    for raw in raw_rows:
        if rows and (size > _CHUNK_BYTES or len(rows) >= _CHUNK_ROWS):
            yield chunk, first, rows
            chunk, first, size, rows = chunk + 1, first + len(rows), 0, []
        rows.append(raw)
        size += len(raw) if isinstance(raw, bytes) else 0 if isinstance(raw, BadRow) else len(str(raw))
        if first + len(rows) > policy.limits.max_rows:
            raise ShardProblem(
                "ingest.too_many_rows",
                "the file has more than {limit} rows (limits.max_rows in data.yaml): split the file",
                limit=policy.limits.max_rows,
            )
    if rows:
        yield chunk, first, rows


def find_unreadable_rows_problem(rows: Sequence[Row], max_share: float) -> ShardProblem | None:
    """Return the problem of a file with too many unreadable rows; None: the file is usable. ``max_share``: the allowed share of these rows."""
    bad = Counter(row.rule for row in rows if row.rule in UNREADABLE_ROW_RULES)
    share = bad.total() / max(len(rows), 1)
    if share <= max_share and bad.total() < max(len(rows), 1):
        return None
    dropped = {str(rule): count for rule, count in bad.items()}
    example = next(row for row in rows if row.rule in UNREADABLE_ROW_RULES)
    return ShardProblem(
        "ingest.mostly_bad",
        "{share:.0%} of {count} rows cannot be read ({rules}). The first of these rows is row {row}: {why}",
        rows=len(rows),
        dropped=dropped,
        share=share,
        count=len(rows),
        rules=[f"{rule} {count}" for rule, count in bad.most_common()],
        row=example.number,
        why=example.detail,
    )


# -- at the edge -------------------------------------------------------------------------------------------------------
def _identify(path: Path) -> tuple[os.stat_result, str]:
    try:
        if not path.is_file():
            if path.is_dir():
                raise InputError("ingest.folder", "{path} is a folder: give the paths of the files in it", path=path)
            raise InputError("ingest.no_file", "{path}: no such file", path=path)
        return path.stat(), hash_file(path)
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error


def _refuse_changed(path: Path, before: os.stat_result) -> None:
    """Raise InputError if a file has changed since ``before``, or is gone."""
    try:
        if _identity(path.stat()) == _identity(before):
            return
    except FileNotFoundError:
        raise InputError(
            "ingest.file_gone",
            "{path} was moved or removed during the ingest, so nothing of the file was stored",
            path=path,
        ) from None
    raise InputError(
        "ingest.file_changed",
        "{path} changed during the ingest, so nothing of the file was stored. Ingest the file again when it is complete",
        path=path,
    )


def _may_be_readable(plant: Plant, path: Path, sha256: str) -> bool:
    """True if another try may read a quarantined file: its name, the policy or the reading code has changed, or a person asked for a try."""
    sql = f"SELECT kind, detail FROM events WHERE kind IN ('quarantined', '{SHARD_FILED}') AND subject = :subject ORDER BY id DESC"
    events = plant.ledger.read(sql, subject=f"shard:{sha256[:16]}")
    if events and events[0]["detail"].get("read_by") == ASKED:
        return True
    last = next((event["detail"] for event in events if event["kind"] == "quarantined"), None)
    tried = (last["name"], last.get("read_by")) if last else None
    return tried != (path.name, compute_policy_and_code_hash(plant.workspace))


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _copy_to_quarantine(workspace: Workspace, path: Path, sha256: str) -> None:
    target = workspace.quarantine / make_stored_file_name(sha256, path)
    if target.exists() or path.resolve().parent == workspace.quarantine.resolve():
        return
    workspace.quarantine.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.writing")
    shutil.copy2(path, aside)
    rename_into_place(aside, target)  # an incomplete copy would be another shard


def _store(
    tx: sa.Connection,
    ledger: Ledger,
    path: Path,
    size: int,
    sha256: str,
    found: ProcessedShard | ShardProblem,
    parameters: str,
    read_by: str,
) -> None:
    tx.execute(shards.delete().where(shards.c.sha256 == sha256, shards.c.state == "quarantined"))  # of an earlier try
    place = ledger.to_stored_path(path.resolve())
    shard = {"sha256": sha256, "name": path.name, "path": place, "bytes": size, "ingested_at": time.time()}
    if isinstance(found, ShardProblem):
        counts = {"train": 0, "held_out": 0, "dropped": found.dropped, "pii": 0, "pii_kinds": {}, "trimmed": 0}
        tx.execute(
            shards.insert().values(
                **shard, state="quarantined", reason=str(found), rows=found.rows, counts=counts, domains={}, tokens=0
            )
        )
        record_event(
            tx, "quarantined", f"shard:{sha256[:16]}", {"name": path.name, "reason": str(found), "read_by": read_by}
        )
        return
    totals = ledger_rows.summarise_shard_rows(found.rows)
    totals["counts"] |= found.row_notes.to_shard_counts() | (
        {"not_releasable": found.held_back} if found.held_back else {}
    )
    if found.decided and found.decided.licences:
        others = {name or path.name: count for name, count in sorted(found.decided.licences.items())}
        totals["counts"]["other_licences"] = others
        record_event(tx, CONFLICT_EVENT, f"shard:{sha256[:16]}", {"name": path.name, "other_licences": others})
    if found.decided and found.decided.groups:
        totals["counts"]["groups"] = found.decided.groups
    tx.execute(shards.insert().values(**shard, state="ingested", rows=len(found.rows), **totals))
    if tx.execute(sa.select(meta.c.value).where(meta.c.key == PARAMETERS)).scalar() is None:
        tx.execute(meta.insert().values(key=PARAMETERS, value=parameters))
    if found.tokenizer:
        ledger_rows.write_tokenizer(tx, found.tokenizer, ledger.to_stored_path(found.tokenizer.folder))
    if made := found.token_shard:
        counts = {name: made.manifest[name] for name in ("documents", "tokens")}
        about = {
            "shard": sha256,
            "path": ledger.to_stored_path(made.path),
            "tokenizer": made.manifest["tokenizer_sha256"],
        }
        new = token_shards.insert().values(
            id=made.id, **about, **counts, domains=totals["domains"], created_at=time.time()
        )
        tx.execute(new)
    ledger_rows.write_documents(tx, found.rows, sha256, found.token_shard.id if found.token_shard else None)
    if found.decided:
        ledger_rows.write_held_out_rows(tx, found.rows, found.finished)
    record_event(tx, "ingested", f"shard:{sha256[:16]}", {"name": path.name, **totals["counts"]})
