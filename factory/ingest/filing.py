"""Moves files of the inbox: decides when a file is complete, where it goes after its ingest, and when it returns to the inbox.

Ingest moves a shard's file to ``shards/raw/`` or ``quarantine/``, and a file that was cut into shards to ``shards/originals/``. A file in
``shards/raw/`` may change later: a program still has it open, or writes to it from another machine. The changed file goes back to the inbox and
is ingested as another shard. A quarantined file goes back when its name or content, the data policy or the reading code has changed.

A file is complete when no process writes to it and it does not end in the middle of a row. The kernel refuses a read lease while a process has
the file open for writing. Where a file system has no leases, the open files of all visible processes are searched. Neither way finds a
writer on another machine, so the end of the file is checked too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import json
import lzma
import os
import re
import shutil
import signal
import stat
import time
import zipfile
import zlib
from collections.abc import Container, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.ingest.policy_and_code_hash import compute_policy_and_code_hash
from factory.ingest.reading.file_kinds import detect_kind
from factory.ledger.file_events import SHARD_FILED, list_shards_made_from, list_sources_of_shard, read_shard_locations
from factory.ledger.ledger import Ledger, record_event, shards
from factory.ledger.plant import Plant
from factory.ledger.removals import list_former_file_hashes, read_erased_shards
from kernels.contract.files import rename_into_place, sync_folder
from kernels.contract.message import Message
from trainer.contract.data.token_shard import hash_file

LONGEST_NAME = 50  # characters, of four bytes at most
# Each pass checks this many of the files that were filed last. The limit is a number and not an age, because a clock may jump.
MOST_WATCHED_FILES = 4096
RAW, QUARANTINE = "shards/raw", "quarantine"
ORIGINALS = "shards/originals"  # files that were cut into shards of JSON lines
ASKED = "asked"  # ``read_by`` of a quarantined file that a person wants tried again
PREFIX = re.compile(r"[0-9a-f]{16}-(?=.)")  # the start of a filed file's name: digits of its SHA-256


def make_stored_file_name(sha256: str, path: Path) -> str:
    """Return the name that a file gets when it leaves the inbox. The name is short enough for any file system."""
    return f"{sha256[:16]}-{path.name[-LONGEST_NAME:]}"


def move_ingested_file(plant: Plant, path: Path, sha256: str, state: str) -> None:
    """Move an ingested file out of the inbox. If another file took its name meanwhile, the hash differs, and that other file goes back to it."""
    folder = QUARANTINE if state == "quarantined" else RAW
    place = plant.workspace.root / folder / make_stored_file_name(sha256, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    status = path.stat()
    detail = {"folder": folder, "name": place.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    with plant.ledger.begin() as tx:
        tx.execute(shards.update().where(shards.c.sha256 == sha256).values(path=plant.ledger.to_stored_path(place)))
        record_event(
            tx,
            SHARD_FILED,
            f"shard:{sha256[:16]}",
            detail | {"sha256": sha256, "read_by": compute_policy_and_code_hash(plant.workspace)},
        )
    shutil.move(path, place)
    if path.exists() and path.samefile(place):  # two hard links to one file: a rename leaves both
        path.unlink()
    if hash_file(place) != sha256:
        shutil.move(place, plant.workspace.inbox / f"{time.time_ns()}-{path.name[-LONGEST_NAME:]}")


def move_original_file(plant: Plant, path: Path, reported_sha256s: Container[str]) -> None:
    """Move a file that was cut into shards out of the inbox. The shards hold its rows, so nothing reads the original again.

    The original is deleted if text of its shards was erased. It is quarantined if it could not be read to its end: then its own SHA-256 is in
    ``reported_sha256s``, the SHA-256 of all reports."""
    sha256 = hash_file(path)
    if sha256 in reported_sha256s:
        move_ingested_file(plant, path, sha256, "quarantined")
        return
    if {part["shard"] for part in list_shards_made_from(plant.ledger, sha256)} & set(read_erased_shards(plant.ledger)):
        path.unlink()
        return
    original = plant.workspace.root / ORIGINALS / make_stored_file_name(sha256, path)
    original.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, original)


def remove_originals(plant: Plant, shard: str) -> list[str]:
    """Delete the files from which a shard was cut, after text of the shard was erased. Returns a line for each deleted file."""
    said: list[str] = []
    for one in list_sources_of_shard(plant.ledger, shard):
        for path in (plant.workspace.root / ORIGINALS).glob(f"{one['sha256'][:16]}-*"):
            path.unlink()
            said.append(
                Message(
                    "ingest.original_deleted",
                    "the shard was made from {file}. The factory deleted this file too",
                    file=one["name"],
                )
            )
    return said


def move_changed_files_to_inbox(plant: Plant) -> None:
    """Move files of ``shards/raw/`` that changed after their ingest back to the inbox. If a changed file still begins with the ingested content,
    that content stays in ``shards/raw/``."""
    for (folder, name), known in read_shard_locations(plant.ledger, MOST_WATCHED_FILES).items():
        path = plant.workspace.root / folder / name
        if folder != RAW or not _changed(path, known):
            continue
        sha256 = hash_file(path)
        wanted = {known["sha256"], *list_former_file_hashes(plant.ledger, known["sha256"])}
        if sha256 not in wanted:
            kept = _split(plant.workspace, path, known, wanted)
            plant.progress.line(_changed_line(name, kept))
        if sha256 in wanted or kept:
            status = path.stat()
            with plant.ledger.begin() as tx:
                stamp = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
                record_event(tx, SHARD_FILED, f"shard:{known['sha256'][:16]}", known | stamp)


def _changed_line(name: str, kept: bool) -> Message:
    if kept:
        return Message(
            "ingest.changed_after",
            "  {file} changed after its ingest. The changed file is in the inbox again. The ingested content stays in shards/raw/",
            file=name,
        )
    return Message(
        "ingest.changed_after_and_lost",
        "  {file} changed after its ingest. The changed file is in the inbox again. The ingested content is now only in the "
        "token shard",
        file=name,
    )


def _split(workspace: Workspace, path: Path, known: dict[str, Any], wanted: Container[str]) -> bool:
    """Move a changed file to the inbox. The file itself is moved, not a copy, because a process that has it open may continue to write to it.

    If the file still begins with the ingested content, that content takes the file's old place. Returns whether it does."""
    aside = path.with_name(f".{path.name}")
    with open(path, "rb") as source, open(aside, "wb") as target:
        left = known["bytes"]
        while left and (block := source.read(min(left, 1 << 22))):
            target.write(block)
            left -= len(block)
    kept = hash_file(aside) in wanted
    back = _free(workspace, _plain(path.name))
    if kept:
        with contextlib.suppress(OSError):  # the inbox is on another file system
            os.link(path, back)
        if not back.exists():
            shutil.copy2(path, back)
        sync_folder(back)
        sync_folder(back.parent)  # before the old name stands for the ingested content
        rename_into_place(aside, path)
    else:
        aside.unlink()
        shutil.move(path, back)
    return kept


