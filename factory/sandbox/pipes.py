"""How the factory and a starting sandbox exchange data: files without a name, and the status pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from factory.sandbox.view import LAUNCHER_INSIDE

SETUP_SECONDS = 5.0  # that bubblewrap may take to start its child


def unnamed(data: bytes) -> IO[bytes]:
    """A file without a name that holds ``data``, positioned at its start."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the caller closes it)
    file.write(data)
    file.seek(0)
    return file


class Opening:
    """What bubblewrap inherits, and this process's ends of two pipes: its events come through ``status``, "." goes to the launcher through
    ``go``. Closed at the block's end."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self.status, self.status_write = self._pipe()
        self.go_read, self.go = self._pipe()
        self._here, self.here_write = self._pipe()
        self._inherited = [self.status_write, self.go_read, self.here_write]

    def _pipe(self) -> list[IO[bytes]]:
        return [self._opened.enter_context(os.fdopen(end, mode, 0)) for end, mode in zip(os.pipe(), ("rb", "wb"))]

    def given(self, data: bytes) -> int:
        """The number of a file with ``data`` that bubblewrap inherits."""
        self._inherited.append(self._opened.enter_context(unnamed(data)))
        return self._inherited[-1].fileno()

    def inherited(self) -> list[int]:
        return [file.fileno() for file in self._inherited]

    def close_inherited(self) -> None:
        for file in self._inherited:
            file.close()

    def keep_status(self) -> IO[bytes]:
        """The end of the events' pipe, for a caller who reads them after the block."""
        return os.fdopen(os.dup(self.status.fileno()), "rb", 0)

    def go_on(self) -> None:
        """The launcher may become its command, once it is there: only then does bubblewrap die with this process."""
        self._here.read(1)
        with contextlib.suppress(BrokenPipeError):
            self.go.write(b".")

    def __enter__(self) -> Opening:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()


class StatusPipe:
    """bubblewrap's events, lines of JSON. An interrupted read loses nothing."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.buffer = bytearray(64 * 1024)  # far more than it writes; zeros follow what was read

    def _more(self) -> bool:
        return os.readv(self.descriptor, [memoryview(self.buffer)[self.buffer.index(0) :]]) > 0

    def _lines(self) -> list[bytes]:
        """The complete lines read so far."""
        return bytes(self.buffer).split(b"\n")[:-1]

    def anything(self) -> bool:
        return self.buffer[0] != 0

    def child(self) -> int | None:
        """Wait for the process number of the namespace's init. None: bubblewrap ended without one."""
        while not self._lines():
            if not self._more():
                return None
        return int(json.loads(self._lines()[0])["child-pid"])

    def all(self) -> list[dict[str, Any]]:
        """All events; waits until the other end is closed."""
        while self._more():
            pass
        return [json.loads(line) for line in self._lines()]


def launched(command: Sequence[str], rules: Mapping[str, object], opening: Opening) -> list[str]:
    """The command line by which the launcher puts ``rules`` in force on itself and becomes ``command``."""
    said = json.dumps({**rules, "go": opening.go_read.fileno(), "here": opening.here_write.fileno()})
    return [sys.executable, "-I", "-S", LAUNCHER_INSIDE, said, *map(str, command)]


def kill_and_wait(events: StatusPipe) -> None:
    """Kill a starting or running sandbox and wait until the kernel has ended every process in it.

    It is not enough to kill bubblewrap: while it sets up, its child waits for it and does not yet die with it; and an interrupt inside Popen
    leaves no handle of it. So wait for the child's number, which is written at once, or for the end of the pipe, when it was not started.
    A launcher that reads no "." ends.
    """
    started = events.anything() or select.select([events.descriptor], [], [], SETUP_SECONDS)[0]
    if started and (init := events.child()) is not None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(init)
            with os.fdopen(handle, "rb"):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [])
