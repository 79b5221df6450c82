"""Ingest's queries about earlier shards. They read the ledger and the index of hashes (``hash_index``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from factory.core.errors import ConfigError
from factory.ingest.document import SYNTHETIC_PREFIX
from factory.ingest.hash_index import HashIndex
from factory.ingest.rules import near_duplicates
from factory.ingest.rules.held_out_split import HALVES, EarlierHeldOutCounts
from factory.ingest.rules.licence_claims import list_rows_with_rejected_claims
from factory.ingest.rules.licence_names import normalise_licence_name
from factory.ingest.rules.policy import DataPolicy, LicenceRules
from factory.ingest.rules.word_hashes import Hashes
from factory.ledger.ledger import Ledger, documents, held_out, meta, shards
from factory.ledger.removals import REMOVED_FATE, list_removals, list_removed_labels
from kernels.contract.message import Message

_AT_ONCE = 5000  # values in one IN (…) of a query
# Stands for the fate of a row whose licence does not allow training. Copies of its text are dropped too.
BARRED = "barred"
PARAMETERS = "ingest_index"  # key in ``meta``
TRAINED = ("train", "quarantined")


class DocumentIndex:
    """Looks up the documents of earlier shards that were not dropped."""

    def __init__(self, ledger: Ledger, policy: LicenceRules | None = None) -> None:
        self._ledger, self._policy = ledger, policy or LicenceRules()
        self._aside = list_rows_with_rejected_claims(ledger)
        self._hashes = HashIndex(ledger)

    def check_parameters(self, policy: DataPolicy) -> str:
        """Return the parameters that hashes are made with. Only hashes that were made with the same parameters can be compared.

        Raises: ConfigError when the policy or an installed library changed the parameters since the stored hashes were made.
        """
        wanted = f"{near_duplicates.INDEX}; n-gram {policy.decontamination.ngram}, window {policy.decontamination.sample_window}"
        found = self._ledger.select_first(sa.select(meta.c.value).where(meta.c.key == PARAMETERS))
        if found and found["value"] != wanted:
            raise ConfigError(
                "ingest.index_parameters",
                "the hashes of this workspace's documents were made with '{old}', but data.yaml and the installed libraries now give '{new}'. "
                "Restore the old values and libraries, or start a new workspace and ingest the same shards again",
                old=found["value"],
                new=wanted,
            )
        return wanted

    def find_documents_by_content_hash(self, hashes: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return (key, fate) by content_sha256, for documents that were kept and for rows whose licence does not allow training (fate ``BARRED``)."""
        c = documents.c
        columns = [c.content_sha256, c.key, c.fate, c.license]
        found = list(self._select(columns, c.content_sha256, hashes, sa.or_(c.fate != "dropped", c.rule == "licence")))
        barred = {row[0]: (row[1], BARRED) for row in found if row[2] == "dropped" and self._bars(row[1], row[3])}
        return barred | {row[0]: (row[1], row[2]) for row in found if row[2] != "dropped"}

    def _bars(self, key: str, licence: str | None) -> bool:
        """Return whether a row that the rule 'licence' dropped still forbids training on its text."""
        return key not in self._aside and not self._policy.find_licence(licence).train

    def find_documents_by_bands(self, hashes: near_duplicates.Bands) -> near_duplicates.StoredBandMatches:
        keys: dict[int, list[str]] = {}
        for value, key in self._hashes.find_documents_by_band(hashes.tolist()):
            stored = keys.setdefault(value, [])
            if len(stored) < near_duplicates.CANDIDATES:
                stored.append(key)
        d = documents.c
        names = sorted({key for found in keys.values() for key in found})
        rows = self._select([d.key, d.license], d.key, names, d.fate == "dropped")
        over = {row[0] for row in rows if not self._bars(row[0], row[1])}
        keys = {value: [key for key in stored if key not in over] for value, stored in keys.items()}
        return near_duplicates.StoredBandMatches(
            keys, self._hashes.read_signatures([name for name in names if name not in over])
        )

    def make_check_for_removed_labels(self) -> Callable[[str | None, str | None], str]:
        """Return a function of (source, licence). It returns why a document is refused, because a person removed its source or licence, or ''."""
        known = list_removed_labels(self._ledger)
        licences = {normalise_licence_name(name): number for name, number in known["license"].items()}
        why = {removal.number: removal.why for removal in list_removals(self._ledger)}

        def of(source: str | None, licence: str | None) -> str:
            for noun, name, number in (
                ("source", source, known["source"].get(source)),
                ("licence", licence or "none", licences.get(normalise_licence_name(licence))),
            ):
                if number is not None:
                    return Message(
                        "ingest.taken_out",
                        "a person removed the {noun} {name!r} (removal {removal}{why})",
                        noun=noun,
                        name=name,
                        removal=number,
                        why=f": {why[number]}" if why[number] else "",
                    )
            return ""

        return of

    def read_fates(self, keys: Sequence[str]) -> dict[str, str]:
        c = documents.c
        found = self._select([c.key, c.fate], c.key, keys)
        return {row[0]: BARRED if row[1] == "dropped" else row[1] for row in found}

    def read_licences(self, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return (licence, shard's name) by key. The licence is the one that the row names, or ''."""
        c = documents.c
        names = {row["sha256"]: row["name"] for row in self._ledger.read("SELECT sha256, name FROM shards")}
        return {row[0]: (row[1] or "", names[row[2]]) for row in self._select([c.key, c.license, c.shard], c.key, keys)}

    def find_training_documents_by_ngram(self, grams: Hashes) -> list[tuple[int, str]]:
        """Return (n-gram, key) for each training document that has one of these n-grams in its sample."""
        return self._hashes.find_training_documents_by_ngram(grams.tolist())

    def read_held_out_ngrams(self) -> list[tuple[str, Hashes]]:
        """Return (key, all n-grams) of every held-out document and of every task's item."""
        return self._hashes.read_held_out_ngrams()

    @cached_property
    def _held_out(self) -> list[dict[str, Any]]:
        h, d = held_out.c, documents.c
        whole = h.group_key == sa.func.coalesce(d.group_key, d.key)
        listed = sa.select(
            h.domain, h.group_key, h.sealed, whole.label("whole"), (d.fate != REMOVED_FATE).label("there")
        )
        return self._ledger.select_rows(listed.join(documents, d.key == h.key))

    def read_held_out_groups(self) -> dict[str, bool]:
        """Return, for each group that was ever held out, whether it is in the sealed half."""
        return {row["group_key"]: bool(row["sealed"]) for row in self._held_out}

    def read_held_out_counts(self) -> dict[str, EarlierHeldOutCounts]:
        """Return, for each domain, what earlier shards hold out. Removed documents do not count."""
        of: dict[str, list[dict[str, Any]]] = {}
        for row in self._held_out:
            if row["there"]:
                of.setdefault(row["domain"], []).append(row)
        return {domain: _before(rows) for domain, rows in of.items()}

    def find_trained_groups(self, groups: Sequence[str]) -> set[str]:
        """Return the ``groups`` that have a document that is, or was, training data."""
        c = documents.c
        return {row[0] for row in self._select([c.group_key], c.group_key, groups, c.token_shard.is_not(None))}

    def count_training_documents(self, domain: str) -> int:
        """Count the training documents of a domain that no model wrote. Documents that were quarantined later count too."""
        c = documents.c
        rows = self._ledger.select_rows(sa.select(shards.c.sha256, shards.c.domains))
        there = sorted(row["sha256"] for row in rows if domain in (row["domains"] or {}))
        own = sa.or_(c.detail.is_(None), sa.not_(c.detail.like(f"{SYNTHETIC_PREFIX}%")))
        return sum(1 for _ in self._select([c.key], c.shard, there, c.domain == domain, c.fate.in_(TRAINED), own))

    def _select(self, columns: Sequence[Any], by: Any, values: Sequence[Any], *where: Any) -> Iterator[tuple[Any, ...]]:
        statement = sa.select(*columns).where(by.in_(sa.bindparam("values", expanding=True)), *where)
        with self._ledger.engine.connect().execution_options(reads_only=True) as connection:
            for start in range(0, len(values), _AT_ONCE):
                found = connection.execute(statement, {"values": list(values[start : start + _AT_ONCE])})
                yield from (tuple(row) for row in found)


def _before(rows: Sequence[dict[str, Any]]) -> EarlierHeldOutCounts:
    """Return the ``EarlierHeldOutCounts`` of one domain, from the rows of its held-out documents."""
    of = {half: [row for row in rows if bool(row["sealed"]) == half] for half in HALVES}
    groups = {half: frozenset(row["group_key"] for row in ones if row["whole"]) for half, ones in of.items()}
    return EarlierHeldOutCounts(
        len(rows), groups, {half: sum(not row["whole"] for row in ones) for half, ones in of.items()}
    )
