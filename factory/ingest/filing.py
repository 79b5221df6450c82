"""A file of the inbox: is it whole, where does it go once it is ingested, and what brings it back?

A shard's file is kept in ``shards/raw/``, or in ``quarantine/``; what shards were made of in ``shards/originals/``. The first two are looked at
again: a program that still had a file open, or wrote to it from another machine, changed it, and what is new is ingested as another shard. A
quarantined file comes back when its name or content, the data policy or the code that reads it changed.

It is whole when nobody writes to it any more, and it does not end in the middle of a row. A writer is seen by the kernel's read lease, which it
refuses while any process has the file open for writing; where a file system has no leases, by the open files of all processes that this one
may look at. What is written from another machine is seen by neither: the last row is looked at too.
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
from factory.ingest.reading.kinds import kind_of
from factory.ingest.reading_code import reading_key
from factory.ledger.files import FILED, filed, origins, packed
from factory.ledger.ledger import Ledger, record, shards
from factory.ledger.plant import Plant
from factory.ledger.removals import erased_shards, former_files
from kernels.contract.files import put_in_place, sync_folder
from trainer.contract.data.token_shard import file_sha256

LONGEST_NAME = 50  # characters, of four bytes at most
# Of the files that were filed last: each pass looks at them. By number, which no jump of the clock changes.
WATCHED = 4096
RAW, QUARANTINE = "shards/raw", "quarantine"
ORIGINALS = "shards/originals"  # of what became JSON lines before it was ingested
ASKED = "asked"  # ``read_by`` of a quarantined file that a person wants to be tried again
PREFIX = re.compile(r"[0-9a-f]{16}-(?=.)")  # of a filed file's name: of the SHA-256


def filed_name(sha256: str, path: Path) -> str:
    """Of a file that is moved out of the inbox, not too long for any file system."""
    return f"{sha256[:16]}-{path.name[-LONGEST_NAME:]}"


def file_away(plant: Plant, path: Path, sha256: str, state: str) -> None:
    """Move an ingested file to its place. Another file that got the same name meanwhile is found by its hash, and goes back."""
    folder = QUARANTINE if state == "quarantined" else RAW
    place = plant.workspace.root / folder / filed_name(sha256, path)
    place.parent.mkdir(parents=True, exist_ok=True)
    status = path.stat()
    detail = {"folder": folder, "name": place.name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    with plant.ledger.begin() as tx:
        tx.execute(shards.update().where(shards.c.sha256 == sha256).values(path=plant.ledger.inside(place)))
        record(tx, FILED, f"shard:{sha256[:16]}", detail | {"sha256": sha256, "read_by": reading_key(plant.workspace)})
    shutil.move(path, place)
    if path.exists() and path.samefile(place):  # two names of one file, which a rename leaves as they are
        path.unlink()
    if file_sha256(place) != sha256:
        shutil.move(place, plant.workspace.inbox / f"{time.time_ns()}-{path.name[-LONGEST_NAME:]}")


def file_original(plant: Plant, path: Path, reported: Container[str]) -> None:
    """Move a file of the inbox of which shards were made to its place: the shards, which hold its rows, are what is read again. One of which
    text was erased is not kept, and one that has a report of its own, among the SHA-256 ``reported``, could not be read to its end."""
    sha256 = file_sha256(path)
    if sha256 in reported:
        file_away(plant, path, sha256, "quarantined")
        return
    if {part["shard"] for part in packed(plant.ledger, sha256)} & set(erased_shards(plant.ledger)):
        path.unlink()
        return
    original = plant.workspace.root / ORIGINALS / filed_name(sha256, path)
    original.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, original)


def remove_originals(plant: Plant, shard: str) -> list[str]:
    """Delete what a shard was made of, once text of it is erased; returns lines for a person about what lies elsewhere."""
    said = []
    for one in origins(plant.ledger, shard):
        for path in (plant.workspace.root / ORIGINALS).glob(f"{one['sha256'][:16]}-*"):
            path.unlink()
            said.append(f"{one['name']}, of which the shard was made, is deleted too")
    return said


def return_changed(plant: Plant) -> None:
    """Files of ``shards/raw/`` whose content is no longer what was ingested go to the inbox again; what was ingested stays, where it can be told."""
    for (folder, name), known in filed(plant.ledger, WATCHED).items():
        path = plant.workspace.root / folder / name
        if folder != RAW or not _changed(path, known):
            continue
        sha256 = file_sha256(path)
        wanted = {known["sha256"], *former_files(plant.ledger, known["sha256"])}
        if sha256 not in wanted:
            kept = _split(plant.workspace, path, known, wanted)
            was = "what was ingested of it stays" if kept else "what was ingested of it is in its token shard alone"
            plant.progress.line(f"  {name} changed after it was ingested; it is in the inbox again, and {was}")
        if sha256 in wanted or kept:
            status = path.stat()
            with plant.ledger.begin() as tx:
                stamp = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
                record(tx, FILED, f"shard:{known['sha256'][:16]}", known | stamp)


def _split(workspace: Workspace, path: Path, known: dict[str, Any], wanted: Container[str]) -> bool:
    """Move a changed file to the inbox, itself and no copy: who has it open writes on there. Returns whether its first part, which was
    ingested, could be put in its place."""
    aside = path.with_name(f".{path.name}")
    with open(path, "rb") as source, open(aside, "wb") as target:
        left = known["bytes"]
        while left and (block := source.read(min(left, 1 << 22))):
            target.write(block)
            left -= len(block)
    kept = file_sha256(aside) in wanted
    back = _free(workspace, _plain(path.name))
    if kept:
        with contextlib.suppress(OSError):  # the inbox is on another file system
            os.link(path, back)
        if not back.exists():
            shutil.copy2(path, back)
        sync_folder(back)
        sync_folder(back.parent)  # before its content loses its other name
        put_in_place(aside, path)
    else:
        aside.unlink()
        shutil.move(path, back)
    return kept


def return_quarantined(plant: Plant) -> None:
    """Files of ``quarantine/`` that may be readable by now go to the inbox again."""
    there = quarantined_files(plant.workspace)
    known = filed(plant.ledger) if there else {}
    key = reading_key(plant.workspace) if there else ""
    for path in there:
        last = known.get((QUARANTINE, path.name))
        if last is None and _waits_to_be_filed(plant, path):
            continue
        if last is None or last["read_by"] != key or _changed(path, last):
            back = return_file(plant.workspace, path)
            why = "a person asked" if last and last["read_by"] == ASKED else "it or what reads it changed since"
            plant.progress.line(f"  {back.name} was quarantined, and {why}: it is tried again")


def ask_again(ledger: Ledger, paths: Sequence[Path]) -> None:
    """Have the daemon try quarantined files again in its next pass: as if what reads shards were another since they were filed."""
    known = filed(ledger)
    with ledger.begin() as tx:
        for path in paths:
            if last := known.get((QUARANTINE, path.name)):  # one that was never filed is tried anyway
                record(tx, FILED, f"shard:{last['sha256'][:16]}", last | {"read_by": ASKED})


def _waits_to_be_filed(plant: Plant, copy: Path) -> bool:
    """Was a copy made before its file could be put away, which the next pass does? The copy is made before the ledger knows of the shard."""
    prefix = PREFIX.match(copy.name)
    if not prefix:
        return False
    rows = plant.ledger.read("SELECT path FROM shards WHERE sha256 LIKE :prefix", prefix=f"{prefix[0][:-1]}%")
    if not rows:
        return any(
            filecmp.cmp(copy, path, shallow=False) for path in plant.workspace.inbox.glob("[!.]*") if path.is_file()
        )
    return any(Path(row["path"]).parent == plant.workspace.inbox and Path(row["path"]).exists() for row in rows)


def quarantined_files(workspace: Workspace) -> list[Path]:
    """What lies in ``quarantine/``, by name."""
    return [p for p in sorted(workspace.quarantine.glob("[!.]*")) if p.is_file() and not p.is_symlink()]


def return_file(workspace: Workspace, path: Path) -> Path:
    """Move a filed file to the inbox, under the name that it arrived with; returns where it is."""
    back = _free(workspace, _plain(path.name))
    os.rename(path, back)
    return back


def _changed(path: Path, known: dict[str, Any]) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False  # a person took it away
    return (status.st_size, status.st_mtime_ns) != (known["bytes"], known["mtime_ns"])


def _plain(name: str) -> str:
    """
    >>> _plain("0123456789abcdef-a.jsonl"), _plain("b.jsonl")
    ('a.jsonl', 'b.jsonl')
    """
    return PREFIX.sub("", name, count=1)


def _free(workspace: Workspace, name: str) -> Path:
    """A place in the inbox that no file has, of that name if it can be."""
    path = workspace.inbox / name
    return workspace.inbox / f"{time.time_ns()}-{name[-LONGEST_NAME:]}" if os.path.lexists(path) else path


Stamp = tuple[int, ...]  # of a file's content: another one, another content
STILL_SECONDS = 600.0  # without a change, after which a file is whole whatever its last row looks like
TAIL = 1 << 20  # bytes of the last row that are looked at
ENDS = {
    ".parquet": b"PAR1",
    **dict.fromkeys((".arrow", ".feather", ".ipc"), b"ARROW1"),
}  # with which such files begin and end
ROWS = (".jsonl", ".ndjson", ".jsonlines", ".json")


def stamp_of(path: Path) -> Stamp:
    """Size, times in ns of its content and of its name, owner and mode. Of what is no file: its inode. Raises: OSError."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return (status.st_ino,)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def writer_of(path: Path) -> str:
    """Who has a file open for writing, in words; '': nobody, as far as this process can see."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""  # what cannot be opened cannot be ingested either, which says why
    try:
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)  # for who opens it meanwhile; SIGIO would end this process
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return ""
    except OSError as error:
        return _listed_writer(os.fstat(handle)) or ("a process" if error.errno == errno.EAGAIN else "")
    finally:
        os.close(handle)


def _listed_writer(wanted: os.stat_result) -> str:
    """The process that has the file open for writing, of those whose open files can be read."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for opened in (process / "fd").iterdir():
                found = opened.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino) and _writes(process, opened.name):
                    return f"process {process.name} ({(process / 'comm').read_text(errors='replace').strip()})"
        except OSError:
            continue  # ended, or another user's
    return ""


