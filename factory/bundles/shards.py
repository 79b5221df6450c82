"""What a release was trained on: every token shard and licence, and, where it is asked for, the documents that may be handed on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factory.core.errors import InputError
from factory.gates.release.licences import NONE
from factory.ingest.rules.policy import Licences
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.repairs.token_shards import token_shard_fault
from trainer.contract.data.token_shard import TokenShard


def planned_shards(ledger: Ledger, segment: int) -> dict[str, dict[str, Any]]:
    """By id, the token shards in the data plans of a segment and of all before it, as the newest of them has each."""
    found: dict[str, dict[str, Any]] = {}
    for row in SegmentRow.lineage(ledger, segment):
        plan = ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=row.data_plan)[0]["plan"]
        found |= {shard["id"]: shard for shard in plan["token_shards"]}
    return found


def shard_rows(ledger: Ledger, segment: int, licences: Licences, with_documents: bool) -> list[dict[str, Any]]:
    """A row for each token shard and licence: how much of it there is, whether it may be handed on, whether it is in this bundle."""
    used = planned_shards(ledger, segment)
    sql = """SELECT d.token_shard, d.shard, s.name, s.bytes, d.license, COUNT(*) AS documents, SUM(d.tokens) AS tokens,
        SUM(d.supervised_tokens) AS supervised_tokens, SUM(CASE WHEN d.fate = 'quarantined' THEN 1 ELSE 0 END) AS quarantined
        FROM documents d JOIN shards s ON s.sha256 = d.shard
        WHERE d.fate IN ('train', 'quarantined') AND d.token_shard IS NOT NULL
        GROUP BY d.token_shard, d.shard, s.name, s.bytes, d.license ORDER BY d.token_shard, d.license"""
    rows = []
    for row in ledger.read(sql):
        if row["token_shard"] not in used:
            continue
        allowed = licences.of(row["license"]).release
        rows.append(
            {
                "token_shard": row["token_shard"],
                "generation": used[row["token_shard"]]["generation"],
                "shard": row["name"],
                "shard_sha256": row["shard"],
                "shard_bytes": int(row["bytes"]),
                "license": row["license"] or NONE,
                "releasable": allowed,
                "included": allowed and with_documents,
                **{name: int(row[name]) for name in ("documents", "tokens", "supervised_tokens", "quarantined")},
            }
        )
    return rows


def releasable_documents(
    root: Path, ledger: Ledger, tokenizer: Tokenizer, segment: int, licences: Licences
) -> Iterator[dict[str, Any]]:
    """The documents that it was trained on, as they were trained on, and whose licence lets them be handed on; none that is quarantined.

    Raises: InputError for a token shard that is gone or damaged.
    """
    for place in planned_shards(ledger, segment).values():
        if fault := token_shard_fault(root / place["path"], deep=True):
            raise InputError(f"{fault}: its documents cannot be handed on; 'factory doctor --repair' makes it again")
        shard = TokenShard(root / place["path"])
        sql = "SELECT key, license FROM documents WHERE token_shard = :shard AND fate = 'train'"
        kept = {row["key"]: row["license"] for row in ledger.read(sql, shard=shard.id)}
        for row in shard.documents.to_pylist():
            if row["key"] in kept and licences.of(kept[row["key"]]).release:
                ids = shard.tokens[row["start"] : row["start"] + row["length"]].astype(np.int64)
                named = {"domain": row["domain"], "source": row["source"], "license": kept[row["key"]]}
                yield {
                    "id": row["id"],
                    **_content(tokenizer, ids),
                    **{key: value for key, value in named.items() if value},
                }


def _content(tokenizer: Tokenizer, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
    """A document from its tokens, as ``factory ingest`` reads one."""
    if tokenizer.start_token not in ids:
        return {"text": tokenizer.decode(ids)}
    starts, stops = np.flatnonzero(ids == tokenizer.start_token), np.flatnonzero(ids == tokenizer.stop_token)
    turns = (tokenizer.decode(ids[a + 1 : b]).split("\n", 1) for a, b in zip(starts, stops, strict=True))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def json_line(value: Any) -> str:
    """One line of JSON Lines."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
