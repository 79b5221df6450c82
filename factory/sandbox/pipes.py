"""The unnamed files and pipes through which the factory and a starting sandbox exchange data."""

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

from factory.sandbox.filesystem_view import LAUNCHER_INSIDE

SETUP_SECONDS = 5.0  # bubblewrap starts its child within this time


def make_unnamed_file(data: bytes) -> IO[bytes]:
    """Return an unnamed file that contains ``data``, opened at its start."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the caller closes it)
    file.write(data)
    file.seek(0)
    return file


class SandboxPipes:
    """The files that bubblewrap inherits, and this process's ends of two pipes. All are closed after the ``with`` block.

    The pipe ``status`` brings bubblewrap's events. Through the pipe ``go`` the launcher gets a ".", for which it waits.
    """

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self.status, self.status_write = self._pipe()
        self.go_read, self.go = self._pipe()
        self._here, self.here_write = self._pipe()
        self._inherited = [self.status_write, self.go_read, self.here_write]

    def _pipe(self) -> list[IO[bytes]]:
        return [self._opened.enter_context(os.fdopen(end, mode, 0)) for end, mode in zip(os.pipe(), ("rb", "wb"))]

    def pass_data(self, data: bytes) -> int:
        """Make an unnamed file with ``data`` that bubblewrap inherits. Returns its descriptor's number."""
        self._inherited.append(self._opened.enter_context(make_unnamed_file(data)))
        return self._inherited[-1].fileno()

    def list_inherited_descriptors(self) -> list[int]:
        """Return the numbers of all descriptors that bubblewrap inherits."""
        return [file.fileno() for file in self._inherited]

    def close_inherited(self) -> None:
        """Close this process's descriptors of the inherited files."""
        for file in self._inherited:
            file.close()

    def copy_status_pipe(self) -> IO[bytes]:
        """Return a duplicate of this process's end of the status pipe, for a caller that reads events after the block."""
        return os.fdopen(os.dup(self.status.fileno()), "rb", 0)

    def start_command(self) -> None:
        """Wait until the launcher runs, then let it execute its command. After this call, bubblewrap dies with this process."""
        self._here.read(1)
        with contextlib.suppress(BrokenPipeError):
            self.go.write(b".")

    def __enter__(self) -> SandboxPipes:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()


class StatusPipe:
    """Reads bubblewrap's events, which are lines of JSON. An interrupted read loses nothing."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.buffer = bytearray(64 * 1024)  # far more than bubblewrap writes; unused bytes are zero

    def _more(self) -> bool:
        return os.readv(self.descriptor, [memoryview(self.buffer)[self.buffer.index(0) :]]) > 0

    def _lines(self) -> list[bytes]:
        """Return the complete lines read so far."""
        return bytes(self.buffer).split(b"\n")[:-1]

    def has_data(self) -> bool:
        """Return whether any byte was read."""
        return self.buffer[0] != 0

    def wait_for_child(self) -> int | None:
        """Wait for the process number of the namespace's init. Returns None if bubblewrap ended without starting it."""
        while not self._lines():
            if not self._more():
                return None
        return int(json.loads(self._lines()[0])["child-pid"])

    def read_all(self) -> list[dict[str, Any]]:
        """Wait until the other end of the pipe is closed. Returns all events."""
        while self._more():
            pass
        return [json.loads(line) for line in self._lines()]


def build_launcher_command(command: Sequence[str], rules: Mapping[str, object], pipes: SandboxPipes) -> list[str]:
    """Return the command line of the launcher, which applies ``rules`` to itself and then executes ``command``."""
    said = json.dumps({**rules, "go": pipes.go_read.fileno(), "here": pipes.here_write.fileno()})
    return [sys.executable, "-I", "-S", LAUNCHER_INSIDE, said, *map(str, command)]


def kill_sandbox_and_wait(status_pipe: StatusPipe) -> None:
    """Kill a starting or running sandbox, and wait until all its processes have ended.

    It is not enough to kill bubblewrap: during its set-up its child does not yet die with it, and an interrupt inside Popen leaves no handle of
    bubblewrap. So this function waits for the child's process number, which bubblewrap writes at once, or for the end of the pipe. A launcher that
    reads no "." ends by itself.
    """
    started = status_pipe.has_data() or select.select([status_pipe.descriptor], [], [], SETUP_SECONDS)[0]
    if started and (init := status_pipe.wait_for_child()) is not None:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(init)
            with os.fdopen(handle, "rb"):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [])
