"""Reads events about files: files held in the inbox, filed shards, files that retention removed, and the disk's free space.

The functions do not use SQLAlchemy, because ``factory status`` calls them too and must start fast.
"""

from __future__ import annotations

from typing import Any

from factory.ledger.rows import SqlReader

# A file stays in the inbox: {name, stamp, why, refused, read_by, deaths (of workers that read the file)}
HELD = "file_held"
# A shard's file was moved to its folder: {folder, name, bytes, mtime_ns, sha256, read_by}
SHARD_FILED = "shard_filed"
# A shard was made from a file, a folder or a group of files:
# {sha256 (of the source), name, origin (its path), files, part, first (row), rows, shard, last, read_by, left_out}
PACKED = "packed"
SMALL_VOCABULARY = "small_vocabulary"  # {by}: a person allowed training of the tokenizer on a short text
RETIRED = "retired"  # retention removed a file: {path (relative to the workspace), kind, bytes, why}; for a run also {segment}
MLFLOW_REMADE = "mlflow_remade"  # MLflow's database was lost, and replaced by an older or an empty database
DISK_LOW, DISK_NORMAL = "disk_low", "disk_well"  # {free, floor}, in bytes


def read_waiting_inbox_files(db: SqlReader) -> dict[str, dict[str, Any]]:
    """Return the detail of the newest ``HELD`` event of each file by the file's name, with ``at`` (seconds since 1970) and ``event`` (the event's
    number)."""
    rows = db.read("SELECT id, at, detail FROM events WHERE kind = :kind ORDER BY id", kind=HELD)
    return {row["detail"]["name"]: row["detail"] | {"at": row["at"], "event": row["id"]} for row in rows}


def read_shard_locations(db: SqlReader, max_events: int = -1) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the detail of the newest ``SHARD_FILED`` event of each file by its folder and name. Only the newest ``max_events`` events are read (-1:
    all)."""
    sql = "SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC"
    rows = (
        db.read(f"{sql} LIMIT :most", kind=SHARD_FILED, most=max_events)
        if max_events >= 0
        else db.read(sql, kind=SHARD_FILED)
    )
    return {(one["folder"], one["name"]): one for one in (row["detail"] for row in reversed(rows))}


def list_shards_made_from(db: SqlReader, sha256: str) -> list[dict[str, Any]]:
    """Return the ``PACKED`` details of the shards that were made from a file, a folder or a group of files, oldest first. ``sha256`` is the
    source's."""
    rows = db.read(
        "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id",
        kind=PACKED,
        subject=f"file:{sha256[:16]}",
    )
    return [row["detail"] for row in rows]


def list_sources_of_shard(db: SqlReader, shard: str) -> list[dict[str, Any]]:
    """Return the ``PACKED`` details of the sources of a shard. ``shard`` is its SHA-256. The list is empty if its file was ingested unchanged."""
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id", kind=PACKED)
    return [row["detail"] for row in rows if row["detail"]["shard"] == shard]


def is_small_vocabulary_allowed(db: SqlReader) -> bool:
    """Return whether a person allowed a tokenizer trained on little text."""
    return bool(db.read("SELECT id FROM events WHERE kind = :kind LIMIT 1", kind=SMALL_VOCABULARY))


def list_paths_removed_by_retention(db: SqlReader) -> set[str]:
    """Return the paths, relative to the workspace, of all files that retention removed. Some may exist again."""
    return {row["detail"]["path"] for row in db.read("SELECT detail FROM events WHERE kind = :kind", kind=RETIRED)}


def find_low_disk(db: SqlReader) -> dict[str, Any] | None:
    """If the disk is too full to train, return ``free``, ``floor`` and ``at`` from the moment when it became so, else None."""
    sql = "SELECT at, kind, detail FROM events WHERE kind IN (:low, :well) ORDER BY id DESC LIMIT 1"
    newest = db.read(sql, low=DISK_LOW, well=DISK_NORMAL)
    return newest[0]["detail"] | {"at": newest[0]["at"]} if newest and newest[0]["kind"] == DISK_LOW else None
