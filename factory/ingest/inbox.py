"""The inbox: files that people put there are ingested once they are whole, and then moved away.

``arrived`` lists what can be taken, ``take`` takes one of them, and ``update_inbox``, once a pass, says what has to wait and why. What keeps a file
out is an event ``file_held`` of the ledger: it is tried again once the file, the data policy or the code that reads it is another.
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
from factory.core.faults import cannot_be_read_now, is_of_the_machine
from factory.core.moments import span
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ingest.filing import (
    LONGEST_NAME,
    STILL_SECONDS,
    Stamp,
    cut_off,
    file_away,
    file_original,
    return_changed,
    return_file,
    return_quarantined,
    stamp_of,
    writer_of,
)  # fmt: skip
from factory.ingest.reading_code import reading_key
from factory.ingest.rules.split import grouping_lines
from factory.ingest.shapes.mapping import whole_name
from factory.ingest.shapes.told import row_lines
from factory.ledger.files import HELD, held, small_vocabulary
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import FATE, erased_shards
from factory.ledger.writing import record_once
from factory.retrying.backoff import keep_traceback
from factory.retrying.policy import RetryPolicy
from factory.retrying.tries import newest_asked

if TYPE_CHECKING:
    from factory.ingest.chain import ShardReport

SETTLE_SECONDS = 2.0  # a file that changed more recently may be incomplete
LONGEST_BYTES = 255  # of a file's name, on every file system of Linux
PARTIAL = (".part", ".tmp", ".crdownload")


@dataclass(frozen=True)
class InboxFile:
    """``why``: what it waits for, for a person; '': it can be ingested."""

    path: Path
    stamp: Stamp
    why: str = ""

    @property
    def name(self) -> str:
        return shown_name(self.path)


def arrived(plant: Plant, settle: float = SETTLE_SECONDS) -> Iterator[Path]:
    """Whole files of the inbox, by name: regular, not hidden, not named as partial, unchanged for ``settle`` seconds, not refused before."""
    return (file.path for file in _look(plant, settle) if not file.why)


def update_inbox(plant: Plant, settle: float = SETTLE_SECONDS) -> None:
    """Return to the inbox what changed since it was filed, or may be readable by now; say what waits there and why, once."""
    return_changed(plant)
    return_quarantined(plant)
    for file in _look(plant, settle):
        if file.why and (_hold(plant, file) or settle == 0):
            plant.progress.line(f"  {file.name} waits in the inbox: {file.why}")


def take(plant: Plant, path: Path) -> None:
    """Ingest a file of the inbox and move it away. What is wrong with it keeps it there, with the reason; the others don't wait for it.

    Raises: FactoryError, OSError, sqlalchemy.exc.DBAPIError for what is wrong with the machine, the policy or the ledger.
    """
    alone = _take_together(plant, path)
    for one in [path] if alone is None else alone:
        _take_alone(plant, one)


def _take_alone(plant: Plant, path: Path) -> None:
    from factory.ingest.vocabulary import LittleTextError
    from factory.ingest.worker import WorkerDiedError

    stamp: Stamp = ()
    try:
        stamp = stamp_of(path)
        path = _readable(path, plant.progress)
        stamp = stamp_of(path)
        ingest_arrived(plant, path, workers=1 if _deaths(plant, path, stamp) else None)
    except FileNotFoundError:
        if path.exists():
            raise
        plant.progress.line(f"  {shown_name(path)} was taken away again; nothing of it was stored")
    except WorkerDiedError as died:
        deaths = _deaths(plant, path, stamp) + 1
        policy = RetryPolicy.load(plant.workspace.policy("retries.yaml"))
        if deaths < policy.tries:
            again = f"it is tried again in {span(_wait(policy, deaths))}, with one worker (try {deaths + 1} of {policy.tries})"
        else:
            again = (
                f"that was try {deaths}: free some memory and run 'factory retry', or split the file into smaller ones"
            )
        _hold(plant, InboxFile(path, stamp, f"{died}; {again}"), refused=True, deaths=deaths)
        plant.progress.line(f"  {shown_name(path)} stays in the inbox: {died}; {again}")
    except Exception as error:
        if not is_about_the_file(error):
            raise
        if not path.exists():
            plant.progress.line(f"  {shown_name(path)} was taken away while it was read; nothing of it was stored")
            return
        known = isinstance(error, FactoryError | PermissionError)
        log = plant.workspace.logs / "errors.log"
        why = str(error) if known else f"an unexpected {type(error).__name__}: {error} (traceback in {log})"
        if not known:
            with contextlib.suppress(OSError):
                keep_traceback(log, f"ingest of {shown_name(path)}", error)
        if stamp == stamp_of(path):  # else it is another file by now, which is tried
            text = _text_there(plant) if isinstance(error, LittleTextError) else ""
            _hold(plant, InboxFile(path, stamp, why), refused=True, text=text)
        plant.progress.line(f"  {shown_name(path)} stays in the inbox: {why}")


def _take_together(plant: Plant, path: Path) -> list[Path] | None:
    """Ingest the inbox's many small files as one shard, if ``path`` is one of them. They are in it then, and are removed, but for those that
    could not be read.

    Returns those that are to be taken, and quarantined, each for itself; None: ``path`` is not one of many. Each is named once: as one of fewer,
    a file that spoils the others would do so again.
    """
    from factory.ingest.packing import MANY, SMALL_BYTES, Pack, ingest_pack
    from factory.ingest.readers import is_read
    from factory.ingest.reading.kinds import is_archive
    from factory.ingest.rules.policy import DataPolicy
    from factory.ingest.vocabulary import LittleTextError

    def small(name: str, size: int) -> bool:
        return size < SMALL_BYTES and is_read(name) and not is_archive(name) and shown_name(Path(name)) == name

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
    pack, refused = Pack("inbox", [(file.name, file.path) for file in ready]).without_refused(
        DataPolicy.load(plant.workspace.policy("data.yaml"))
    )
    if not pack.files:
        return refused
    unread.update(refused)  # each says for itself why
    plant.progress.line(f"  {len(pack.files):,} small files of the inbox are ingested as one")
    try:
        ingest_pack(plant, pack, ingested=say, unread=unread)
    except (FactoryError, OSError) as error:
        if not is_about_the_file(error) and not isinstance(error, FileNotFoundError):
            raise
        plant.progress.line(f"  they are not: {error}; each is taken for itself")
        return [path] if isinstance(error, FileNotFoundError | LittleTextError) else [file.path for file in ready]
    for file in ready:
        with contextlib.suppress(FileNotFoundError):
            if file.path not in unread and stamp_of(file.path) == file.stamp:
                file.path.unlink()
    return sorted(unread)


def is_about_the_file(error: Exception) -> bool:
    """Does it keep out one file, and no other?"""
    if isinstance(error, FactoryError):
        return isinstance(error, InputError) and not cannot_be_read_now(error)
    return not isinstance(error, sa.exc.DBAPIError) and not is_of_the_machine(error)


def ingest_arrived(plant: Plant, path: Path, workers: int | None = None) -> None:
    """Ingest a file of the inbox, then move it to ``shards/raw/`` or ``quarantine/``.

    After a kill between the two the next call recognises the content and only moves the file.
    """
    before = ingested_before(plant.ledger)
    say = lambda report: plant.progress.line(describe_report(shown_name(path), report, before))
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
    """Ingest a file, wherever it lies. One of the inbox or of ``quarantine/`` is filed then, once ``ingested`` was called with each report; any
    other stays. ``other_files``: files that are to be ingested after it.

    Raises: as ``ingest_shard``.
    """
    from factory.ingest.chain import ingest_shard
    from factory.ingest.packing import Pack, ingest_pack, is_packed
    from factory.ingest.rules.policy import DataPolicy

    folder = path.resolve().parent
    if folder == plant.workspace.inbox.resolve():
        path = _readable(path, plant.progress)
    elif (shown := _shown(path.resolve())) != str(path.resolve()):
        raise InputError(
            f"{shown}: a name that is not UTF-8 cannot be stored: rename it, or put the file into the inbox, which does"
        )
    if folder == plant.workspace.quarantine.resolve():
        path = return_file(plant.workspace, path)
        folder = plant.workspace.inbox.resolve()
    if path.is_file() and is_packed(path, DataPolicy.load(plant.workspace.policy("data.yaml")).limits):
        reports = ingest_pack(
            plant,
            Pack.of_file(path),
            again=again,
            workers=workers,
            ingested=ingested,
            other_files=other_files,
        )
        if folder == plant.workspace.inbox.resolve():
            file_original(plant, path, {report.sha256 for report in reports})
        return reports
    report = ingest_shard(plant, path, again=again, workers=workers, other_files=other_files)
    ingested(report)
    if folder == plant.workspace.inbox.resolve() and report.sha256 in erased_shards(plant.ledger):
        path.unlink()  # its text would be back
        plant.progress.line(f"  {shown_name(path)} is a shard of which text was erased: it is not kept")
    elif folder == plant.workspace.inbox.resolve():
        file_away(plant, path, report.sha256, report.state)
    return [report]


def shown_name(path: Path) -> str:
    r"""A file's name as text that can be printed and stored: bytes that are not UTF-8 as ``\xe9``."""
    return _shown(path.name)


