"""Crash states: the contents of the disk when all processes are killed at an effect.

An undisturbed run stops before each of its effects, and the disk is read: a kill there would leave exactly this, since the writes of a killed
process stay. Effects with the same disk before them (after an fsync, a program's start, or a write to an uncommitted transaction) share one
state. Each state is kept once, and one recovery starts from it. In this way every effect is covered without a run for each.

Two disks are the same if they have files with the same names and bytes, links with the same targets, and databases with the same rows after
SQLite's own recovery. Times, permissions and the contents of unfinished files (``ASIDE``) are not compared: a half and a quarter of a checkpoint
are one state, as long as no recovery opens an unfinished file of another process. Each recovery is checked for that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.shim import Effect

# Paths with a hidden name, or below one: unfinished. A segment's folder without an owner is flushed, and set aside as a whole.
ASIDE = re.compile(r"plant/(?!worktrees/|segments/[^/]+/\.owner)(.*/)?\.[^/]+(/.*)?")
STORE = re.compile(r"\.db(\.new|\.restored)?$")
LOGS = ("-wal", "-journal")
MOST_TRIES, POLL_SECONDS = 50, 0.02
LEAST_SHARED = 4096  # bytes


@dataclass
class CrashState:
    digest: str
    effects: list[int]  # a kill before any of them leaves this state; the first number is the state's name

    @property
    def number(self) -> int:
        return self.effects[0]


@dataclass
class Crashes:
    """The crash states of a run, each in a folder below ``folder`` named by its number. They share files: copy them, never write to them."""

    folder: Path
    states: dict[str, CrashState] = field(default_factory=dict)  # by digest
    known: dict[str, str] = field(
        default_factory=dict
    )  # hash of the bytes of a database and its logs → hash of its rows

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._pool.mkdir(parents=True)

    @property
    def _pool(self) -> Path:
        return self.folder / "pool"

    def look(self, site: Path, number: int) -> None:
        """Record the state of the disk before effect ``number``. Programs in a sandbox do not stop, and may remove files during this."""
        for tries in range(MOST_TRIES):
            try:
                digest = self.digest(site)
                if digest not in self.states:
                    copy(site, self.folder / str(number))
                    self._share(self.folder / str(number))
                break
            except (FileNotFoundError, subprocess.CalledProcessError):
                if tries == MOST_TRIES - 1:
                    raise
                time.sleep(POLL_SECONDS)
        self.states.setdefault(digest, CrashState(digest, [])).effects.append(number)

    def of(self, number: int) -> CrashState:
        """Return the state that a kill before this effect leaves."""
        return next(state for state in self.states.values() if number in state.effects)

    def _share(self, state: Path) -> None:
        """Store files with the same bytes in several states only once; within one state each file stays separate."""
        seen = set()
        for path in (path for path in state.rglob("*") if path.is_file() and not path.is_symlink()):
            status = path.stat()
            name = f"{_sha256(str(path))}-{status.st_mode:o}-{status.st_mtime_ns}"
            if status.st_size < LEAST_SHARED or status.st_nlink > 1 or name in seen:
                continue
            seen.add(name)
            if (one := self._pool / name).exists():
                path.unlink()
                os.link(one, path)
            else:
                os.link(path, one)

    def digest(self, site: Path) -> str:
        """Return the SHA-256, in hexadecimal, that equal states have in common."""
        whole = hashlib.sha256()
        for path in sorted(self._entries(site)):
            status = os.lstat(path)
            kind, inside = stat.S_IFMT(status.st_mode), ""
            name = os.path.relpath(path, site)
            if kind == stat.S_IFLNK:
                inside = os.readlink(path)
            elif ASIDE.fullmatch(name):
                inside = ""
            elif STORE.search(path):
                inside = self._store(path)
            elif kind == stat.S_IFREG:
                inside = _sha256(path)
            whole.update(repr((name, kind, inside)).encode())
        return whole.hexdigest()

    def _entries(self, site: Path) -> list[str]:
        """Return all paths, without the logs of existing databases, which are read with their database."""
        found = []
        for folder, folders, files in os.walk(site):
            names = [*folders, *files]
            stores = {name for name in files if STORE.search(name)}
            parts = {name + ending for name in stores for ending in (*LOGS, "-shm")}
            found += [os.path.join(folder, name) for name in names if name not in parts]
        return found

    def _store(self, path: str) -> str:
        """What a database holds once SQLite has recovered it; its bytes where SQLite cannot read it."""
        logs = [path + ending for ending in LOGS if os.path.exists(path + ending)]
        raw = repr([(one[len(path) :], _sha256(one)) for one in (path, *logs)])
        if raw not in self.known:
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                for one in (path, *logs):
                    shutil.copyfile(one, os.path.join(scratch, os.path.basename(one)))
                try:
                    self.known[raw] = rows_of(Path(scratch) / os.path.basename(path))
                except sqlite3.DatabaseError:
                    self.known[raw] = raw
        return self.known[raw]


def left_aside(site: Path) -> set[str]:
    """Return the files that were unfinished when their writer died."""
    return {
        str(path)
        for path in site.rglob("*")
        if ASIDE.fullmatch(str(path.relative_to(site))) and path.is_file() and not path.is_symlink()
    }


def used(left: set[str], effects: Iterable[Effect], site: Path) -> list[str]:
    """Report the files of ``left`` that a run opened, or gave a visible name, before it removed or rewrote them."""
    left, found = set(left), []
    for effect in (one for one in effects if not one.error):
        below = {path for path in left if path == effect.path or path.startswith(f"{effect.path}/")}
        of = {"open": left & {effect.path}, "link": left & {effect.other}}.get(effect.kind, set())
        if effect.kind == "rename":
            hidden = ASIDE.fullmatch(os.path.relpath(effect.other, site))
            left |= {effect.other + path[len(effect.path) :] for path in below if hidden}
            of = set() if hidden else below
        found += [f"{effect.kind} of what another process left aside: {path}" for path in of]
        if effect.kind in ("unlink", "create", "truncate", "rename"):
            left -= below
    return found


def rows_of(path: Path) -> str:
    """Return the SHA-256 of the schema and of all rows of a database."""
    whole = hashlib.sha256(str(path.stat().st_size > 0).encode())
    with closing(sqlite3.connect(path)) as db:
        db.text_factory = bytes
        schema = db.execute("SELECT name, type, sql FROM sqlite_master ORDER BY name").fetchall()
        whole.update(
            repr(
                [schema, *(db.execute(f"PRAGMA {one}").fetchone() for one in ("user_version", "journal_mode"))]
            ).encode()
        )
        for name, kind, _ in schema:
            if kind == b"table":
                for row in db.execute(f'SELECT * FROM "{name.decode()}"'):
                    whole.update(repr(row).encode())
    return whole.hexdigest()


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(aside)], check=True)
    aside.rename(target)
