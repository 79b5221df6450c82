"""How the factory and a starting sandbox exchange data: files without a name, and the status pipe."""

from __future__ import annotations

import json
import os
import tempfile
from typing import IO, Any


def unnamed(data: bytes) -> IO[bytes]:
    """A file without a name that holds ``data``, positioned at its start."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the caller closes it)
    file.write(data)
    file.seek(0)
    return file


class StatusPipe:
    """The mechanism's events, lines of JSON. An interrupted read loses nothing."""

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
