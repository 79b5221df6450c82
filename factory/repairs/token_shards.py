"""Checks token shards and the tokenizer. Makes a token shard again from its raw shard, and restores the tokenizer from a copy.

The ledger lists the documents of each token shard. Their text is processed again as at ingest: it is normalised, redacted, cleaned of n-grams of
documents that were held out at that time, and tokenised. The name of a token shard is the hash of its content, so a new token shard that is not
bit-identical is noticed and refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import sqlalchemy as sa
import yaml

from factory.core.errors import ConfigError, InputError, WorkspaceError
from factory.core.faults import is_temporary_read_failure
from factory.core.path_removal import remove_path
from factory.core.workspace import Workspace
from factory.ingest.chain import split_rows_into_chunks
from factory.ingest.decisions import COPY_OF_BARRED
from factory.ingest.document import Row, make_comparison_text
from factory.ingest.hash_index import (
    HELD,
    HashedDocument,
    HashIndex,
    get_hashes_path,
    make_key_prefix,
    read_hashes,
    write_hashes,
)
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules import contamination
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.rules.word_hashes import Hashes, hash_words
from factory.ingest.task_hashes import record_task_ngrams
from factory.ingest.tokenizer import FILES as TOKENIZER_FILES
from factory.ingest.tokenizer import (
    Tokenizer,
    find_structure,
    has_template_with_tool_calls,
    list_special_tokens,
    write_stated_ids,
)
from factory.ingest.worker import (
    DocumentToFinish,
    FinishedDocument,
    IngestJob,
    analyse_chunk,
    finish_chunk,
    read_spooled_ngrams,
)
from factory.ledger.journal import list_backups
from factory.ledger.ledger import Ledger, record_event, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.removals import read_erased_shards
from factory.training.segment_folder import move_to_set_aside_folder
from kernels.contract.files import rename_into_place, write_atomically
from kernels.contract.message import Message
from trainer.contract.data.document_columns import FILE as COLUMNS
from trainer.contract.data.document_columns import is_same_as_documents
from trainer.contract.data.token_shard import FILES, TokenizedDocument, TokenShard, hash_file, write_token_shard
from trainer.contract.errors import TokenShardError

TOKENS_FILE = "tokens.bin"


def find_token_shard_damage(path: Path, deep: bool) -> str:
    """Describe the damage of a token shard; '' without damage. The tokens are hashed only with ``deep``. All other files are always hashed.

    Raises: TokenShardError, OSError when a fault of the machine prevents reading.
    """
    shard = TokenShard(path)
    try:
        manifest = shard.manifest
        for name in FILES:
            file = path / name
            if not file.is_file():
                return _missing(file)
            if name == TOKENS_FILE and not deep:
                expected = manifest["tokens"] * np.dtype(manifest["dtype"]).itemsize
                if file.stat().st_size != expected:
                    return Message(
                        "token_shards.wrong_size",
                        "{path} has {size:,} bytes, but should have {expected:,}",
                        path=file,
                        size=file.stat().st_size,
                        expected=expected,
                    )
            elif hash_file(file) != manifest["files"][name]:
                return Message(
                    "token_shards.other_hash",
                    "{path} is damaged: its SHA-256 differs from the one in the manifest",
                    path=file,
                )
    except TokenShardError as error:
        if is_temporary_read_failure(error):
            raise
        return Message.from_json(getattr(error, "message", str(error))) if path.exists() else _missing(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if is_temporary_read_failure(error):
            raise
        return Message("token_shards.unreadable", "{path} cannot be read: {why}", path=path, why=str(error))
    return ""


def _missing(path: Path) -> Message:
    return Message("token_shards.missing", "{path} is missing", path=path)


class VerifiedShardRecord:
    """Notes, in ``cache/hashed.json``, the sizes and times that the files of a token shard had when their hashes were last found correct.

    A file with the noted size and times counts as unchanged, so the start of a segment hashes only new and changed files. A disk that corrupts a
    file does not change its times. ``factory check`` finds such damage: it hashes a few files of each kind, and all with ``--deep``.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.file = workspace.root / "cache" / "hashed.json"
        try:
            noted = json.loads(self.file.read_text())
        except (OSError, ValueError):  # missing or damaged: all files are hashed again
            noted = {}
        self.known: dict[str, list[list[int]]] = noted if isinstance(noted, dict) else {}

    def is_unchanged(self, folder: Path) -> bool:
        """Return whether a token shard's files have the noted sizes and times."""
        return self.known.get(folder.name) == _times(folder)

    def has_unchanged_columns(self, folder: Path) -> bool:
        """Return whether a token shard's ``columns.arrow`` has the noted size and times."""
        return self.known.get(f"{folder.name}/{COLUMNS}", []) == _times(folder, [COLUMNS]) != []

    def record_verified_shards(self, folders: Iterable[Path]) -> None:
        """Note the sizes and times of token shards whose hashes were found correct."""
        self._note({folder.name: _times(folder) for folder in folders})

    def record_columns(self, folders: Iterable[Path]) -> None:
        """Note the size and times of ``columns.arrow`` of token shards where it was compared with ``documents.parquet``."""
        self._note({f"{folder.name}/{COLUMNS}": _times(folder, [COLUMNS]) for folder in folders})

    def _note(self, new: dict[str, list[list[int]]]) -> None:
        if any(self.known.get(name) != times for name, times in new.items()):
            self.known |= new
            self.file.parent.mkdir(exist_ok=True)
            write_atomically(self.file, json.dumps(self.known))


