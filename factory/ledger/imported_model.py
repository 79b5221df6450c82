"""Reads from the ledger what was imported: the source of the model with which a workspace began, its licence, and whether the import is finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from factory.core.errors import ConfigError
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, SegmentRow, SqlReader, Subject


@dataclass(frozen=True)
class ImportedLicence:
    """The licence of an imported model. ``name`` is '' if no file names it. ``origin``: the file or option that names it."""

    name: str = ""
    origin: str = ""
    text: str = ""  # of the licence's file, if there is one


# Events of the first training: the rate that a range test found (the fields of ``FoundRate``), or why there is none ({reason: a message as JSON}).
RATE_FOUND, RATE_NOT_SEARCHED = "rate_found", "rate_not_searched"


def find_import(db: SqlReader) -> SegmentRow | None:
    """The segment of the imported model; None if the workspace has none."""
    return SegmentRow.find_first(db, "WHERE kind = :kind ORDER BY id", kind=IMPORT)


def read_import_plan(db: SqlReader, number: int) -> dict[str, Any]:
    """What was recorded about the source of an imported model before its weights were read: place, name, files, licence, family."""
    sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
    return dict(db.read(sql, subject=str(Subject("segment", number)))[0]["detail"]["import"])


def find_imported_licence(db: SqlReader, segment: int | None = None) -> ImportedLicence | None:
    """The licence of the model from which a segment descends (None: of the workspace's model). None if no model was imported."""
    row = SegmentRow.read_lineage(db, segment)[0] if segment is not None else find_import(db)
    if row is None or row.kind != IMPORT:
        return None
    return ImportedLicence(**read_import_plan(db, row.id)["licence"])


def refuse_unfinished_import(plant: Plant) -> None:
    """Raises: ConfigError if the workspace is to begin with an imported model, and the import is not finished."""
    place = plant.workspace.config.import_from
    row = find_import(plant.ledger) if place else None
    if place and (row is None or row.state != "done"):
        raise ConfigError(
            "imported_model.not_finished", "This workspace begins with the model in {place}, and the import is not finished. Run 'factory init "
            "--from {place} -w {workspace}'.", place=place, workspace=plant.workspace.root,
        )  # fmt: skip
