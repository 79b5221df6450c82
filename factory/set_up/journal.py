"""Run commands with progress: all their lines go to a log, the important ones to the terminal, and after a silence their state."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

EVERY = 5.0  # seconds of silence before a line of progress
LONGEST_ERROR = 60  # lines
ERROR = re.compile(r"\s*(ERROR|error|fatal|E):|Traceback")


class SetUpError(Exception):
    """What prevents the set-up, and what to do about it."""


@dataclass(frozen=True)
class Journal:
    """``say`` prints a line; ``log`` is a file, locked while a set-up runs."""

    log: IO[str]
    say: Callable[[str], None]

    def follow(
        self,
        commands: Sequence[Sequence[str]],
        state: Callable[[], str],
        hear: Callable[[str], str] = lambda line: "",
        environment: dict[str, str] | None = None,
    ) -> int:
        """Run the commands at the same time. Prints what ``hear`` returns for each of their lines, and ``state()`` after ``EVERY``
        seconds of silence. Returns the largest exit status."""
        lines: queue.Queue[str | None] = queue.Queue()
        running: list[subprocess.Popen[str]] = []
        try:
            for command in commands:
                self.log.write(f"$ {' '.join(command)}\n")
                running.append(self._start(command, environment))
                threading.Thread(target=_read, args=(running[-1], lines), daemon=True).start()
            self._listen(len(running), lines, state, hear)
            return max(abs(process.wait()) for process in running)
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()

    def _start(self, command: Sequence[str], environment: dict[str, str] | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=[self.log.fileno()],  # an orphan holds the lock while it writes
        )

    def _listen(
        self,
        pipes: int,
        lines: queue.Queue[str | None],
        state: Callable[[], str],
        hear: Callable[[str], str],
    ) -> None:
        said = time.monotonic()
        while pipes:
            line: str | None = ""
            with suppress(queue.Empty):
                line = lines.get(timeout=max(0.0, said + EVERY - time.monotonic()))
            if line is None:
                pipes -= 1
                continue
            self.log.write(line)
            text = hear(line.rstrip()) if line else ""
            if not text and time.monotonic() - said >= EVERY:
                text = state()
            if text:
                self.say(f"  {text}")
                said = time.monotonic()

    def fail(self, what: str, advice: str = "") -> NoReturn:
        """Raises: SetUpError with the last command's output from its first error on, without warnings."""
        text = Path(self.log.name).read_text(errors="replace")
        lines = [
            line for line in text.rpartition("\n$ ")[2].splitlines()[1:] if not line.lstrip().startswith("WARNING")
        ]
        errors = (number for number, line in enumerate(lines) if ERROR.match(line))
        shown = lines[next(errors, max(len(lines) - 20, 0)) :][-LONGEST_ERROR:]
        todo = advice or "when that is solved, run the same command again: it goes on from here"
        raise SetUpError(
            "\n".join([*(f"  {line}" for line in shown), f"{what} (the whole output: {self.log.name}); {todo}"])
        )


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


def bytes_in(folder: Path) -> int:
    """The size of all files under it."""
    total, folders = 0, [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total
