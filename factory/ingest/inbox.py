"""The inbox: a folder into which people put files. The daemon ingests a file as soon as the file is complete, and then moves the file away.

``list_complete_files`` lists the files that can be ingested, and ``ingest_inbox_file`` ingests one of them. ``update_inbox`` is called once in each
pass. It prints which files wait and why, and records the reason in the ledger as an event ``file_held``. A refused file is tried again when the
file, the data policy or the reading code has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from factory.core.errors import FactoryError, InputError
from factory.core.faults import is_machine_fault, is_temporary_read_failure
from factory.core.progress import Progress
from factory.core.time_formats import format_duration
from factory.core.workspace import Workspace
from factory.ingest.filing import (
    COMPLETE_AFTER_SECONDS,
    LONGEST_NAME,
    FileStamp,
    find_truncation,
    find_writing_process,
    move_changed_files_to_inbox,
    move_ingested_file,
    move_original_file,
    move_quarantined_files_to_inbox,
    move_to_inbox,
    read_file_stamp,
)  # fmt: skip
from factory.ingest.policy_and_code_hash import compute_policy_and_code_hash
from factory.ingest.rules.held_out_split import describe_grouping
from factory.ingest.shapes.field_mapping import get_original_file_name
from factory.ingest.shapes.row_counts import describe_rows
from factory.ledger.file_events import HELD, is_small_vocabulary_allowed, read_waiting_inbox_files
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import REMOVED_FATE, read_erased_shards
from factory.ledger.writing import record_event_once
from factory.retrying.failure_waits import append_traceback
from factory.retrying.policy import RetryPolicy
from factory.retrying.trainer_deaths import find_newest_retry_request
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ingest.chain import ShardReport

SETTLE_SECONDS = 2.0  # a file that changed more recently may be incomplete
LONGEST_NAME_BYTES = 255  # the longest file name that every file system of Linux allows
PARTIAL_SUFFIXES = (".part", ".tmp", ".crdownload")


@dataclass(frozen=True)
class InboxFile:
    """A file, folder or link in the inbox. ``why`` tells a person why it waits. It is '' if the file can be ingested."""

    path: Path
    stamp: FileStamp
    why: str = ""

    @property
    def name(self) -> str:
        return make_printable_name(self.path)


def list_complete_files(plant: Plant, settle_seconds: float = SETTLE_SECONDS) -> Iterator[Path]:
    """Yield the files of the inbox that can be ingested, sorted by name. Such a file is regular and complete, and did not change for
    ``settle_seconds``. It is not hidden, not named as partial, and was not refused before."""
    return (file.path for file in _look(plant, settle_seconds) if not file.why)


def update_inbox(plant: Plant, settle_seconds: float = SETTLE_SECONDS) -> None:
    """Return changed files, and quarantined files that may be readable now, to the inbox. Print once for each waiting file why it waits."""
    move_changed_files_to_inbox(plant)
    move_quarantined_files_to_inbox(plant)
    for file in _look(plant, settle_seconds):
        if file.why and (_hold(plant, file) or settle_seconds == 0):
            plant.progress.line(
                Message("ingest.waits", "  {file} waits in the inbox: {why}", file=file.name, why=file.why)
            )


def ingest_inbox_file(plant: Plant, path: Path) -> None:
    """Ingest a file of the inbox and move it away. A file with a fault stays in the inbox, and the ledger records why. Other files do not wait for
    it.

    Raises: FactoryError, OSError, sqlalchemy.exc.DBAPIError for faults of the machine, the policy or the ledger.
    """
    alone = _take_together(plant, path)
    for one in [path] if alone is None else alone:
        _take_alone(plant, one)


def _take_alone(plant: Plant, path: Path) -> None:
    from factory.ingest.vocabulary import TooLittleTextError
    from factory.ingest.worker import WorkerDiedError

    stamp: FileStamp = ()
    try:
        stamp = read_file_stamp(path)
        path = _readable(path, plant.progress)
        stamp = read_file_stamp(path)
        ingest_and_move(plant, path, workers=1 if _deaths(plant, path, stamp) else None)
    except FileNotFoundError:
        if path.exists():
            raise
        plant.progress.line(_removed_line(path))
    except WorkerDiedError as died:
        deaths = _deaths(plant, path, stamp) + 1
        policy = RetryPolicy.load(plant.workspace.policy_path("retries.yaml"))
        if deaths < policy.tries:
            why = Message(
                "ingest.worker_died_again",
                "{why}. The daemon tries the file again in {wait}, with one worker (try {number} of {tries})",
                why=died.message,
                wait=format_duration(_wait(policy, deaths)),
                number=deaths + 1,
                tries=policy.tries,
            )
        else:
            why = Message(
                "ingest.worker_died_last",
                "{why}. The daemon tried the file {tries:,|time|times} and does not try again by itself. Free some memory and run "
                "'factory retry', or split the file",
                why=died.message,
                tries=deaths,
            )
        _hold(plant, InboxFile(path, stamp, why), refused=True, deaths=deaths)
        plant.progress.line(_stays_line(path, why))
    except Exception as error:
        if not concerns_only_this_file(error):
            raise
        if not path.exists():
            plant.progress.line(_removed_line(path))
            return
        log = plant.workspace.logs / "errors.log"
        if isinstance(error, FactoryError):
            why = Message.from_json(error.message)
        elif isinstance(error, PermissionError):
            why = Message.from_json(str(error))
        else:
            why = Message(
                "ingest.unexpected",
                "ingest failed unexpectedly ({kind}: {error}). The traceback is in {log}",
                kind=type(error).__name__,
                error=error,
                log=log,
            )
            with contextlib.suppress(OSError):
                append_traceback(log, f"ingest of {make_printable_name(path)}", error)
        if stamp == read_file_stamp(path):  # else another file has this name now, and will be tried
            text = _text_there(plant) if isinstance(error, TooLittleTextError) else ""
            _hold(plant, InboxFile(path, stamp, why), refused=True, text=text)
        plant.progress.line(_stays_line(path, why))


def _removed_line(path: Path) -> Message:
    return Message(
        "ingest.removed_from_inbox",
        "  {file} was removed from the inbox before its ingest ended, so nothing of the file was stored",
        file=make_printable_name(path),
    )


def _stays_line(path: Path, why: str) -> Message:
    return Message("ingest.stays", "  {file} stays in the inbox: {why}", file=make_printable_name(path), why=why)


def _take_together(plant: Plant, path: Path) -> list[Path] | None:
    """Ingest the inbox's many small files as one shard, if ``path`` is one of them. The files that were read are then deleted.

    Returns the files that must still be ingested or quarantined one by one, or None if ``path`` is not one of many small files. Returns all small
    files if one file spoils the shard, because it would spoil a shard of fewer files too.
    """
    from factory.ingest.file_groups import MANY, SMALL_BYTES, FileGroup, ingest_file_group
    from factory.ingest.readers import is_readable_kind
    from factory.ingest.reading.file_kinds import is_archive
    from factory.ingest.rules.policy import DataPolicy
    from factory.ingest.vocabulary import TooLittleTextError

    def small(name: str, size: int) -> bool:
        return (
            size < SMALL_BYTES
            and is_readable_kind(name)
            and not is_archive(name)
            and make_printable_name(Path(name)) == name
        )

    if not small(path.name, path.stat().st_size if path.is_file() else SMALL_BYTES):
        return None
    if sum(small(name, 0) for name in os.listdir(plant.workspace.inbox)) < MANY:
        return None
    ready = [file for file in _look(plant, SETTLE_SECONDS) if not file.why and small(file.name, file.stamp[0])]
    if len(ready) < MANY or path not in [file.path for file in ready]:
        return None
    unread: set[Path] = set()
    say = lambda report: plant.progress.line(
        describe_shard(report.name, report.state, report.rows, report.counts, report.reason)
    )
    pack, refused = FileGroup("inbox", [(file.name, file.path) for file in ready]).split_off_refused_files(
        DataPolicy.load(plant.workspace.policy_path("data.yaml"))
    )
    if not pack.files:
        return refused
    unread.update(refused)  # each is then ingested alone, which reports why it is refused
    plant.progress.line(
        Message(
            "ingest.together",
            "  {files:,} small files of the inbox are ingested as one shard",
            files=len(pack.files),
        )
    )
    try:
        ingest_file_group(plant, pack, ingested=say, unread=unread)
    except (FactoryError, OSError) as error:
        if not concerns_only_this_file(error) and not isinstance(error, FileNotFoundError):
            raise
        plant.progress.line(
            Message(
                "ingest.not_together",
                "  the factory ingests the small files one by one, because it could not ingest them as one shard: {why}",
                why=error,
            )
        )
        return [path] if isinstance(error, FileNotFoundError | TooLittleTextError) else [file.path for file in ready]
    for file in ready:
        with contextlib.suppress(FileNotFoundError):
            if file.path not in unread and read_file_stamp(file.path) == file.stamp:
                file.path.unlink()
    return sorted(unread)


def concerns_only_this_file(error: Exception) -> bool:
    """Return whether the error concerns this file alone, so that other files can be ingested."""
    if isinstance(error, FactoryError):
        return isinstance(error, InputError) and not is_temporary_read_failure(error)
    return not isinstance(error, sa.exc.DBAPIError) and not is_machine_fault(error)


def ingest_and_move(plant: Plant, path: Path, workers: int | None = None) -> None:
    """Ingest a file of the inbox, then move it to ``shards/raw/`` or ``quarantine/``.

    If the process is killed between the two steps, the next call recognises the content and only moves the file.
    """
    before = read_ingest_times(plant.ledger)
    say = lambda report: plant.progress.line(describe_report(make_printable_name(path), report, before))
    ingest_path(plant, path, ingested=say, workers=workers)


def ingest_path(
    plant: Plant,
    path: Path,
    *,
    again: bool = False,
    workers: int | None = None,
    ingested: Callable[[ShardReport], object] = lambda report: None,
    other_files: Sequence[Path] = (),
) -> list[ShardReport]:
    """Ingest a file, and call ``ingested`` with each report. Then move a file of the inbox or of ``quarantine/`` to its place. Any other file
    stays where it is. ``other_files`` are the files that are ingested after this one.

    Raises: as ``ingest_shard``.
    """
    from factory.ingest.chain import ingest_shard
    from factory.ingest.file_groups import FileGroup, ingest_file_group, is_cut_into_parts
    from factory.ingest.rules.policy import DataPolicy

    folder = path.resolve().parent
    if folder == plant.workspace.inbox.resolve():
        path = _readable(path, plant.progress)
    elif (shown := _shown(path.resolve())) != str(path.resolve()):
        raise InputError(
            "ingest.name_not_utf8",
            "{file}: the name is not UTF-8 and cannot be stored. Rename the file, or put it into the inbox, where the daemon renames it",
            file=shown,
        )
    if folder == plant.workspace.quarantine.resolve():
        path = move_to_inbox(plant.workspace, path)
        folder = plant.workspace.inbox.resolve()
    if path.is_file() and is_cut_into_parts(path, DataPolicy.load(plant.workspace.policy_path("data.yaml")).limits):
        reports = ingest_file_group(
            plant,
            FileGroup.of_file(path),
            again=again,
            workers=workers,
            ingested=ingested,
            other_files=other_files,
        )
        if folder == plant.workspace.inbox.resolve():
            move_original_file(plant, path, {report.sha256 for report in reports})
        return reports
    report = ingest_shard(plant, path, again=again, workers=workers, other_files=other_files)
    ingested(report)
    if folder == plant.workspace.inbox.resolve() and report.sha256 in read_erased_shards(plant.ledger):
        path.unlink()  # keeping it would restore erased text
        plant.progress.line(
            Message(
                "ingest.erased_shard",
                "  the factory deleted {file}. The same content was ingested earlier, and a person then erased a part of "
                "that content",
                file=make_printable_name(path),
            )
        )
    elif folder == plant.workspace.inbox.resolve():
        move_ingested_file(plant, path, report.sha256, report.state)
    return [report]


def make_printable_name(path: Path) -> str:
    r"""Return a file's name as text that can be printed and stored. A byte that is not UTF-8 becomes an escape such as ``\xe9``."""
    return _shown(path.name)