def _shown(name: str | Path) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _readable(path: Path, progress: Progress) -> Path:
    """The file, under a name that can be stored."""
    if shown_name(path) == path.name:
        return path
    name = shown_name(path)
    target = path.with_name(name if len(name.encode()) <= LONGEST_BYTES else name[-LONGEST_NAME:])
    if os.path.lexists(target):
        target = path.with_name(f"{time.time_ns()}-{target.name[-LONGEST_NAME:]}")
    os.rename(path, target)
    progress.line(f"  a file of the inbox has a name that is not UTF-8; it is named {target.name} now")
    return target


def _look(plant: Plant, settle: float) -> Iterator[InboxFile]:
    """Everything in the inbox that is, or will be, ingested or has to be said something about, by name."""
    plant.workspace.inbox.mkdir(exist_ok=True)
    names = [n for n in sorted(os.listdir(plant.workspace.inbox)) if not n.startswith(".") and not n.endswith(PARTIAL)]
    refused = {name: one for name, one in held(plant.ledger).items() if one["refused"]} if names else {}
    key = reading_key(plant.workspace) if refused else ""
    asked = newest_asked(plant.ledger) if refused else 0
    for name in names:
        path = plant.workspace.inbox / name
        try:
            stamp = stamp_of(path)
            known = refused.get(shown_name(path))
            read_by = key + (_text_there(plant) if known and known.get("text") else "")
            if (
                known
                and (tuple(known["stamp"]), known["read_by"]) == (stamp, read_by)
                and _rests(plant.workspace, known, asked)
            ):
                yield InboxFile(path, stamp, known["why"])
            elif len(stamp) == 1:
                yield InboxFile(path, stamp, _no_file(path))
            elif settle == 0 or abs(time.time() - stamp[1] / 1e9) >= settle:
                yield InboxFile(path, stamp, _incomplete(path, stamp))
        except FileNotFoundError:
            continue


