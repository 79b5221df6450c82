"""Both ways through the ledger: what became of a document, and what a release was made of."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError, nearest
from factory.ledger.ledger import (
    Ledger,
    candidates,
    data_plans,
    documents,
    held_out,
    releases,
    segments,
    shards,
    token_shards,
    verdicts,
)

SEGMENT_KEYS = (
    "id", "kind", "parent", "first_step", "last_step", "recipe", "recipe_sha256", "data_plan", "code_commit",
)  # fmt: skip


def of_document(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    """Every document with that id or key: its shard, fate, what it matched, and the segments and releases that could train on it.

    Raises: InputError that names near ids when there is none.
    """
    found = ledger.rows(
        sa.select(documents).where((documents.c.id == name) | (documents.c.key == name)).order_by(documents.c.key)
    )
    if not found:
        part = name.rsplit("/", 1)[-1][:40]
        near = [
            row["id"]
            for row in ledger.rows(
                sa.select(documents.c.id).where(documents.c.id.contains(part, autoescape=True)).limit(200)
            )
        ]
        raise InputError(f"no document {name!r} was ever ingested" + (nearest(name, near[:8]) if near else ""))
    plans = ledger.rows(sa.select(data_plans))
    lines = ledger.rows(
        sa.select(segments.c.id, segments.c.kind, segments.c.data_plan, segments.c.state).order_by(segments.c.id)
    )
    for row in found:
        shard = ledger.one(
            sa.select(shards.c.name, shards.c.state, shards.c.path).where(shards.c.sha256 == row["shard"])
        )
        row["shard_name"] = shard and shard["name"]
        if row["matched"]:
            other = ledger.one(
                sa.select(documents.c.id, documents.c.shard, documents.c.fate).where(documents.c.key == row["matched"])
            )
            row["matched_document"] = other
        holding = {
            plan["id"] for plan in plans if row["token_shard"] in {s["id"] for s in plan["plan"]["token_shards"]}
        }
        row["segments"] = [line["id"] for line in lines if line["data_plan"] in holding]
        row["releases"] = [
            r["number"]
            for r in ledger.rows(sa.select(releases.c.number))
            if {s["id"] for s in _lineage_of_release(ledger, r["number"])} & set(row["segments"])
        ]
        if row["fate"] == "held_out":
            row["held_out_as"] = ledger.one(
                sa.select(held_out.c.domain, held_out.c.source).where(held_out.c.key == row["key"])
            )
    return found


def lineage_of(ledger: Ledger, segment: int) -> list[dict[str, Any]]:
    """The rows of a segment and all its ancestors, oldest first."""
    rows: list[dict[str, Any]] = []
    wanted: int | None = segment
    while wanted is not None and (row := ledger.one(sa.select(segments).where(segments.c.id == wanted))):
        rows.insert(0, row)
        wanted = row["parent"]
    return rows


def _lineage_of_release(ledger: Ledger, release: int) -> list[dict[str, Any]]:
    """Raises: InputError that lists the releases when there is none with this number."""
    row = ledger.one(
        sa.select(candidates.c.segment)
        .join(releases, releases.c.candidate == candidates.c.id)
        .where(releases.c.number == release)
    )
    if row is None:
        known = [str(r["number"]) for r in ledger.rows(sa.select(releases.c.number).order_by(releases.c.number))]
        raise InputError(f"no release {release}; there {'are: ' + ', '.join(known) if known else 'is none yet'}")
    return lineage_of(ledger, row["segment"])


def of_release(ledger: Ledger, number: int) -> dict[str, Any]:
    """What a release was made of: verdict, segments with recipe, code and data plan, token shards, shards, document counts by domain."""
    lineage = _lineage_of_release(ledger, number)
    release = ledger.one(sa.select(releases).where(releases.c.number == number))
    assert release is not None
    verdict = ledger.one(
        sa.select(verdicts.c.outcome, verdicts.c.reasons, verdicts.c.against, verdicts.c.policy_sha256).where(
            verdicts.c.id == release["verdict"]
        )
    )
    steps = []
    used: dict[str, int] = {}
    for row in lineage:
        plan = ledger.one(sa.select(data_plans.c.plan).where(data_plans.c.id == row["data_plan"]))
        assert plan is not None
        used |= {s["id"]: s["generation"] for s in plan["plan"]["token_shards"]}
        averaged = (row["result"] or {}).get("averaged")
        steps.append({key: row[key] for key in SEGMENT_KEYS} | ({"averaged": averaged} if averaged else {}))
    listed = ledger.rows(
        sa.select(*(token_shards.c[name] for name in ("id", "shard", "documents", "tokens", "domains")), shards.c.name)
        .join(shards, shards.c.sha256 == token_shards.c.shard).where(token_shards.c.id.in_(used)).order_by(token_shards.c.created_at)
    )  # fmt: skip
    return {
        "release": release,
        "verdict": verdict,
        "segments": steps,
        "shards": [row | {"generation": used[row["id"]]} for row in listed],
    }
