"""The daemon's log ``logs/daemon.log``, as JSON lines, and the note of its current task, ``logs/doing.json``.

``LoggedProgress`` passes the daemon's lines on to the terminal and writes them to the log. A log that cannot be written, for example on a full
disk, does not stop the daemon. A log of ``FILE_BYTES`` is renamed to ``daemon.log.1``, and so on; the oldest file is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from factory.core.progress import Progress, ProgressTask
from factory.core.time_formats import format_duration, format_iso_time, format_local_time
from factory.core.untrusted_trainer_files import read_tail
from factory.core.workspace import Workspace
from factory.status.daemon_state import TASK_NOTE

NAME = "daemon.log"
FILE_BYTES = 4 << 20
FILES = 4
POLL_SECONDS = 0.2
LINE_BYTES = 1 << 14


class LoggedProgress:
    """A ``Progress`` that writes all lines and tasks to the log and passes them on to ``shown``."""

    def __init__(self, workspace: Workspace, shown: Progress) -> None:
        self.path, self.note, self.shown = workspace.logs / NAME, workspace.logs / TASK_NOTE, shown
        self._lock = threading.Lock()
        self._tasks: list[tuple[str, float]] = []
        self._doing()

    def line(self, text: str) -> None:
        self._write("said", text.strip())
        self.shown.line(text)

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[ProgressTask]:
        began = (title, time.time())
        self._write("began", title)
        with self._lock:
            self._tasks.append(began)
        self._doing()
        try:
            with self.shown.task(title, total) as task:
                yield task
        finally:
            with self._lock:
                self._tasks.remove(began)
            self._write("ended", title, seconds=round(time.time() - began[1], 3))
            self._doing()

    def _write(self, kind: str, text: str, **more: Any) -> None:
        printable = text[:LINE_BYTES].encode("utf-8", "backslashreplace").decode()
        entry = {"at": format_iso_time(time.time()), "process": os.getpid(), "kind": kind, "text": printable, **more}
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size + len(line) > FILE_BYTES:
                self._rotate()
            with open(self.path, "ab", buffering=0) as file:
                file.write(line)

    def _rotate(self) -> None:
        numbered = [self.path, *(self.path.with_name(f"{NAME}.{n}") for n in range(1, FILES))]
        for older, newer in zip(reversed(numbered), reversed(numbered[:-1])):
            if newer.exists():
                os.replace(newer, older)

    def _doing(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            title, since = self._tasks[-1] if self._tasks else ("", time.time())
            aside = self.note.with_name(f".{TASK_NOTE}")
            aside.write_text(json.dumps({"process": os.getpid(), "task": title, "since": since}))
            os.replace(aside, self.note)


def read_log_entries(workspace: Workspace, count: int, until: int | None = None) -> list[dict[str, Any]]:
    """The newest ``count`` entries of the log, oldest first. ``until``: read only this many bytes of the newest file."""
    found: list[dict[str, Any]] = []
    for path in (workspace.logs / NAME, *(workspace.logs / f"{NAME}.{n}" for n in range(1, FILES))):
        if len(found) < count:
            lines = read_tail(path, FILE_BYTES)[:until].split(b"\n")
            found = [entry for line in lines if (entry := _parsed(line))] + found
            until = None
    return found[-count:] if count else []


def follow_log_entries(workspace: Workspace, count: int) -> Iterator[dict[str, Any]]:
    """Yield the newest ``count`` entries, and then each new entry, without end. A file that is renamed meanwhile is read to its end first."""
    path = workspace.logs / NAME
    path.touch()
    file = open(path, "rb")  # noqa: SIM115 (open as long as it is the newest)
    yield from read_log_entries(workspace, count, until=file.seek(0, os.SEEK_END))
    rest = b""
    while True:
        renamed = path.exists() and not os.path.samestat(os.fstat(file.fileno()), path.stat())
        *lines, rest = (rest + file.read()).split(b"\n")  # nobody writes to a renamed file
        yield from (entry for line in lines if (entry := _parsed(line)))
        if renamed:
            file.close()
            file, rest = open(path, "rb"), b""  # noqa: SIM115
        else:
            time.sleep(POLL_SECONDS)


def format_log_entry(entry: dict[str, Any]) -> str:
    """A log entry as a line for a person."""
    at = str(entry.get("at", ""))
    with contextlib.suppress(ValueError):
        from datetime import datetime

        at = format_local_time(datetime.fromisoformat(at).timestamp())
    word = {"began": "begins: ", "ended": "ended: "}.get(str(entry.get("kind")), "")
    took = f" ({format_duration(entry['seconds'])})" if "seconds" in entry else ""
    return f"{at}  {word}{entry.get('text', '')}{took}"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None  # a line that was cut off or is half written
    return found if isinstance(found, dict) else None
