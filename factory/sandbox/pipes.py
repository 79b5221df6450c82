"""What the factory and its sandbox tell one another while a sandbox starts: files without a name, and its status pipe."""

from __future__ import annotations

import json
import os
import tempfile
from typing import IO, Any


def unnamed(data: bytes) -> IO[bytes]:
    """A file without a name, at its beginning."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (the caller closes it)
    file.write(data)
    file.seek(0)
    return file


class Told:
    """What the mechanism tells on its status pipe: lines of JSON. What was read is kept, also by an interrupted read."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.buffer = bytearray(64 * 1024)  # far more than it tells; zeros follow what was read

    def _more(self) -> bool:
        return os.readv(self.descriptor, [memoryview(self.buffer)[self.buffer.index(0) :]]) > 0

    def _lines(self) -> list[bytes]:
        """Whole ones."""
        return bytes(self.buffer).split(b"\n")[:-1]

    def anything(self) -> bool:
        return self.buffer[0] != 0

    def child(self) -> int | None:
        """The namespace's init, by its number here; waits for it. None: bubblewrap ended without one."""
        while not self._lines():
            if not self._more():
                return None
        return int(json.loads(self._lines()[0])["child-pid"])

    def all(self) -> list[dict[str, Any]]:
        """Every event, once its other end is closed."""
        while self._more():
            pass
        return [json.loads(line) for line in self._lines()]