def _deaths(plant: Plant, path: Path, stamp: Stamp) -> int:
    """How often workers died that read this file as it is."""
    known = held(plant.ledger).get(shown_name(path), {})
    if not known.get("deaths") or (tuple(known["stamp"]), known["read_by"]) != (stamp, reading_key(plant.workspace)):
        return 0
    return int(known["deaths"])


def _rests(workspace: Workspace, known: dict[str, Any], asked: int) -> bool:
    """Is it too early to try a refused file again? What is wrong with the file itself stays wrong; what workers died of may be over."""
    deaths = known.get("deaths", 0)
    if not deaths:
        return True
    if asked > known["event"]:
        return False
    policy = RetryPolicy.load(workspace.policy("retries.yaml"))
    return deaths >= policy.tries or 0 <= time.time() - known["at"] < _wait(policy, deaths)


def _wait(policy: RetryPolicy, deaths: int) -> float:
    """Seconds."""
    return min(policy.first_wait_seconds * 2.0 ** min(deaths - 1, 40), policy.longest_wait_seconds)


def _no_file(path: Path) -> str:
    if path.is_symlink():
        return "it is a link, and a link is not followed: copy the file here"
    if path.is_dir():
        return "it is a folder: move its files into the inbox itself"
    return "it is no regular file: remove it"