def _shown(name: str | Path) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _readable(path: Path, progress: Progress) -> Path:
    """Rename a file of the inbox if its name is not UTF-8. Returns the file's path."""
    if make_printable_name(path) == path.name:
        return path
    name = make_printable_name(path)
    target = path.with_name(name if len(name.encode()) <= LONGEST_NAME_BYTES else name[-LONGEST_NAME:])
    if os.path.lexists(target):
        target = path.with_name(f"{time.time_ns()}-{target.name[-LONGEST_NAME:]}")
    os.rename(path, target)
    progress.line(
        Message(
            "ingest.renamed",
            "  a file of the inbox had a name that is not UTF-8; its new name is {name}",
            name=target.name,
        )
    )
    return target


def _look(plant: Plant, settle_seconds: float) -> Iterator[InboxFile]:
    """Yield the files, folders and links in the inbox, sorted by name. Hidden and partial files, and files that changed a moment ago, are left
    out."""
    plant.workspace.inbox.mkdir(exist_ok=True)
    names = [
        n
        for n in sorted(os.listdir(plant.workspace.inbox))
        if not n.startswith(".") and not n.endswith(PARTIAL_SUFFIXES)
    ]
    refused = (
        {name: one for name, one in read_waiting_inbox_files(plant.ledger).items() if one["refused"]} if names else {}
    )
    key = compute_policy_and_code_hash(plant.workspace) if refused else ""
    asked = find_newest_retry_request(plant.ledger) if refused else 0
    for name in names:
        path = plant.workspace.inbox / name
        try:
            stamp = read_file_stamp(path)
            known = refused.get(make_printable_name(path))
            read_by = key + (_text_there(plant) if known and known.get("text") else "")
            if (
                known
                and (tuple(known["stamp"]), known["read_by"]) == (stamp, read_by)
                and _rests(plant.workspace, known, asked)
            ):
                yield InboxFile(path, stamp, known["why"])
            elif len(stamp) == 1:
                yield InboxFile(path, stamp, _no_file(path))
            elif settle_seconds == 0 or abs(time.time() - stamp[1] / 1e9) >= settle_seconds:
                yield InboxFile(path, stamp, _incomplete(path, stamp))
        except FileNotFoundError:
            continue


