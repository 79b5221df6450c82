"""What the ledger knows of files: events on those that the inbox keeps, that were filed, that retention removed, and on the disk they fill.

Read without SQLAlchemy: ``factory status`` reads them too.
"""

from __future__ import annotations

from typing import Any

from factory.ledger.rows import Reads

HELD = "file_held"  # {name, stamp, why, refused, read_by, deaths (of workers that read it)}: a file that stays in the inbox
FILED = "shard_filed"  # {folder, name, bytes, mtime_ns, sha256, read_by}: where a shard's file lies since
# {sha256 (of what was packed), name, origin (where it lay), files, part, first (row), rows, shard, last, read_by, left_out}: a shard was made of it
PACKED = "packed"
SMALL_VOCABULARY = "small_vocabulary"  # {by}: a person has the tokenizer trained on however little text there is
RETIRED = "retired"  # {path (relative to the workspace), kind, bytes, why}
MLFLOW_REMADE = "mlflow_remade"  # its database was lost, and is an older one or empty
DISK_LOW, DISK_WELL = "disk_low", "disk_well"  # {free, floor}, in bytes


def held(db: Reads) -> dict[str, dict[str, Any]]:
    """By file name, why it was last kept in the inbox, with ``at``, seconds since 1970, and ``event``, its number."""
    rows = db.read("SELECT id, at, detail FROM events WHERE kind = :kind ORDER BY id", kind=HELD)
    return {row["detail"]["name"]: row["detail"] | {"at": row["at"], "event": row["id"]} for row in rows}


def filed(db: Reads, most: int = -1) -> dict[tuple[str, str], dict[str, Any]]:
    """By folder and name, the newest record of each filed file. ``most``: so many of the newest records; -1: all."""
    sql = "SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC"
    rows = db.read(f"{sql} LIMIT :most", kind=FILED, most=most) if most >= 0 else db.read(sql, kind=FILED)
    return {(one["folder"], one["name"]): one for one in (row["detail"] for row in reversed(rows))}


def packed(db: Reads, sha256: str) -> list[dict[str, Any]]:
    """The shards that were made of a file, folder or group of files, in the order of their recording."""
    rows = db.read(
        "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id",
        kind=PACKED,
        subject=f"file:{sha256[:16]}",
    )
    return [row["detail"] for row in rows]


def origins(db: Reads, shard: str) -> list[dict[str, Any]]:
    """What a shard was made of, by its SHA-256: nothing, of a file that was ingested as it is."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=PACKED)
    return [row["detail"] for row in rows if row["detail"]["shard"] == shard]


def small_vocabulary(db: Reads) -> bool:
    """Did a person say that the tokenizer is trained on however little text there is?"""
    return bool(db.read("SELECT id FROM events WHERE kind = :kind LIMIT 1", kind=SMALL_VOCABULARY))


def retired(db: Reads) -> set[str]:
    """Paths, relative to the workspace, of everything that was removed; some of it may have been made again since."""
    return {row["detail"]["path"] for row in db.read("SELECT detail FROM events WHERE kind = :kind", kind=RETIRED)}


def low_disk(db: Reads) -> dict[str, Any] | None:
    """``free`` and ``floor`` as they were when the disk became too full to train, and ``at``; None: it is not."""
    sql = "SELECT at, kind, detail FROM events WHERE kind IN (:low, :well) ORDER BY id DESC LIMIT 1"
    newest = db.read(sql, low=DISK_LOW, well=DISK_WELL)
    return newest[0]["detail"] | {"at": newest[0]["at"]} if newest and newest[0]["kind"] == DISK_LOW else None