def _incomplete(path: Path, stamp: Stamp) -> str:
    if writer := writer_of(path):
        return f"{writer} has it open for writing; it is taken once it is closed"
    if abs(time.time() - stamp[1] / 1e9) >= STILL_SECONDS or not (end := cut_off(path)):
        return ""
    return f"{end}; it is taken once it is whole, or unchanged for {STILL_SECONDS / 60:.0f} minutes"


def _text_there(plant: Plant) -> str:
    """What a file that waits for more text is tried again by: which files are there, and whether a person said that there is enough."""
    files = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(plant.workspace.inbox) if entry.is_file())
    tokenizer = bool(plant.ledger.read("SELECT sha256 FROM tokenizers LIMIT 1"))
    return hashlib.sha256(repr((files, tokenizer, small_vocabulary(plant.ledger))).encode()).hexdigest()[:16]


def _hold(plant: Plant, file: InboxFile, refused: bool = False, deaths: int = 0, text: str = "") -> bool:
    """Record why a file waits; returns whether that is news. ``text``: of a file that waits for more text, the text that was there."""
    known = held(plant.ledger).get(file.name)
    if not refused and known and (tuple(known["stamp"]), known["why"]) == (file.stamp, file.why):
        return False
    detail: dict[str, Any] = {
        "name": file.name,
        "stamp": list(file.stamp),
        "why": file.why,
        "refused": refused,
        "deaths": deaths,
    }
    detail |= {"read_by": reading_key(plant.workspace) + text if refused else ""} | ({"text": text} if text else {})
    return record_once(plant.ledger, HELD, f"inbox:{file.name}", detail)


def ingested_before(ledger: Ledger) -> dict[str, float]:
    """By SHA-256, when each shard that there is was ingested: seconds since 1970."""
    rows = ledger.read("SELECT sha256, ingested_at FROM shards WHERE state = 'ingested'")
    return {row["sha256"]: row["ingested_at"] for row in rows}


def describe_report(name: str, report: ShardReport, before: Mapping[str, float]) -> str:
    """As ``describe_shard``; of content that was ingested ``before``, when, and under which name, if another than the file's own."""
    if report.sha256 not in before:
        return describe_shard(report.name, report.state, report.rows, report.counts, report.reason)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(before[report.sha256]))
    named = f", as {report.name}" if report.name != name else ""
    counts = f"{report.counts.get('train', 0):,} to train on, {report.counts.get('held_out', 0):,} held out"
    return f"  {name} was ingested already, on {when}{named}: {counts}; nothing of it was stored again"


def describe_shard(name: str, state: str, rows: int, counts: dict[str, object] | None, reason: str | None) -> str:
    """For people: a line, and one more for each thing that has to be said of its rows."""
    counts = counts or {}
    words = [f"{counts.get('train', 0):,} to train on, {counts.get('held_out', 0):,} held out"]
    dropped = counts.get("dropped")
    if isinstance(dropped, dict) and dropped:
        by_rule = ", ".join(f"{rule} {n:,}" for rule, n in sorted(dropped.items(), key=lambda kv: -kv[1]))
        words.append(f"{sum(dropped.values()):,} dropped ({by_rule})")
    if isinstance(others := counts.get("other_licences"), dict):
        for shard, count in others.items():
            words.append(f"{count:,} OF ITS TEXTS CAME UNDER ANOTHER LICENCE in {shard}")
        words.append(
            "the strictest counts, and none named is strict too: releases may be held back until 'factory data settle LICENCE --shard "
            f"{shlex.quote(whole_name(name))}' says which is right ('factory data claims' lists them)"
        )
    if state == "quarantined":
        words = [f"QUARANTINED: {reason}"] + words[1:]
    said = [f"  {name}: {rows:,} documents; {'; '.join(words)}", *(f"    {line}" for line in row_lines(counts))]
    if isinstance(dropped, dict) and dropped.get(FATE):
        said.append(
            "    what is 'removed' a person took out before, or is a copy of that: 'factory data undo N' puts it back ('factory data list' has N). "
            "Another source, domain, licence or group needs no new ingest: 'factory data relabel'"
        )
    if isinstance(groups := counts.get("groups"), dict):
        said += [f"    {line}" for domain, found in groups.items() for line in grouping_lines(domain, found)]
    return "\n".join(said)