def _deaths(plant: Plant, path: Path, stamp: FileStamp) -> int:
    """Return how many workers died while they read this file in its present state."""
    known = read_waiting_inbox_files(plant.ledger).get(make_printable_name(path), {})
    if not known.get("deaths") or (tuple(known["stamp"]), known["read_by"]) != (
        stamp,
        compute_policy_and_code_hash(plant.workspace),
    ):
        return 0
    return int(known["deaths"])


def _rests(workspace: Workspace, known: dict[str, Any], asked: int) -> bool:
    """Return whether it is too early to try a refused file again. A fault of the file itself remains, but the cause of a worker's death may pass."""
    deaths = known.get("deaths", 0)
    if not deaths:
        return True
    if asked > known["event"]:
        return False
    policy = RetryPolicy.load(workspace.policy_path("retries.yaml"))
    return deaths >= policy.tries or 0 <= time.time() - known["at"] < _wait(policy, deaths)


def _wait(policy: RetryPolicy, deaths: int) -> float:
    """Return how many seconds to wait after ``deaths`` deaths of workers."""
    return min(policy.first_wait_seconds * 2.0 ** min(deaths - 1, 40), policy.longest_wait_seconds)


def _no_file(path: Path) -> Message:
    if path.is_symlink():
        return Message(
            "ingest.link", "it is a link, and the factory does not follow links. Copy the file itself into the inbox"
        )
    if path.is_dir():
        return Message(
            "ingest.inbox_folder",
            "it is a folder, and the factory ingests only the files directly in the inbox. Move the files of the folder into the inbox",
        )
    return Message("ingest.special_file", "it is not a regular file. Remove it")