def remake_wrong_columns(folders: Iterable[Path]) -> list[str]:
    """Compare ``columns.arrow`` of token shards with ``documents.parquet``. Where it differs or is missing, it is made again.

    Returns the ids of the shards whose file differed. Raises: TokenShardError, OSError.
    """
    wrong = []
    for folder in folders:
        if (folder / COLUMNS).exists() and not is_same_as_documents(folder, TokenShard(folder).manifest):
            (folder / COLUMNS).unlink()
            wrong.append(folder.name)
        _ = TokenShard(folder).columns
    return wrong


def _times(folder: Path, names: Iterable[str] = ("manifest.json", *FILES)) -> list[list[int]]:
    """Return [size, mtime, ctime, inode] of each file; [] if a file is missing."""
    found = []
    for name in names:
        try:
            status = os.stat(folder / name)
        except OSError:
            return []
        found.append([status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return found


def find_raw_shard(plant: Plant, sha256: str) -> tuple[Path | None, str]:
    """Return the path of a shard's raw file (None if it is missing) and the name that the file had when it arrived."""
    row = plant.ledger.read("SELECT name, path FROM shards WHERE sha256 = :sha256", sha256=sha256)[0]
    folders = (plant.workspace.shards / "raw", plant.workspace.quarantine, plant.workspace.inbox)
    places = [Path(row["path"]), *(path for folder in folders for path in folder.glob(f"{sha256[:16]}-*"))]
    return next((path for path in places if path.is_file()), None), row["name"]


def rebuild_token_shard(plant: Plant, number: str) -> str:
    """Make a token shard again from its raw shard. Returns why this is impossible, or ''. The damaged token shard is set aside."""
    row = plant.ledger.read("SELECT shard, path FROM token_shards WHERE id = :id", id=number)[0]
    # If text of the shard was erased, the raw file has changed and gives other tokens.
    erased = read_erased_shards(plant.ledger).get(row["shard"])
    expected = erased["token_shards"].get(number, {}).get("content", number) if erased else number
    raw, why = _whole_raw(plant, row["shard"])
    if raw is None:
        return why
    found: list[str] = []
    for policy, aside, name in _asides(plant, row["shard"], raw):
        tokenizer = Tokenizer.load(plant.workspace.tokenizer)
        try:
            documents = _documents(plant, policy, aside, name, row["shard"], number)
            if erased:
                documents = _with_erased(plant.ledger, number, erased, documents)
            made = write_token_shard(
                aside,
                documents,
                vocab_size=max(policy.tokenizer.vocab_size, tokenizer.vocab_size),
                tokenizer_sha256=tokenizer.sha256,
            )
        # If the only document of a raw file was erased, the file is empty, and no token shard can be made from it.
        except ShardProblem as problem:
            return _unreadable_raw(raw, problem)
        found.append(made.id)
        if made.id == expected:
            place = Path(row["path"])
            if place.exists():
                move_to_set_aside_folder(plant.workspace.root, place)
            rename_into_place(made.path, place)
            with plant.ledger.begin() as tx:
                record_event(
                    tx, "token_shard_rebuilt", f"token_shard:{number}", {"from": plant.ledger.to_stored_path(raw)}
                )
            return ""
    return Message(
        "token_shards.differs",
        "the token shard made from {raw} ({found}) differs from the recorded token shard, because "
        "policies/data.yaml, the tokenizer or the factory has changed. Undo that change, then repair again",
        raw=raw.name,
        found=found,
    )


def _unreadable_raw(raw: Path, problem: ShardProblem) -> Message:
    why = getattr(problem, "message", str(problem))
    return Message("token_shards.unreadable_raw_shard", "{path} cannot be read: {why}", path=raw, why=why)


def rebuild_document_hashes(plant: Plant, subject: str) -> str:
    """Make a file with hashes of documents again (``factory.ingest.hash_index``). Returns why this is impossible, or ''.

    An undamaged copy in a backup is used if there is one. Otherwise the new file has all n-grams of each held-out document, also those that were
    common at ingest, and no n-grams of erased documents. The damaged file is set aside.
    """
    file = get_hashes_path(plant.workspace.root, subject)
    if file.exists():
        move_to_set_aside_folder(plant.workspace.root, file)
    make = _hashes_of_shard if subject.startswith("shard:") else _hashes_of_task
    why = "" if _hashes_from_backup(plant, subject) else make(plant, subject)
    if not why:
        HashIndex(plant.ledger).delete_index_files()
    return why


def _hashes_from_backup(plant: Plant, subject: str) -> bool:
    """Restore the file from a backup whose copy lists the same documents as the ledger. Returns whether there was such a copy."""
    for backup in reversed(list_backups(plant.workspace.root)):
        try:
            found = read_hashes(backup, subject).select(["key", "held_out"]).to_pylist()
        except WorkspaceError:
            continue
        if subject.startswith("shard:"):
            shard, wanted = _hashed_rows(plant, subject)
            erased = {
                f"{shard[:16]}:{row}" for row in read_erased_shards(plant.ledger).get(shard, {"rows": []})["rows"]
            }
            listed = {row["key"]: row["held_out"] for row in found if row["key"] not in erased}
            if listed != {key: bool(row["is_held"]) for key, row in wanted.items()}:
                continue
        file = get_hashes_path(plant.workspace.root, subject)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, get_hashes_path(backup, subject).read_bytes())
        return True
    return False


def _hashes_of_task(plant: Plant, subject: str) -> str:
    record_task_ngrams(plant, DataPolicy.load(plant.workspace.policy_path("data.yaml")).decontamination.ngram)
    try:
        read_hashes(plant.workspace.root, subject)
    except WorkspaceError:
        return Message(
            "token_shards.no_task_items",
            "the file with the task's items is missing in policies/tasks: copy the file into this folder again",
        )
    return ""


def _hashes_of_shard(plant: Plant, subject: str) -> str:
    shard, wanted = _hashed_rows(plant, subject)
    if not wanted:  # the only document of the file was erased: the file is empty, and no reader accepts it
        write_hashes(plant.workspace.root, subject, ())
        return ""
    trained = {key for key, row in wanted.items() if row["token_shard"]}
    raw, why = _whole_raw(plant, shard)
    if raw is None:
        return why
    for policy, aside, name in _asides(plant, shard, raw):
        made = {}
        try:
            for row, signature, grams, done in _again(plant, policy, aside, name, shard, trained):
                if (then := wanted.get(row.key)) is None:
                    continue
                if row.content_sha256 != then["content_sha256"] or done.dropped:
                    break
                kept = done.sampled if row.key in trained else np.unique(grams) if then["is_held"] else grams[:0]
                made[row.key] = HashedDocument(row.key, signature, kept, bool(then["is_held"]))
        except ShardProblem as problem:
            return _unreadable_raw(raw, problem)
        if made.keys() == wanted.keys():
            write_hashes(plant.workspace.root, subject, (made[key] for key in wanted))
            return ""
    return Message(
        "token_shards.read_differently",
        "the documents that are now read from {path} differ from the recorded documents, because policies/data.yaml or "
        "the factory has changed. Undo that change, then repair again",
        path=raw,
    )


def _hashed_rows(plant: Plant, subject: str) -> tuple[str, dict[str, Any]]:
    """Return a shard's SHA-256 and, by key and in order, the document rows that its file of hashes must have. Erased documents are left out."""
    of = f"{make_key_prefix(subject)}%"
    shard: str = plant.ledger.read("SELECT sha256 FROM shards WHERE sha256 LIKE :of", of=of)[0]["sha256"]
    sql = (
        'SELECT "key", row, content_sha256, token_shard, "key" IN (SELECT "key" FROM held_out) AS is_held FROM documents '
        "WHERE shard = :shard AND (fate <> 'dropped' OR (rule = 'licence' AND content_sha256 IS NOT NULL AND detail NOT LIKE :copy)) "
        "ORDER BY fate = 'dropped', row"
    )
    rows = plant.ledger.read(sql, shard=shard, copy=f"%{COPY_OF_BARRED}%")
    erased = set(read_erased_shards(plant.ledger).get(shard, {"rows": []})["rows"])
    return shard, {row["key"]: row for row in rows if row["row"] not in erased}


def _whole_raw(plant: Plant, shard: str) -> tuple[Path | None, str]:
    """Return (raw file of a shard, ''), or (None, why there is no unchanged raw file)."""
    raw, name = find_raw_shard(plant, shard)
    if raw is None:
        return None, Message(
            "token_shards.no_raw_shard",
            "the repair needs the raw shard {shard}, which is missing: copy this file into {folder} again",
            shard=name,
            folder=plant.workspace.shards / "raw",
        )
    erased = read_erased_shards(plant.ledger).get(shard)
    if hash_file(raw) != ((erased and erased["raw"]) or shard):
        return None, Message(
            "token_shards.other_raw_shard",
            "{path} is not the original raw shard: copy the original file ({shard}) to this path again",
            path=raw,
            shard=name,
        )
    return raw, ""


def _asides(plant: Plant, shard: str, raw: Path) -> Iterator[tuple[DataPolicy, Path, str]]:
    """Yield (policy, folder, name) for each data policy that may have been in force at ingest.

    The folder contains the raw file under its original name, which selects the reader.
    """
    _, name = find_raw_shard(plant, shard)
    aside = plant.workspace.shards / f".again-{os.getpid()}"
    for policy in _policies(plant.workspace):
        remove_path(aside)
        (aside / "spool").mkdir(parents=True)
        try:
            (aside / name).symlink_to(raw.resolve())
            yield policy, aside, name
        finally:
            remove_path(aside)


def _policies(workspace: Workspace) -> Iterator[DataPolicy]:
    """Yield the present data policy, then those of backups, newest first: the policy may have changed since the ingest."""
    seen = set()
    for path in [
        workspace.policy_path("data.yaml"),
        *(backup / "policies" / "data.yaml" for backup in reversed(list_backups(workspace.root))),
    ]:
        if path.is_file() and (digest := hashlib.sha256(path.read_bytes()).hexdigest()) not in seen:
            seen.add(digest)
            try:
                yield DataPolicy.load(path)
            except (ConfigError, yaml.YAMLError):
                continue


def _documents(
    plant: Plant, policy: DataPolicy, folder: Path, name: str, shard: str, token_shard: str
) -> Iterator[TokenizedDocument]:
    """Yield the documents of a token shard, in its order."""
    erased = read_erased_shards(plant.ledger).get(shard, {"rows": []})["rows"]
    wanted = {
        row["key"]
        for row in plant.ledger.read('SELECT "key" FROM documents WHERE token_shard = :number', number=token_shard)
    } - {f"{shard[:16]}:{row}" for row in erased}
    for row, _, _, one in _again(plant, policy, folder, name, shard, wanted):
        if row.key in wanted and not one.dropped:
            yield TokenizedDocument(
                row.key, row.id, row.domain, row.source or "", row.license or "", one.tokens, one.loss_mask
            )


def _again(
    plant: Plant, policy: DataPolicy, folder: Path, name: str, shard: str, trained: Collection[str]
) -> Iterator[tuple[Row, npt.NDArray[np.uint32], Hashes, FinishedDocument]]:
    """Yield (row, signature, n-grams, finished document) for each readable row of a shard. Rows with a key in ``trained`` are tokenised."""
    of_tokenizer = (
        not has_template_with_tool_calls(plant.workspace.tokenizer),
        list_special_tokens(plant.workspace.tokenizer),
        find_structure(plant.workspace.tokenizer),
    )
    job = IngestJob(policy, folder / "spool", shard[:16], name, *of_tokenizer)
    known = _held_out_then(plant, shard, policy.decontamination.ngram)
    with plant.progress.task(f"{name}: tokenise again", total=len(trained)) as task:
        for chunk in split_rows_into_chunks(read_rows(folder / name, policy.limits), policy):
            analysed = analyse_chunk(job, *chunk)
            alive = [analysed.rows[at] for at in analysed.undecided]
            every = read_spooled_ngrams(job.spool, analysed)
            tasks = []
            for place, grams in enumerate(every):
                if alive[place].key in trained:
                    cuts = contamination.merge_spans(known.find_collisions(grams), policy.decontamination.ngram)
                    tasks.append(DocumentToFinish(place, alive[place].key, False, cuts))
            done = (
                {one.place: one for one in finish_chunk(job, chunk[0], tasks, plant.workspace.tokenizer)}
                if tasks
                else {}
            )
            for place, grams in enumerate(every):
                yield alive[place], analysed.signatures[place], grams, done.get(place, FinishedDocument(place))
            task.advance(len(tasks))


def _with_erased(
    ledger: Ledger, number: str, erased: Mapping[str, Any], others: Iterator[TokenizedDocument]
) -> Iterator[TokenizedDocument]:
    """Yield the documents of a token shard in the order of their rows, with the erased documents among them."""
    about = erased["token_shards"].get(number, {"fill": 0, "masks": {}})
    rows = set(erased["rows"])
    blank = [
        row
        for row in ledger.read("SELECT * FROM documents WHERE token_shard = :id ORDER BY row", id=number)
        if row["row"] in rows
    ]

    def before(row: float) -> Iterator[TokenizedDocument]:
        while blank and blank[0]["row"] < row:
            one = blank.pop(0)
            tokens = np.full(one["tokens"], about["fill"], np.uint32)
            runs = about["masks"].get(
                one["key"], [0, one["tokens"]]
            )  # alternating run lengths: tokens without loss, with loss, without …
            mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
            own = [one["domain"], one["source"] or "", one["license"] or ""]
            # The labels at ingest: a person may have changed them later.
            domain, source, licence = about.get("labels", {}).get(one["key"], own)
            yield TokenizedDocument(one["key"], one["id"], domain, source, licence, tokens, mask)

    for document in others:
        yield from before(int(document.key.partition(":")[2]))
        yield document
    yield from before(float("inf"))


def _held_out_then(plant: Plant, shard: str, n: int) -> contamination.HeldOutNgrams:
    """Return the n-grams that were held out when a shard was ingested: those of held-out documents up to that shard, and of the tasks' items."""
    before = plant.ledger.read(  # ordered by event, since the clock may have gone back
        "SELECT DISTINCT subject FROM events WHERE kind IN ('ingested', :held) AND id <= "
        "(SELECT MIN(id) FROM events WHERE kind = 'ingested' AND subject = :shard)",
        shard=f"shard:{shard[:16]}",
        held=HELD,
    )
    return contamination.HeldOutNgrams.build(one for row in before for one in _held_out_of(plant, row["subject"], n))


def _held_out_of(plant: Plant, subject: str, n: int) -> Iterator[tuple[str, Hashes]]:
    """Yield (key, n-grams) of each held-out document of a shard: the recorded n-grams, or all n-grams if the record is lost."""
    try:
        table = read_hashes(plant.workspace.root, subject)
    except WorkspaceError:
        sql = 'SELECT "key", content FROM held_out WHERE "key" LIKE :of'
        for row in plant.ledger.read(sql, of=f"{make_key_prefix(subject)}:%"):
            yield row["key"], np.unique(contamination.hash_ngrams(hash_words(make_comparison_text(row["content"])), n))
    else:
        for row in table.filter(pc.field("held_out")).to_pylist():
            yield row["key"], np.array(row["grams"], np.uint64)


NAMED = "tokenizer.json"  # the ledger has the hash of this file


def find_tokenizer_damage(plant: Plant) -> str:
    """Describe the damage of the recorded tokenizer; '' without damage, and before the first ingest."""
    recorded = plant.ledger.select_first(sa.select(tokenizers))
    return _fault(plant.workspace.tokenizer, recorded["sha256"]) if recorded else ""


def restore_tokenizer(plant: Plant) -> str:
    """Copy the recorded tokenizer from a backup or an export. Returns why this is impossible, or ''. A damaged tokenizer is set aside."""
    recorded = plant.ledger.select_first(sa.select(tokenizers))
    assert recorded
    exports = sorted(plant.workspace.exports.glob("segment-*"), reverse=True)
    kept = [*(path / "tokenizer" for path in reversed(list_backups(plant.workspace.root))), *exports]
    good = next((path for path in kept if not _fault(path, recorded["sha256"])), None)
    if good is None:
        return Message(
            "token_shards.no_tokenizer_copy",
            "no backup and no export has the tokenizer: copy its files into {folder} again",
            folder=plant.workspace.tokenizer,
        )
    aside = plant.workspace.root / f".{plant.workspace.tokenizer.name}.writing"
    remove_path(aside)
    aside.mkdir()
    for name in TOKENIZER_FILES:
        if (good / name).exists():
            shutil.copyfile(good / name, aside / name)
    if recorded["sha256"] != hash_file(good / NAMED):  # a foreign tokenizer, whose ids a file of the export states
        write_stated_ids(Tokenizer.load(good), aside)
    if plant.workspace.tokenizer.exists():
        move_to_set_aside_folder(plant.workspace.root, plant.workspace.tokenizer)
    rename_into_place(aside, plant.workspace.tokenizer)
    with plant.ledger.begin() as tx:
        record_event(tx, "tokenizer_restored", "tokenizer", {"from": plant.ledger.to_stored_path(good)})
    return ""


def _fault(folder: Path, sha256: str) -> str:
    with contextlib.suppress(InputError):  # for files that cannot be loaded, what follows says why
        found = Tokenizer.load(folder)
        if not found.is_own:  # its hash is of all files
            return "" if found.sha256 == sha256 else _other_tokenizer(folder / NAMED)
    for name in TOKENIZER_FILES:
        path = folder / name
        try:
            if name == NAMED and hash_file(path) != sha256:
                return _other_tokenizer(path)
            if path.suffix == ".json" and name != NAMED:
                json.loads(path.read_bytes())
            elif not path.read_bytes():
                return Message("token_shards.empty_file", "{path} is empty", path=path)
        except OSError as error:
            return Message("token_shards.file_error", "{path}: {why}", path=path, why=error.strerror)
        except ValueError as error:
            return Message("token_shards.damaged", "{path} is damaged: {why}", path=path, why=str(error))
    return ""


def _other_tokenizer(path: Path) -> Message:
    return Message(
        "token_shards.other_tokenizer", "{path} is not the recorded tokenizer: its SHA-256 differs", path=path
    )
