"""Token shards and the tokenizer: what is wrong with one, and how it is made again from its raw shard, or brought back from a copy.

The ledger says which documents of the raw shard a token shard holds. Their text goes the same way again as at ingest (normalise, redact, cut
out what was held out then, tokenise), and the name of a token shard is the hash of its content: what is made again is the same to the
bit, or it is refused.
"""

from __future__ import annotations

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

from factory.core.errors import ConfigError, WorkspaceError
from factory.core.faults import cannot_be_read_now
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.ingest.chain import chunks
from factory.ingest.compared import HELD, HashedDocument, HashIndex, hashes_file, prefix_of, read_hashes, write_hashes
from factory.ingest.decide import COPY_OF_BARRED
from factory.ingest.document import Row, compared
from factory.ingest.held_tasks import hold_task_items
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules import decontaminate
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.rules.words import Hashes, word_hashes
from factory.ingest.tokenizer import FILES as TOKENIZER_FILES
from factory.ingest.tokenizer import Tokenizer, shows_calls
from factory.ingest.worker import Finished, FinishTask, IngestJob, analyse, finish, spool_ngrams
from factory.ledger.journal import backups_of
from factory.ledger.ledger import Ledger, record, tokenizers
from factory.ledger.plant import Plant
from factory.ledger.removals import erased_shards
from factory.training.segment_folder import set_aside
from kernels.contract.files import put_in_place, write_atomically
from trainer.contract.data.token_shard import FILES, TokenizedDocument, TokenShard, file_sha256, write_token_shard
from trainer.contract.errors import TokenShardError

LONG_FILE = "tokens.bin"


def token_shard_fault(path: Path, deep: bool) -> str:
    """What is wrong with a token shard, or nothing. Tokens are hashed only with ``deep``; all else is, always.

    Raises: TokenShardError, OSError where nothing can be read now.
    """
    shard = TokenShard(path)
    try:
        manifest = shard.manifest
        for name in FILES:
            file = path / name
            if not file.is_file():
                return f"{file} is gone"
            if name == LONG_FILE and not deep:
                expected = manifest["tokens"] * np.dtype(manifest["dtype"]).itemsize
                if file.stat().st_size != expected:
                    return f"{file} has {file.stat().st_size} bytes, and not {expected}"
            elif file_sha256(file) != manifest["files"][name]:
                return f"{file} is damaged: its SHA-256 is not the one in the manifest"
    except TokenShardError as error:
        if cannot_be_read_now(error):
            raise
        return str(error) if path.exists() else f"{path} is gone"
    except (OSError, ValueError, KeyError, TypeError) as error:
        if cannot_be_read_now(error):
            raise
        return f"{path}: {error}"
    return ""