def _writes(process: Path, descriptor: str) -> bool:
    flags = next(
        line for line in (process / "fdinfo" / descriptor).read_text().splitlines() if line.startswith("flags:")
    )
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def cut_off(path: Path) -> str:
    """Where a file ends too early, in words; '': it ends as a file of its kind does, or it is of a kind that cannot tell.

    Raises: OSError.
    """
    return _cut_off(path, stamp_of(path))


@lru_cache(maxsize=256)
def _cut_off(path: Path, stamp: Stamp) -> str:
    """Compressed files are read whole, once for each ``stamp``."""
    kind, compression = kind_of(path.name)
    if kind == ".zip":
        return "" if zipfile.is_zipfile(path) else "it has no directory of a zip file yet"
    if not compression and kind in ENDS:
        with open(path, "rb") as file:
            head = file.read(len(ENDS[kind]))
            file.seek(max(0, stamp[0] - len(ENDS[kind])))
            if file.read() == ENDS[kind] or (
                kind != ".parquet" and head != ENDS[kind]
            ):  # else an Arrow stream, which cannot tell
                return ""
            return "it has no Parquet footer yet" if kind == ".parquet" else "it has no Arrow footer yet"
    if compression:
        from factory.ingest.reading.streams import decompressed

        last = b""
        try:
            with open(path, "rb") as raw, decompressed(raw, compression) as file:
                while block := file.read(TAIL):
                    last = (last + block)[-TAIL:]
        except EOFError:
            return "its compressed data end too early"
        except OSError as error:  # what is damaged, waiting does not mend
            return "its compressed data end too early" if "Truncated" in str(error) else ""
        except (zlib.error, lzma.LZMAError):
            return ""
    else:
        with open(path, "rb") as file:
            array = kind == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
            file.seek(max(0, stamp[0] - TAIL))
            last = file.read(TAIL)
        if array:
            return "" if last.rstrip().endswith(b"]") else "its JSON array is not closed yet"
    if kind == ".json" and last.rstrip().endswith((b"]", b"}")):
        return ""
    return _last_row(last) if kind in ROWS else ""


def _last_row(tail: bytes) -> str:
    """
    >>> _last_row(b'{"text": "a"}\\n'), _last_row(b'{"text": "a"}\\n{"text": "b"}')
    ('', '')
    >>> _last_row(b'{"text": "a"}\\n{"te')
    'its last row is cut off'
    """
    row = tail.rpartition(b"\n")[2]
    try:
        if row.strip():
            json.loads(row)
    except (ValueError, RecursionError):
        return "its last row is cut off"
    return ""
