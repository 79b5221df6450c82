"""Reads the release to serve from the ledger. Only the ledger decides which release is champion: a rollback is one more event in it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import InputError
from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import find_champion
from kernels.contract.message import Message


@dataclass(frozen=True)
class Champion:
    """The release to serve, and its export."""

    release: int
    export: Path
    export_sha256: str  # recorded in the ledger when the export was judged

    def check_export(self) -> None:
        """Raises: InputError when the export is missing or differs in a byte from the judged export."""
        found = hash_export_folder(self.export)
        if found != self.export_sha256:
            raise InputError(
                "serving.export_changed",
                "{export} differs from the released export (sha256 {found:.12}…, recorded {recorded:.12}…). Restore "
                "the export, or run 'factory release --rollback N'.",
                export=self.export, found=found, recorded=self.export_sha256,
            )  # fmt: skip


class ExportWatch:
    """Notices changes of the served export. After a change, the running engine still has the old weights in memory, but no new engine can start."""

    def __init__(self, champion: Champion) -> None:
        self._champion = champion
        self._seen: list[tuple[str, int, int, int]] = []
        self.problem = ""

    def check_export(self) -> None:
        """Raises: InputError or OSError, as ``Champion.check_export`` does."""
        self._seen = _signature(self._champion.export)
        self._champion.check_export()

    def has_new_problem(self) -> bool:
        """Return whether there is a new ``problem``. The files are read only if a size, a time or an inode has changed."""
        if _signature(self._champion.export) == self._seen:
            return False
        before, self.problem = self.problem, ""
        try:
            self.check_export()
        except (InputError, OSError) as error:
            self.problem = Message(
                "serving.served_from_memory",
                "The server continues to serve release {release} from memory. {error}",
                release=self._champion.release,
                error=error,
            )
        return bool(self.problem) and self.problem != before


def _signature(folder: Path) -> list[tuple[str, int, int, int]]:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return found


def read_champion(workspace: Workspace) -> Champion | None:
    """Return the champion; None before the first release. Raises: WorkspaceError if the ledger cannot be read."""
    row = find_champion(LedgerReader(workspace))
    return Champion(row.number, Path(row.export_path), row.export_sha256) if row else None