class HashedShards:
    """How the files of each token shard were when they were last hashed and found whole: a note in ``cache/hashed.json``.

    A file whose size and times are the same is taken to be the same, so that a segment's start hashes what is new or was touched, not the
    corpus. What a disk changes by itself leaves no trace there: ``factory check`` finds it, which hashes a few of all and, with ``--deep``, all.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.file = workspace.root / "cache" / "hashed.json"
        try:
            noted = json.loads(self.file.read_text())
        except (OSError, ValueError):  # none yet, or damaged: all is hashed again
            noted = {}
        self.known: dict[str, list[list[int]]] = noted if isinstance(noted, dict) else {}

    def same(self, folder: Path) -> bool:
        return self.known.get(folder.name) == _times(folder)

    def note(self, folders: Iterable[Path]) -> None:
        new = {folder.name: _times(folder) for folder in folders}
        if any(self.known.get(name) != times for name, times in new.items()):
            self.known |= new
            self.file.parent.mkdir(exist_ok=True)
            write_atomically(self.file, json.dumps(self.known))


def _times(folder: Path) -> list[list[int]]:
    """(bytes, last change of the content, last change at all, inode) of each file; [] of one that is gone."""
    found = []
    for name in ("manifest.json", *FILES):
        try:
            status = os.stat(folder / name)
        except OSError:
            return []
        found.append([status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return found


def raw_shard(plant: Plant, sha256: str) -> tuple[Path | None, str]:
    """(the file that a shard arrived as, where it lies now, the name it had). None: it is gone."""
    row = plant.ledger.read("SELECT name, path FROM shards WHERE sha256 = :sha256", sha256=sha256)[0]
    folders = (plant.workspace.shards / "raw", plant.workspace.quarantine, plant.workspace.inbox)
    places = [Path(row["path"]), *(path for folder in folders for path in folder.glob(f"{sha256[:16]}-*"))]
    return next((path for path in places if path.is_file()), None), row["name"]


def rebuild_token_shard(plant: Plant, number: str) -> str:
    """Make a token shard again from its raw shard; returns why it cannot be, or nothing. What is damaged is set aside."""
    row = plant.ledger.read("SELECT shard, path FROM token_shards WHERE id = :id", id=number)[0]
    # Then another file is there, and other tokens are made of it.
    erased = erased_shards(plant.ledger).get(row["shard"])
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
        # A file of one document that was erased is empty, and its token shard not made again.
        except ShardProblem as problem:
            return f"{raw} cannot be read: {problem}"
        found.append(made.id)
        if made.id == expected:
            place = Path(row["path"])
            if place.exists():
                set_aside(plant.workspace.root, place)
            put_in_place(made.path, place)
            with plant.ledger.begin() as tx:
                record(tx, "token_shard_rebuilt", f"token_shard:{number}", {"from": plant.ledger.inside(raw)})
            return ""
    return (
        f"made again from {raw.name} it is another one ({', '.join(found)}): policies/data.yaml, the tokenizer or this program changed since; "
        "put the old policy back, then repair again"
    )


def rebuild_hashes(plant: Plant, subject: str) -> str:
    """Make the file again that later documents are compared with (``factory.ingest.compared``); returns why it cannot be, or nothing.

    A backup's copy is taken where one is whole. Without, of a held-out document all n-grams come back, with phrases that were common when it was
    chosen, and nothing of a document whose text was erased. What is damaged is set aside.
    """
    file = hashes_file(plant.workspace.root, subject)
    if file.exists():
        set_aside(plant.workspace.root, file)
    make = _hashes_of_shard if subject.startswith("shard:") else _hashes_of_task
    why = "" if _hashes_from_backup(plant, subject) else make(plant, subject)
    if not why:
        HashIndex(plant.ledger).remove()
    return why


def _hashes_from_backup(plant: Plant, subject: str) -> bool:
    """Was the copy of a backup put back? One that does not hold what the ledger names is of another ingest, before a restore."""
    for backup in reversed(backups_of(plant.workspace.root)):
        try:
            found = read_hashes(backup, subject).select(["key", "held_out"]).to_pylist()
        except WorkspaceError:
            continue
        if subject.startswith("shard:"):
            shard, wanted = _hashed_rows(plant, subject)
            erased = {f"{shard[:16]}:{row}" for row in erased_shards(plant.ledger).get(shard, {"rows": []})["rows"]}
            listed = {row["key"]: row["held_out"] for row in found if row["key"] not in erased}
            if listed != {key: bool(row["is_held"]) for key, row in wanted.items()}:
                continue
        file = hashes_file(plant.workspace.root, subject)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, hashes_file(backup, subject).read_bytes())
        return True
    return False


def _hashes_of_task(plant: Plant, subject: str) -> str:
    hold_task_items(plant, DataPolicy.load(plant.workspace.policy("data.yaml")).decontamination.ngram)
    try:
        read_hashes(plant.workspace.root, subject)
    except WorkspaceError:
        return "the file with its items is gone from policies/tasks: put it there again"
    return ""


def _hashes_of_shard(plant: Plant, subject: str) -> str:
    shard, wanted = _hashed_rows(plant, subject)
    if not wanted:  # the file of one document that was erased is empty, and no reader takes it
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
            return f"{raw} cannot be read: {problem}"
        if made.keys() == wanted.keys():
            write_hashes(plant.workspace.root, subject, (made[key] for key in wanted))
            return ""
    return f"{raw} is read otherwise now: policies/data.yaml or this program changed since; put the old policy back, then repair again"


def _hashed_rows(plant: Plant, subject: str) -> tuple[str, dict[str, Any]]:
    """(a shard's SHA-256, by key the rows that its ingest wrote, in that order), without those whose text was erased (``store.hashed``)."""
    of = f"{prefix_of(subject)}%"
    shard: str = plant.ledger.read("SELECT sha256 FROM shards WHERE sha256 LIKE :of", of=of)[0]["sha256"]
    sql = (
        'SELECT "key", row, content_sha256, token_shard, "key" IN (SELECT "key" FROM held_out) AS is_held FROM documents '
        "WHERE shard = :shard AND (fate <> 'dropped' OR (rule = 'licence' AND content_sha256 IS NOT NULL AND detail NOT LIKE :copy)) "
        "ORDER BY fate = 'dropped', row"
    )
    rows = plant.ledger.read(sql, shard=shard, copy=f"%{COPY_OF_BARRED}%")
    erased = set(erased_shards(plant.ledger).get(shard, {"rows": []})["rows"])
    return shard, {row["key"]: row for row in rows if row["row"] not in erased}


def _whole_raw(plant: Plant, shard: str) -> tuple[Path | None, str]:
    """(a shard's file, why there is none that is as it was)."""
    raw, name = raw_shard(plant, shard)
    if raw is None:
        return (
            None,
            f"shard {name}, which it was made of, is gone too: put that file into {plant.workspace.shards / 'raw'} again",
        )
    erased = erased_shards(plant.ledger).get(shard)
    if file_sha256(raw) != ((erased and erased["raw"]) or shard):
        return None, f"{raw} is not the file that it was made of: put that file ({name}) there again"
    return raw, ""


def _asides(plant: Plant, shard: str, raw: Path) -> Iterator[tuple[DataPolicy, Path, str]]:
    """For each policy that may have been in force: a folder in which the shard's file lies under its name, which says how it is read."""
    _, name = raw_shard(plant, shard)
    aside = plant.workspace.shards / f".again-{os.getpid()}"
    for policy in _policies(plant.workspace):
        remove(aside)
        (aside / "spool").mkdir(parents=True)
        try:
            (aside / name).symlink_to(raw.resolve())
            yield policy, aside, name
        finally:
            remove(aside)


def _policies(workspace: Workspace) -> Iterator[DataPolicy]:
    """The data policy in force, then those of backups, newest first: it may have changed since the ingest."""
    seen = set()
    for path in [
        workspace.policy("data.yaml"),
        *(backup / "policies" / "data.yaml" for backup in reversed(backups_of(workspace.root))),
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
    """The documents of a token shard, in its order."""
    erased = erased_shards(plant.ledger).get(shard, {"rows": []})["rows"]
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
) -> Iterator[tuple[Row, npt.NDArray[np.uint32], Hashes, Finished]]:
    """(row, signature, n-grams, what it became) of each row of a shard that can be read; ``trained``: keys of those that are tokenised."""
    job = IngestJob(policy, folder / "spool", shard[:16], name, not shows_calls(plant.workspace.tokenizer))
    known = _held_out_then(plant, shard, policy.decontamination.ngram)
    with plant.progress.task(f"{name}: tokenise again", total=len(trained)) as task:
        for chunk in chunks(read_rows(folder / name, policy.limits), policy):
            analysed = analyse(job, *chunk)
            alive = [analysed.rows[at] for at in analysed.alive]
            every = spool_ngrams(job.spool, analysed)
            tasks = []
            for place, grams in enumerate(every):
                if alive[place].key in trained:
                    cuts = decontaminate.spans(known.find(grams), policy.decontamination.ngram)
                    tasks.append(FinishTask(place, alive[place].key, False, cuts))
            done = {one.place: one for one in finish(job, chunk[0], tasks, plant.workspace.tokenizer)} if tasks else {}
            for place, grams in enumerate(every):
                yield alive[place], analysed.signatures[place], grams, done.get(place, Finished(place))
            task.advance(len(tasks))


def _with_erased(
    ledger: Ledger, number: str, erased: Mapping[str, Any], others: Iterator[TokenizedDocument]
) -> Iterator[TokenizedDocument]:
    """The documents of a token shard with those whose text was erased, in the order of their rows."""
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
            runs = about["masks"].get(one["key"], [0, one["tokens"]])  # without loss, with loss, without …
            mask = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
            own = [one["domain"], one["source"] or "", one["license"] or ""]
            # A person may have given it others since.
            domain, source, licence = about.get("labels", {}).get(one["key"], own)
            yield TokenizedDocument(one["key"], one["id"], domain, source, licence, tokens, mask)

    for document in others:
        yield from before(int(document.key.partition(":")[2]))
        yield document
    yield from before(float("inf"))


def _held_out_then(plant: Plant, shard: str, n: int) -> decontaminate.HeldOutNgrams:
    """What was held out when a shard was ingested, by itself and by those before it, and the tasks' items that were there."""
    before = plant.ledger.read(  # by the order of events: a clock may have gone back
        "SELECT DISTINCT subject FROM events WHERE kind IN ('ingested', :held) AND id <= "
        "(SELECT MIN(id) FROM events WHERE kind = 'ingested' AND subject = :shard)",
        shard=f"shard:{shard[:16]}",
        held=HELD,
    )
    return decontaminate.HeldOutNgrams.of(one for row in before for one in _held_out_of(plant, row["subject"], n))


def _held_out_of(plant: Plant, subject: str, n: int) -> Iterator[tuple[str, Hashes]]:
    """(key, n-grams) of a shard's held-out documents: all that they have, where what was recorded is lost."""
    try:
        table = read_hashes(plant.workspace.root, subject)
    except WorkspaceError:
        sql = 'SELECT "key", content FROM held_out WHERE "key" LIKE :of'
        for row in plant.ledger.read(sql, of=f"{prefix_of(subject)}:%"):
            yield row["key"], np.unique(decontaminate.ngrams(word_hashes(compared(row["content"])), n))
    else:
        for row in table.filter(pc.field("held_out")).to_pylist():
            yield row["key"], np.array(row["grams"], np.uint64)


NAMED = "tokenizer.json"  # the file whose hash the ledger has


def tokenizer_fault(plant: Plant) -> str:
    """What is wrong with the tokenizer that the ledger recorded, or nothing; none is recorded before the first ingest."""
    recorded = plant.ledger.one(sa.select(tokenizers))
    return _fault(plant.workspace.tokenizer, recorded["sha256"]) if recorded else ""


def bring_back_tokenizer(plant: Plant) -> str:
    """Copy the recorded tokenizer from a backup or an export; returns why it cannot be, or nothing. What is damaged is set aside."""
    recorded = plant.ledger.one(sa.select(tokenizers))
    assert recorded
    exports = sorted(plant.workspace.exports.glob("segment-*"), reverse=True)
    kept = [*(path / "tokenizer" for path in reversed(backups_of(plant.workspace.root))), *exports]
    good = next((path for path in kept if not _fault(path, recorded["sha256"])), None)
    if good is None:
        return f"no backup and no export holds it: put its files into {plant.workspace.tokenizer} again"
    aside = plant.workspace.root / f".{plant.workspace.tokenizer.name}.writing"
    remove(aside)
    aside.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(good / name, aside / name)
    if plant.workspace.tokenizer.exists():
        set_aside(plant.workspace.root, plant.workspace.tokenizer)
    put_in_place(aside, plant.workspace.tokenizer)
    with plant.ledger.begin() as tx:
        record(tx, "tokenizer_restored", "tokenizer", {"from": plant.ledger.inside(good)})
    return ""


def _fault(folder: Path, sha256: str) -> str:
    for name in TOKENIZER_FILES:
        path = folder / name
        try:
            if name == NAMED and file_sha256(path) != sha256:
                return f"{path} is not the recorded one: its SHA-256 is another"
            if path.suffix == ".json" and name != NAMED:
                json.loads(path.read_bytes())
            elif not path.read_bytes():
                return f"{path} is empty"
        except OSError as error:
            return f"{path}: {error.strerror}"
        except ValueError as error:
            return f"{path} is damaged: {error}"
    return ""
