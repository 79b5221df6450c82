"""Texts that came under several licences: what is claimed, and a person's word on which claim is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from factory.core.errors import InputError, nearest
from factory.data.selecting import keys_of_one
from factory.ingest.rules.claims import SETTLED, LicenceConflict, conflicts
from factory.ingest.rules.licence_names import folded
from factory.ingest.rules.policy import Licences
from factory.ingest.shapes.mapping import whole_name
from factory.ledger.ledger import Ledger, record
from factory.ledger.removals import NO_LICENCE

NAMED = 5  # documents of a group


def grouped(ledger: Ledger, policy: Licences) -> list[dict[str, Any]]:
    """Conflicts with the same claims of the same shards together, most supervised tokens first: ``claims`` (licence and shard of each),
    ``counts_as``, ``release`` (does that licence allow one), ``settled``, ``fates``, ``documents``, ``supervised_tokens``, ``keys`` (some)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in conflicts(ledger):
        claims = tuple(dict.fromkeys((claim.license, claim.shard, claim.aside) for claim in one.claims))
        counts_as = one.counts_as(policy)
        group = found.setdefault(
            claims,
            {
                "claims": [dict(zip(("license", "shard", "aside"), claim)) for claim in claims],
                "counts_as": counts_as,
                "train": policy.of(counts_as or None).train,
                "release": policy.of(counts_as or None).release,
                "settled": one.settled,
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


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """``grouped`` for a person."""
    said = []
    for group in found:
        claims = ", ".join(
            f"{claim['license'] or NO_LICENCE} in {claim['shard']}{' (set aside)' if claim['aside'] else ''}"
            for claim in group["claims"]
        )
        fates = ", ".join(f"{count:,} {fate}" for fate, count in sorted(group["fates"].items()))
        allowed = (
            "may be released"
            if group["release"]
            else "no release of a model trained on it"
            if group["train"]
            else "not to be trained on"
        )
        how = "settled as" if group["settled"] else "counts as"
        said.append(
            f"{group['documents']:,} documents ({fates}), {group['supervised_tokens']:,} tokens with loss: {claims}"
        )
        said.append(f"  {how} {group['counts_as'] or NO_LICENCE}: {allowed}; {', '.join(group['keys'])}")
    if any(not group["settled"] for group in found):
        said.append(
            "the strictest counts until you say which is right: factory data settle LICENCE --shard NAME, or --document ID; 'none': no licence"
        )
    return said or ["no text came under two licences"]


def settle(
    ledger: Ledger, licence: str, names: Sequence[str], shards: Sequence[str], by: str, why: str
) -> list[LicenceConflict]:
    """Set aside every other claim than ``licence`` ('none': that no licence is named) about documents with these ids or keys, or about all
    documents for which these shards, or parts of these files, claim something that others don't; returns the conflicts as they were.

    Raises: InputError where there is no conflict, or nobody claims ``licence``, and as ``keys_of_one``.
    """
    wanted = {key for name in names for key in keys_of_one(ledger, name)}
    about = [
        one
        for one in conflicts(ledger)
        if wanted & {claim.key for claim in one.claims}
        or {name for claim in one.claims for name in (claim.shard, whole_name(claim.shard))} & set(shards)
    ]
    if not about:
        raise InputError(
            f"no licence of {', '.join([*names, *shards])} is in conflict; 'factory data claims' lists those that are"
        )
    known = "" if licence == NO_LICENCE else folded(licence)
    for one in about:
        claimed = {claim.license or NO_LICENCE for claim in one.claims}
        if known not in {folded(claim.license) for claim in one.claims}:
            raise InputError(
                f"{one.key}: nobody claims {licence!r} for it{nearest(licence, claimed)}; nothing was changed"
            )
    aside = {one.key: [claim.key for claim in one.claims if folded(claim.license) != known] for one in about}
    with ledger.begin() as tx:
        record(
            tx,
            SETTLED,
            "data",
            {"license": "" if licence == NO_LICENCE else licence, "by": by, "why": why, "aside": aside},
        )
    return about
