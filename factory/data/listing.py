"""Lists the data: documents and tokens by shard, domain, source and licence, and the removals."""

from __future__ import annotations

from typing import Any

from factory.data.selecting import COLUMN_NOUNS
from factory.ingest.rules.licence_claims import find_licence_conflicts
from factory.ledger.ledger import Ledger
from factory.ledger.removals import NO_LICENCE, REMOVED_FATE, list_removals
from kernels.contract.message import Message

GROUPS = {"domain": "d.domain", "source": "d.source", "license": "d.license"}


def collect_data_facts(ledger: Ledger, limit: int) -> dict[str, Any]:
    """Return the facts of ``factory data list``, as JSON-ready values.

    The keys: ``shards``; ``domain``, ``source`` and ``license`` (the ``limit`` largest of each, by training tokens); ``licence_conflicts`` (counts of
    documents); ``removals``.
    """
    sums = (
        ("documents", "1", "train"),
        ("tokens", "d.tokens", "train"),
        ("supervised_tokens", "d.supervised_tokens", "train"),
        ("held_out", "1", "held_out"),
        ("removed", "1", REMOVED_FATE),
    )
    counts = ", ".join(f"SUM({_value_of_fate(value, fate)}) AS {name}" for name, value, fate in sums)
    shards = ledger.read(
        f"SELECT s.name, s.sha256, s.state, {counts} FROM shards s LEFT JOIN documents d ON d.shard = s.sha256 "
        "GROUP BY s.name, s.sha256, s.state, s.ingested_at ORDER BY s.ingested_at"
    )
    found: dict[str, Any] = {"shards": shards}
    for name, column in GROUPS.items():
        found[name] = ledger.read(
            f"SELECT {column} AS name, {counts} FROM documents d WHERE d.fate <> 'dropped' GROUP BY {column} "
            "ORDER BY tokens DESC, name LIMIT :most",
            most=limit,
        )
    differing = find_licence_conflicts(ledger)
    found["licence_conflicts"] = {"documents": len(differing), "settled": sum(one.is_settled for one in differing)}
    found["removals"] = [vars(one) for one in list_removals(ledger)]
    return found


def _value_of_fate(value: str, fate: str) -> str:
    """Return an SQL expression that is ``value`` for documents with this fate, and 0 for others."""
    when = f"CASE WHEN d.fate = '{fate}'"
    return f"{when} THEN {value} ELSE 0 END"


def format_data_list(found: dict[str, Any]) -> list[str]:
    """Return the result of ``collect_data_facts`` as lines for a person."""
    said: list[str] = []
    for group, rows in found.items():
        if group in ("removals", "licence_conflicts"):
            continue
        for row in rows:
            name = row["name"] or (NO_LICENCE if group == "license" else "–")
            extra = [f"{row['held_out']:,} held out"] if row["held_out"] else []
            extra += [f"{row['removed']:,} removed"] if row["removed"] else []
            extra += [row["state"]] if row.get("state") == "quarantined" else []
            noun = COLUMN_NOUNS.get(group, group.removesuffix("s"))
            said.append(
                Message(
                    "data.row",
                    "{noun:<8} {name:<32} {documents:>9,} documents {tokens:>13,} tokens {supervised_tokens:>13,} supervised{extra}",
                    noun=noun,
                    name=name,
                    documents=row["documents"],
                    tokens=row["tokens"],
                    supervised_tokens=row["supervised_tokens"],
                    extra=f"; {', '.join(extra)}" if extra else "",
                )
            )
    if count := found["licence_conflicts"]["documents"]:
        said.append(
            Message(
                "data.licence_conflicts",
                "licences: {documents:,|document has|documents have} several licences. Settled conflicts: {settled:,}. To list the "
                "conflicts: 'factory data claims'",
                documents=count,
                settled=found["licence_conflicts"]["settled"],
            )
        )
    for row in found["removals"]:
        named = (
            f"{len(row['names'])} named document{'s' if len(row['names']) > 1 else ''}"
            if row["column"] == "key"
            else f"{COLUMN_NOUNS[row['column']]} {', '.join(row['names'])}"
        )
        said.append(
            Message(
                "data.removal",
                "removal  {number} ({named}) by {by}: {documents:,|document|documents} {state}{why}",
                number=row["number"],
                by=row["by"],
                named=named,
                documents=row["documents"],
                state=row["state"],
                why=f" ({row['why']})" if row["why"] else "",
            )
        )
    return said or [Message("data.none", "no data yet")]
