"""What should be served: the champion of the ledger, which is the only source of truth. A rollback is one more event there."""

from __future__ import annotations

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


def read_champion(workspace: Workspace) -> Champion | None:
    """None before the first release. Raises: WorkspaceError when the ledger cannot be read."""
    row = champion(Reader(workspace))
    return Champion(row.number, Path(row.export_path), row.export_sha256) if row else None
