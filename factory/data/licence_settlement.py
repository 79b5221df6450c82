"""Settles texts that came under several licences: lists the claims, and records a person's decision about which claim is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from factory.core.errors import InputError, suggest_name
from factory.data.selecting import find_keys_of_unique_document
from factory.ingest.rules.licence_claims import SETTLED, LicenceConflict, find_licence_conflicts
from factory.ingest.rules.licence_names import normalise_licence_name
from factory.ingest.rules.policy import LicenceRules
from factory.ingest.shapes.field_mapping import get_original_file_name
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.removals import NO_LICENCE
from kernels.contract.message import Message

NAMED = 5  # keys of a group's documents that are listed


def group_licence_conflicts(ledger: Ledger, policy: LicenceRules) -> list[dict[str, Any]]:
    """Return the licence conflicts grouped by their claims, with the most supervised tokens first.

    Each group has ``claims`` (licence and shard of each claim), ``counts_as`` (the licence that counts), ``train`` and ``release`` (what that licence
    allows), ``settled``, ``fates``, ``documents``, ``supervised_tokens``, and at most ``NAMED`` of the documents' ``keys``.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in find_licence_conflicts(ledger):
        claims = tuple(dict.fromkeys((claim.license, claim.shard, claim.is_set_aside) for claim in one.claims))
        counts_as = one.find_effective_licence(policy)
        group = found.setdefault(
            claims,
            {
                "claims": [dict(zip(("license", "shard", "aside"), claim)) for claim in claims],
                "counts_as": counts_as,
                "train": policy.find_licence(counts_as or None).train,
                "release": policy.find_licence(counts_as or None).release,
                "settled": one.is_settled,
                "fates": Counter(),
                "documents": 0,
                "supervised_tokens": 0,
                "keys": [],
            },
        )
        group["documents"] += 1
        group["supervised_tokens"] += one.supervised_tokens
        group["fates"][one.fate] += 1
        group["keys"] += [one.key] if len(group["keys"]) < NAMED else []
    return sorted(found.values(), key=lambda group: (-group["supervised_tokens"], str(group["claims"])))


def format_licence_conflicts(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the result of ``group_licence_conflicts`` as lines for a person."""
    said: list[str] = []
    for group in found:
        if group["release"]:
            allowed = Message("data.allows_release", "allows releases")
        elif group["train"]:
            allowed = Message("data.allows_training", "allows training, but no release of the model")
        else:
            allowed = Message("data.allows_nothing", "does not allow training")
        said.append(
            Message(
                "data.claims",
                "{documents:,|document has|documents have} several licences: {claims}. Supervised tokens: {supervised_tokens:,}. Fates: {fates}",
                documents=group["documents"],
                fates=[f"{count:,} {fate}" for fate, count in sorted(group["fates"].items())],
                supervised_tokens=group["supervised_tokens"],
                claims=[
                    f"{claim['license'] or NO_LICENCE} in {claim['shard']}{' (set aside)' if claim['aside'] else ''}"
                    for claim in group["claims"]
                ],
            )
        )
        said.append(
            Message(
                "data.claims_count",
                "  The licence {how} {licence} and {allowed}. Documents: {keys}",
                how="is settled as" if group["settled"] else "that applies now is",
                licence=group["counts_as"] or NO_LICENCE,
                allowed=allowed,
                keys=group["keys"],
            )
        )
    if any(not group["settled"] for group in found):
        said.append(
            Message(
                "data.strictest_counts",
                "the strictest licence applies until you settle which licence is right: 'factory data settle LICENCE --shard NAME' or "
                "'factory data settle LICENCE --document ID'. If the documents have no licence, write 'none' as LICENCE",
            )
        )
    return said or [Message("data.no_conflicts", "no text has several licences")]


def settle_licence(
    ledger: Ledger, licence: str, names: Sequence[str], shards: Sequence[str], by: str, why: str
) -> list[LicenceConflict]:
    """Set aside all claims except ``licence`` ('none': no licence) about some documents. Returns the conflicts before the change.

    The documents are those with the ids or keys ``names``, and those on which the shards ``shards``, or parts of these files, conflict with others.
    Raises: InputError if there is no conflict, or no row claims ``licence``, and as ``find_keys_of_unique_document`` does.
    """
    wanted = {key for name in names for key in find_keys_of_unique_document(ledger, name)}
    about = [
        one
        for one in find_licence_conflicts(ledger)
        if wanted & {claim.key for claim in one.claims}
        or {name for claim in one.claims for name in (claim.shard, get_original_file_name(claim.shard))} & set(shards)
    ]
    if not about:
        raise InputError(
            "data.no_conflict",
            "the licences of {names} are not in conflict. To list the conflicts: 'factory data claims'",
            names=[*names, *shards],
        )
    known = "" if licence == NO_LICENCE else normalise_licence_name(licence)
    for one in about:
        claimed = {claim.license or NO_LICENCE for claim in one.claims}
        if known not in {normalise_licence_name(claim.license) for claim in one.claims}:
            raise InputError(
                "data.unclaimed_licence",
                "no shard gives the text of document {key} the licence {licence!r}{near}. Nothing was changed",
                key=one.key,
                licence=licence,
                near=suggest_name(licence, claimed),
            )
    aside = {
        one.key: [claim.key for claim in one.claims if normalise_licence_name(claim.license) != known] for one in about
    }
    with ledger.begin() as tx:
        record_event(
            tx,
            SETTLED,
            "data",
            {"license": "" if licence == NO_LICENCE else licence, "by": by, "why": why, "aside": aside},
        )
    return about
