"""Provenance, in both directions: the fate of a document, and what a release was made of."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError, nearest
from factory.gates.release.licences import tokens_by_licence
from factory.ledger.ledger import Ledger, data_plans, documents, held_out, shards, token_shards
from factory.ledger.rows import ReleaseRow, SegmentRow, VerdictRow


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
    lines = SegmentRow.select(ledger)
    parents = {line.id: line.parent for line in lines}
    behind: dict[int, set[int]] = {}  # release → the segments that its model was trained in
    for release in ReleaseRow.select(ledger):
        segment: int | None = release.segment
        behind[release.number] = set()
        while segment is not None:
            behind[release.number].add(segment)
            segment = parents[segment]
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
        row["segments"] = [line.id for line in lines if line.data_plan in holding]
        row["releases"] = [number for number, trained in behind.items() if trained & set(row["segments"])]
        if row["fate"] == "held_out":
            row["held_out_as"] = ledger.one(
                sa.select(held_out.c.domain, held_out.c.source).where(held_out.c.key == row["key"])
            )
    return found


def of_release(ledger: Ledger, number: int) -> dict[str, Any]:
    """What a release was made of: verdict, segments with recipe, code and data plan, token shards, shards, document counts by domain, supervised
    tokens by licence ('' where documents name none).

    Raises: InputError that lists the releases when there is no such one.
    """
    release = ReleaseRow.get(ledger, number)
    verdict = VerdictRow.get(ledger, release.verdict)
    return {
        "release": vars(release),
        "verdict": verdict.only("outcome reasons against policy_sha256"),
    } | made_of(ledger, release.segment)


def made_of(ledger: Ledger, segment: int) -> dict[str, Any]:
    """What a segment's model was made of: the segments of its lineage, token shards with their shards, supervised tokens by licence."""
    steps = []
    used: dict[str, int] = {}
    for row in SegmentRow.lineage(ledger, segment):
        plan = ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=row.data_plan)[0]["plan"]
        used |= {shard["id"]: shard["generation"] for shard in plan["token_shards"]}
        kept = row.only("id kind parent first_step last_step recipe recipe_sha256 data_plan code_commit")
        averaged = (row.result or {}).get("averaged")
        steps.append(kept | ({"averaged": averaged} if averaged else {}))
    listed = ledger.rows(
        sa.select(*(token_shards.c[name] for name in ("id", "shard", "documents", "tokens", "domains")), shards.c.name)
        .join(shards, shards.c.sha256 == token_shards.c.shard).where(token_shards.c.id.in_(used)).order_by(token_shards.c.created_at)
    )  # fmt: skip
    return {
        "segments": steps,
        "shards": [row | {"generation": used[row["id"]]} for row in listed],
        "licences": tokens_by_licence(ledger, segment),
    }