def move_quarantined_files_to_inbox(plant: Plant) -> None:
    """Move the files of ``quarantine/`` that ingest may be able to read now back to the inbox."""
    there = list_quarantined_files(plant.workspace)
    known = read_shard_locations(plant.ledger) if there else {}
    key = compute_policy_and_code_hash(plant.workspace) if there else ""
    for path in there:
        last = known.get((QUARANTINE, path.name))
        if last is None and _waits_to_be_filed(plant, path):
            continue
        if last is None or last["read_by"] != key or _changed(path, last):
            back = move_to_inbox(plant.workspace, path)
            asked = last is not None and last["read_by"] == ASKED
            plant.progress.line(
                Message(
                    "ingest.asked_again",
                    "  {file} was quarantined. A person asked for another try, so the factory ingests the file again",
                    file=back.name,
                )
                if asked
                else Message(
                    "ingest.readable_now",
                    "  {file} was quarantined. The file, the data policy or the reading code changed, so the factory tries the file again",
                    file=back.name,
                )
            )


def request_retry(ledger: Ledger, paths: Sequence[Path]) -> None:
    """Ask the daemon to try quarantined files again in its next pass, as it does after a change of the reading code."""
    known = read_shard_locations(ledger)
    with ledger.begin() as tx:
        for path in paths:
            if last := known.get((QUARANTINE, path.name)):  # a file that was never filed is tried anyway
                record_event(tx, SHARD_FILED, f"shard:{last['sha256'][:16]}", last | {"read_by": ASKED})


def _waits_to_be_filed(plant: Plant, copy: Path) -> bool:
    """Return whether ``copy`` in ``quarantine/`` is a copy of a file that is still in the inbox. Ingest makes the copy before it records the shard.
    The next pass moves the file."""
    prefix = PREFIX.match(copy.name)
    if not prefix:
        return False
    rows = plant.ledger.read("SELECT path FROM shards WHERE sha256 LIKE :prefix", prefix=f"{prefix[0][:-1]}%")
    if not rows:
        return any(
            filecmp.cmp(copy, path, shallow=False) for path in plant.workspace.inbox.glob("[!.]*") if path.is_file()
        )
    return any(Path(row["path"]).parent == plant.workspace.inbox and Path(row["path"]).exists() for row in rows)


def list_quarantined_files(workspace: Workspace) -> list[Path]:
    """Return the files in ``quarantine/``, sorted by name."""
    return [p for p in sorted(workspace.quarantine.glob("[!.]*")) if p.is_file() and not p.is_symlink()]


def move_to_inbox(workspace: Workspace, path: Path) -> Path:
    """Move a filed file to the inbox, under the name that it arrived with. Returns the new path."""
    back = _free(workspace, _plain(path.name))
    os.rename(path, back)
    return back


def _changed(path: Path, known: dict[str, Any]) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False  # a person removed the file
    return (status.st_size, status.st_mtime_ns) != (known["bytes"], known["mtime_ns"])