def _incomplete(path: Path, stamp: FileStamp) -> str:
    """Return why a file is not complete yet, or '' if it is."""
    if writer := find_writing_process(path):
        return Message(
            "ingest.open_for_writing",
            "{writer} has the file open for writing. The daemon ingests the file when {writer} closes it",
            writer=writer,
        )
    if abs(time.time() - stamp[1] / 1e9) >= COMPLETE_AFTER_SECONDS or not (end := find_truncation(path)):
        return ""
    return Message(
        "ingest.incomplete",
        "{end}. The daemon ingests the file when it is complete, or when it has not changed for {minutes:.0f} minutes",
        end=end,
        minutes=COMPLETE_AFTER_SECONDS / 60,
    )


def _text_there(plant: Plant) -> str:
    """Return a hash of the facts that decide whether to retry a file that waits for more text. They are the files in the inbox, whether a tokenizer
    exists, and whether a person allowed a small vocabulary."""
    files = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(plant.workspace.inbox) if entry.is_file())
    tokenizer = bool(plant.ledger.read("SELECT sha256 FROM tokenizers LIMIT 1"))
    return hashlib.sha256(repr((files, tokenizer, is_small_vocabulary_allowed(plant.ledger))).encode()).hexdigest()[:16]


def _hold(plant: Plant, file: InboxFile, refused: bool = False, deaths: int = 0, text: str = "") -> bool:
    """Record why a file waits. Returns whether the reason is new. ``text`` is ``_text_there`` for a file that waits for more text, else ''."""
    known = read_waiting_inbox_files(plant.ledger).get(file.name)
    if not refused and known and (tuple(known["stamp"]), known["why"]) == (file.stamp, file.why):
        return False
    detail: dict[str, Any] = {
        "name": file.name,
        "stamp": list(file.stamp),
        "why": file.why,
        "refused": refused,
        "deaths": deaths,
    }
    detail |= {"read_by": compute_policy_and_code_hash(plant.workspace) + text if refused else ""} | (
        {"text": text} if text else {}
    )
    return record_event_once(plant.ledger, HELD, f"inbox:{file.name}", detail)


