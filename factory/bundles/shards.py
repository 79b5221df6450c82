"""Reads the training data of a release: its token shards and licences, and the documents that may be passed on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from factory.core.errors import InputError
from factory.gates.release.trained_licences import NONE, find_masked_documents
from factory.ingest.document import SYNTHETIC_PREFIX, read_author_model
from factory.ingest.rules.licence_claims import find_relicensed_documents
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.removals import replace_erased_token_shards
from factory.ledger.rows import SegmentRow
from factory.repairs.token_shards import find_token_shard_damage
from trainer.contract.data.token_shard import TokenShard

COUNTS = ("documents", "tokens", "supervised_tokens", "synthetic_tokens", "quarantined")


def read_token_shards_of_lineage(ledger: Ledger, segment: int) -> dict[str, dict[str, Any]]:
    """Return the token shards in the data plans of a segment and of all segments before it, by id.

    Each value is the entry of the newest plan, with the present path of the token shard.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in SegmentRow.read_lineage(ledger, segment):
        plan = ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=row.data_plan)[0]["plan"]
        found |= {shard["id"]: shard for shard in replace_erased_token_shards(ledger, plan)["token_shards"]}
    return found


def list_shard_rows(ledger: Ledger, segment: int, licences: LicenceRules, with_documents: bool) -> list[dict[str, Any]]:
    """Return a row for each token shard and licence: counts, whether the licence allows a release, and whether the bundle includes the documents.

    ``quarantined`` counts documents that were trained on, and quarantined or removed later. No bundle includes them.
    """
    used = read_token_shards_of_lineage(ledger, segment)
    moved = find_relicensed_documents(ledger, licences)
    sql = f"""SELECT d.key, d.token_shard, d.shard, s.name, s.bytes, d.license, 1 AS documents, d.tokens, d.supervised_tokens,
        CASE WHEN d.detail LIKE '{SYNTHETIC_PREFIX}%' THEN d.supervised_tokens ELSE 0 END AS synthetic_tokens,
        CASE WHEN d.fate <> 'train' THEN 1 ELSE 0 END AS quarantined
        FROM documents d JOIN shards s ON s.sha256 = d.shard WHERE d.token_shard IS NOT NULL"""
    sums = ", ".join(f"SUM({name}) AS {name}" for name in COUNTS)
    groups = f"SELECT token_shard, shard, name, bytes, license, {sums} FROM ({sql}) AS d GROUP BY token_shard, shard, name, bytes, license"
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in ledger.read(groups):
        _add(found, row, row["license"], 1)
    masked = find_masked_documents(ledger, segment)
    for key in masked:
        for row in ledger.read(f"{sql} AND d.key = :key", key=key):
            _add(found, row, row["license"], -1)
    for key, conflict in moved.items():  # a text that arrived under several licences
        if key in masked:
            continue
        for row in ledger.read(f"{sql} AND d.key = :key", key=key):
            _add(found, row, row["license"], -1)
            _add(found, row, conflict.find_effective_licence(licences), 1)
    rows = []
    for (number, licence), row in sorted(found.items()):
        if number in used and row["documents"]:
            allowed = licences.find_licence(licence or None).release
            rows.append(
                {
                    "token_shard": number,
                    "generation": used[number]["generation"],
                    "shard": row["name"],
                    "shard_sha256": row["shard"],
                    "shard_bytes": int(row["bytes"]),
                    "license": licence or NONE,
                    "releasable": allowed,
                    "included": allowed and with_documents,
                    **{name: row[name] for name in COUNTS},
                }
            )
    return rows


def _add(found: dict[tuple[str, str], dict[str, Any]], row: dict[str, Any], licence: str | None, sign: int) -> None:
    """Add a row's counts to the totals of its token shard and ``licence``. With ``sign`` -1, subtract them."""
    named = {name: row[name] for name in ("name", "shard", "bytes")}
    into = found.setdefault((row["token_shard"], licence or ""), named | dict.fromkeys(COUNTS, 0))
    for name in COUNTS:
        into[name] += sign * int(row[name])


def read_releasable_documents(
    root: Path, ledger: Ledger, tokenizer: Tokenizer, segment: int, licences: LicenceRules
) -> Iterator[dict[str, Any]]:
    """Yield the documents that a segment was trained on and that may be passed on by their licence. The text is what the trainer read.

    Quarantined documents are left out. Raises: InputError for a token shard that is missing or damaged.
    """
    moved = find_relicensed_documents(ledger, licences)
    for number, place in read_token_shards_of_lineage(ledger, segment).items():
        if fault := find_token_shard_damage(root / place["path"], deep=True):
            raise InputError(
                "shards.damaged",
                "{fault}. Its documents cannot be put into the bundle. Stop 'factory run', then repair it: 'factory check --repair'",
                fault=fault,
            )
        shard = TokenShard(root / place["path"])
        sql = "SELECT key, domain, source, license, detail FROM documents WHERE token_shard = :shard AND fate = 'train'"
        kept = {row["key"]: row for row in ledger.read(sql, shard=number)}
        for key in kept.keys() & moved.keys():
            kept[key]["license"] = moved[key].find_effective_licence(licences) or None
        for row in shard.documents.to_pylist():
            if row["key"] in kept and licences.find_licence(kept[row["key"]]["license"]).release:
                start, stop = row["start"], row["start"] + row["length"]
                ids, mask = shard.tokens[start:stop].astype(np.int64), shard.read_loss_mask(start, stop)
                own = kept[row["key"]]
                named = {name: own[name] for name in ("domain", "source", "license")}
                named["synthetic_by"] = read_author_model(own["detail"])
                yield {
                    "id": row["id"],
                    **tokenizer.decode_document(ids, mask),
                    **{key: value for key, value in named.items() if value},
                }


def to_json_line(value: Any) -> str:
    """Return a value as one line of JSON Lines, including the line end."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