def _plain(name: str) -> str:
    """
    >>> _plain("0123456789abcdef-a.jsonl"), _plain("b.jsonl")
    ('a.jsonl', 'b.jsonl')
    """
    return PREFIX.sub("", name, count=1)


def _free(workspace: Workspace, name: str) -> Path:
    """Return a free path in the inbox. It has the given name if no other file has that name."""
    path = workspace.inbox / name
    return workspace.inbox / f"{time.time_ns()}-{name[-LONGEST_NAME:]}" if os.path.lexists(path) else path


FileStamp = tuple[int, ...]  # identifies a file's content: the stamp changes when the content changes
COMPLETE_AFTER_SECONDS = (
    600.0  # a file that has not changed for this long counts as complete, even if its last row is cut off
)
TAIL = 1 << 20  # bytes at the end of a file in which the last row is checked
ENDS = {  # by suffix: the bytes that a file begins and ends with
    ".parquet": b"PAR1",
    **dict.fromkeys((".arrow", ".feather", ".ipc"), b"ARROW1"),
}
ROWS = (".jsonl", ".ndjson", ".jsonlines", ".json")


def read_file_stamp(path: Path) -> FileStamp:
    """Return (size, mtime, ctime) of a file, with times in ns, or (inode,) of anything else. Raises: OSError."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return (status.st_ino,)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def find_writing_process(path: Path) -> str:
    """Name the process that has a file open for writing. Returns '' if no visible process has."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""  # ingest cannot open the file either, and reports why
    try:
        fcntl.fcntl(
            handle, fcntl.F_SETSIG, signal.SIGURG
        )  # the kernel sends this signal if a process opens the file now; the default, SIGIO, would end this process
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return ""
    except OSError as error:
        return _listed_writer(os.fstat(handle)) or ("a process" if error.errno == errno.EAGAIN else "")
    finally:
        os.close(handle)


def _listed_writer(wanted: os.stat_result) -> str:
    """Find the process that has the file open for writing, among the processes whose open files can be listed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for opened in (process / "fd").iterdir():
                found = opened.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and _writes(process, opened.name):
                    return f"process {process.name} ({(process / 'comm').read_text(errors='replace').strip()})"
        except OSError:
            continue  # the process ended, or is another user's
    return ""


def _writes(process: Path, descriptor: str) -> bool:
    flags = next(
        line for line in (process / "fdinfo" / descriptor).read_text().splitlines() if line.startswith("flags:")
    )
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def find_truncation(path: Path) -> Message | None:
    """Return how a file is cut off, or None if it is complete or its kind has no recognisable end.

    Raises: OSError.
    """
    return _cut_off(path, read_file_stamp(path))


@lru_cache(maxsize=256)
def _cut_off(path: Path, stamp: FileStamp) -> Message | None:
    """Do the work of ``find_truncation``. A compressed file is read completely, once for each ``stamp``."""
    kind, compression = detect_kind(path.name)
    if kind == ".zip":
        return (
            None
            if zipfile.is_zipfile(path)
            else Message("ingest.zip_open", "the table of contents at the end of the zip file is missing")
        )
    if not compression and kind in ENDS:
        with open(path, "rb") as file:
            head = file.read(len(ENDS[kind]))
            file.seek(max(0, stamp[0] - len(ENDS[kind])))
            is_stream = kind != ".parquet" and head != ENDS[kind]  # the end of an Arrow stream cannot be recognised
            if file.read() == ENDS[kind] or is_stream:
                return None
            return Message(
                "ingest.footer",
                "the {kind} footer at the end of the file is missing",
                kind="Parquet" if kind == ".parquet" else "Arrow",
            )
    if compression:
        from factory.ingest.reading.streams import decompress

        last = b""
        try:
            with open(path, "rb") as raw, decompress(raw, compression) as file:
                while block := file.read(TAIL):
                    last = (last + block)[-TAIL:]
        except EOFError:
            return _compression_cut_off()
        except OSError as error:  # waiting does not repair damage
            return _compression_cut_off() if "Truncated" in str(error) else None
        except (zlib.error, lzma.LZMAError):
            return None
    else:
        with open(path, "rb") as file:
            array = kind == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            file.seek(max(0, stamp[0] - TAIL))
            last = file.read(TAIL)
        if array:
            closed = last.rstrip().endswith(b"]")
            return None if closed else Message("ingest.array_open", "the JSON array is not closed yet")
    if kind == ".json" and last.rstrip().endswith((b"]", b"}")):
        return None
    return _last_row(last) if kind in ROWS else None


def _compression_cut_off() -> Message:
    return Message("ingest.compression_open", "the compressed data end too early")


def _last_row(tail: bytes) -> Message | None:
    """
    >>> _last_row(b'{"text": "a"}\\n'), _last_row(b'{"text": "a"}\\n{"text": "b"}')
    (None, None)
    >>> _last_row(b'{"text": "a"}\\n{"te')
    'the last row is cut off'
    """
    row = tail.rpartition(b"\n")[2]
    try:
        if row.strip():
            json.loads(row)
    except (ValueError, RecursionError):
        return Message("ingest.row_open", "the last row is cut off")
    return None