def read_ingest_times(ledger: Ledger) -> dict[str, float]:
    """Return the time when each shard was ingested, in seconds since 1970, by the shard's SHA-256."""
    rows = ledger.read("SELECT sha256, ingested_at FROM shards WHERE state = 'ingested'")
    return {row["sha256"]: row["ingested_at"] for row in rows}


def describe_report(name: str, report: ShardReport, earlier_ingest_times: Mapping[str, float]) -> str:
    """Describe a report as ``describe_shard`` does. If ``earlier_ingest_times`` has the content, say when it was
    ingested, and under which name instead."""
    if report.sha256 not in earlier_ingest_times:
        return describe_shard(report.name, report.state, report.rows, report.counts, report.reason)
    return Message(
        "ingest.known",
        "  {file} was already ingested on {when} as {shard}, with {train:,|document|documents} to train on and {held_out:,} "
        "held out. Nothing was stored again",
        file=name,
        when=time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier_ingest_times[report.sha256])),
        shard=report.name,
        train=report.counts.get("train", 0),
        held_out=report.counts.get("held_out", 0),
    )


def describe_shard(name: str, state: str, rows: int, counts: dict[str, Any] | None, reason: str | None) -> Message:
    """Describe a shard in one line, with a further line for each fact about its rows. ``data["parts"]`` has these messages one by one."""
    counts = counts or {}
    parts: list[str] = []
    dropped = counts.get("dropped")
    if isinstance(dropped, dict) and dropped:
        by_rule = [f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1])]
        parts.append(
            Message(
                "ingest.dropped",
                "{count:,|document|documents} dropped ({rules})",
                count=sum(dropped.values()),
                rules=by_rule,
            )
        )
    if isinstance(others := counts.get("other_licences"), dict):
        for shard, count in others.items():
            parts.append(
                Message(
                    "ingest.other_licence",
                    "{texts:,|TEXT OF THIS SHARD IS|TEXTS OF THIS SHARD ARE} ALSO IN {shard}, UNDER ANOTHER LICENCE",
                    texts=count,
                    shard=shard,
                )
            )
        parts.append(
            Message(
                "ingest.strictest_licence",
                "if a text came under several licences, the strictest licence counts and may block releases. A missing "
                "licence counts as strict. To list the texts: 'factory data claims'. To say which licence is right: 'factory "
                "data settle LICENCE --shard {shard}'",
                shard=shlex.quote(get_original_file_name(name)),
            )
        )
    if state == "quarantined":
        first = Message("ingest.quarantined", "QUARANTINED: {why}", why=reason)
    else:
        kept = {"train": counts.get("train", 0), "held_out": counts.get("held_out", 0)}
        first = Message("ingest.kept", "{train:,|document|documents} to train on, {held_out:,} held out", **kept)
    lines = [*describe_rows(counts)]
    if isinstance(dropped, dict) and dropped.get(REMOVED_FATE):
        lines.append(
            Message(
                "ingest.removed_before",
                "the rule 'removed' dropped documents that a person removed earlier, and copies of such documents. To list the removals: "
                "'factory data list'. To undo removal N: 'factory data undo N'. To change the source, domain, licence or group instead: "
                "'factory data relabel'",
            )
        )
    if isinstance(groups := counts.get("groups"), dict):
        lines += [line for domain, found in groups.items() for line in describe_grouping(domain, found)]
    return Message(
        "ingest.shard",
        "  {shard}: {rows:,|row|rows}; {facts}{lines}",
        shard=name,
        rows=rows,
        facts="; ".join([first, *parts]),
        lines="".join(f"\n    {line}" for line in lines),
        parts=[first, *parts, *lines],
    )
