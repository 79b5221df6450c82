"""What should be served: the champion of the ledger, which is the only source of truth. A rollback is one more event there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.core.exports import folder_sha256
from factory.core.workspace import Workspace
from factory.ledger.reader import Reader
from factory.ledger.rows import champion


@dataclass(frozen=True)
class Champion:
    release: int
    export: Path
    export_sha256: str  # of the ledger: what was judged

    def check(self) -> None:
        """Raises: InputError when the export is missing or not, byte for byte, what was judged."""
        found = folder_sha256(self.export)
        if found != self.export_sha256:
            raise InputError(
                f"{self.export} is not what was released (sha256 {found[:12]}…, recorded {self.export_sha256[:12]}…): restore it, "
                "or 'factory release --rollback N'"
            )


class ExportWatch:
    """Notices that the export of what is served was changed. The engine has what it read in memory, but no other can be started."""

    def __init__(self, champion: Champion) -> None:
        self._champion = champion
        self._seen: list[tuple[str, int, int, int]] = []
        self.problem = ""

    def check(self) -> None:
        """Raises: InputError, OSError, as ``Champion.check``."""
        self._seen = _signature(self._champion.export)
        self._champion.check()

    def look(self) -> bool:
        """Is there a new ``problem``? Reads the files only when the size, time or number of one changed since the last look."""
        if _signature(self._champion.export) == self._seen:
            return False
        before, self.problem = self.problem, ""
        try:
            self.check()
        except (InputError, OSError) as error:
            self.problem = f"release {self._champion.release} is served from memory: {error}"
        return bool(self.problem) and self.problem != before


def _signature(folder: Path) -> list[tuple[str, int, int, int]]:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return found


def read_champion(workspace: Workspace) -> Champion | None:
    """None before the first release. Raises: WorkspaceError when the ledger cannot be read."""
    row = champion(Reader(workspace))
    return Champion(row.number, Path(row.export_path), row.export_sha256) if row else None
