"""What data there is: documents and tokens by shard, domain, source and licence, and what was taken out."""

from __future__ import annotations

from typing import Any

from factory.data.selecting import NOUNS
from factory.ingest.rules.claims import conflicts
from factory.ledger.ledger import Ledger
from factory.ledger.removals import FATE, NO_LICENCE, removals

USED = "SUM(CASE WHEN d.fate = 'train' THEN {} ELSE 0 END)"
GROUPS = {"domain": "d.domain", "source": "d.source", "license": "d.license"}


def listed(ledger: Ledger, most: int) -> dict[str, Any]:
    """``shards``, ``domain``, ``source`` and ``license`` (the ``most`` largest of each, by tokens to train on), ``licence_conflicts``
    (how many documents), ``removals``."""
    counts = ", ".join(
        [
            f"{USED.format('1')} AS documents",
            f"{USED.format('d.tokens')} AS tokens",
            f"{USED.format('d.supervised_tokens')} AS supervised_tokens",
            "SUM(CASE WHEN d.fate = 'held_out' THEN 1 ELSE 0 END) AS held_out",
            f"SUM(CASE WHEN d.fate = '{FATE}' THEN 1 ELSE 0 END) AS removed",
        ]
    )
    shards = ledger.read(
        f"SELECT s.name, s.sha256, s.state, {counts} FROM shards s LEFT JOIN documents d ON d.shard = s.sha256 "
        "GROUP BY s.name, s.sha256, s.state, s.ingested_at ORDER BY s.ingested_at"
    )
    found: dict[str, Any] = {"shards": shards}
    for name, column in GROUPS.items():
        found[name] = ledger.read(
            f"SELECT {column} AS name, {counts} FROM documents d WHERE d.fate <> 'dropped' GROUP BY {column} "
            "ORDER BY tokens DESC, name LIMIT :most",
            most=most,
        )
    differing = conflicts(ledger)
    found["licence_conflicts"] = {"documents": len(differing), "settled": sum(one.settled for one in differing)}
    found["removals"] = [vars(one) for one in removals(ledger)]
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """``listed`` for a person."""
    said = []
    for group, rows in found.items():
        if group in ("removals", "licence_conflicts"):
            continue
        for row in rows:
            name = row["name"] or (NO_LICENCE if group == "license" else "–")
            extra = [f"{row['held_out']:,} held out"] if row["held_out"] else []
            extra += [f"{row['removed']:,} removed"] if row["removed"] else []
            extra += [row["state"]] if row.get("state") == "quarantined" else []
            noun = NOUNS.get(group, group.removesuffix("s"))
            said.append(
                f"{noun:<8} {name:<32} {row['documents']:>9,} documents {row['tokens']:>13,} tokens "
                f"{row['supervised_tokens']:>13,} with loss{'; ' if extra else ''}{', '.join(extra)}"
            )
    if count := found["licence_conflicts"]["documents"]:
        settled = found["licence_conflicts"]["settled"]
        said.append(
            f"licences {count:,} documents came under several, {settled:,} of them settled: 'factory data claims'"
        )
    for row in found["removals"]:
        named = (
            f"{len(row['names'])} documents"
            if row["column"] == "key"
            else f"{NOUNS[row['column']]} {', '.join(row['names'])}"
        )
        why = f": {row['why']}" if row["why"] else ""
        said.append(
            f"removal  {row['number']} by {row['by']}, {named}, {row['documents']:,} documents, {row['state']}{why}"
        )
    return said or ["no data yet"]
