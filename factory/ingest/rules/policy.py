"""Defines the keys of ``policies/data.yaml``, which says which documents may become training data and which must not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.ingest.rules.held_out_split import GroupKind
from factory.ingest.rules.licence_names import LicenceEvaluator, normalise_licence_name
from factory.ingest.shapes.field_mapping import FieldMapping, find_field_mapping

REPLAY_DOMAIN = "replay"  # of the documents that stand for what a model knew
PiiKind = Literal["email", "ip", "phone", "card", "secret"]
NotNegative = Annotated[int, Field(ge=0)]


class DomainRules(StrictPolicy):
    """The limits for documents of one domain. ``filters.py`` has the rules that apply them."""

    min_chars: NotNegative = 40
    """Rule 'too_short'."""
    max_chars: Count = 2_000_000
    """Rule 'too_long'."""
    min_alphabetic: Share = 0.25
    """Smallest share of letters among non-blank characters; rule 'low_alphabetic'."""
    max_line: Count = 100_000
    """Largest number of characters in a line; rule 'long_lines'."""
    max_repeated_lines: Share = 1.0
    """Largest share of lines that repeat an earlier line; rule 'repetition'."""
    max_encoded: Share = 1.0
    """Largest share of characters in base64- or hex-like runs; rule 'encoded_data'."""
    generated: bool = True
    """Whether a file may say that a program generated it; rule 'generated'."""
    must_parse: bool = False
    """Whether Python sources must parse; rule 'does_not_parse'."""
    pii: list[PiiKind] = ["email", "ip", "phone", "card", "secret"]
    """Kinds of personal data that are replaced (``personal_data.py``)."""
    group: GroupKind = "document"
    """Which documents depend on one another and form a group. A group is held out or trained on as a whole, and counts once at the release gate. A
    group is each document by itself ('document', or 'none'), or all documents of one source, of one path (a row's 'path', else the file it came in),
    of one host (its 'url'), or of one conversation (its 'conversation_id'). A document that lacks the key is a group of its own."""
    hold_out_at_most: NotNegative = 400
    """Largest number of held-out documents of this domain, over all shards."""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, raw: object) -> object:
        if isinstance(raw, dict) and "hold_out_by" in raw:
            raise ValueError(
                "'hold_out_by' is 'group' now: write 'group: source' for 'source', and 'group: document' for 'content'"
            )
        return raw


class NearDuplicateRules(StrictPolicy):
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Two documents are near-duplicates if the estimated Jaccard similarity of their 5-word shingles is at least this."""


class DecontaminationRules(StrictPolicy):
    ngram: Annotated[int, Field(ge=8, le=50)] = 13
    """Length, in words, of a run that a training document may not share with a held-out document (GPT-3, appendix C)."""
    sample_window: Annotated[int, Field(ge=1, le=256)] = 32
    """Window for the winnowed index of training documents. Overlaps of ngram + window - 1 words are always found."""
    common: Count = 10
    """An n-gram that occurs in more documents than this is a common phrase, not a leak."""
    margin: NotNegative = 100
    """Characters removed on either side of a collision."""
    max_trimmed: Share = 0.3
    """Largest share of a document that may be removed. If more had to be removed, the document is dropped."""


class HeldOutRules(StrictPolicy):
    share: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the groups that is held out. ``group`` of a domain says what a group is."""
    least: NotNegative = 8
    """Number of groups of each domain that are held out in each half (sealed and dev) before the share applies. A domain with fewer groups cannot be
    judged (``documents_min`` in gates/release.yaml). At most half of a domain is held out, but the first group of each half is held out in any case
    if these two have at most 16 documents together. At most ``hold_out_at_most`` documents are held out, and none if the share is 0."""


class LicencePermissions(StrictPolicy):
    train: bool
    release: bool


class LicenceRules(StrictPolicy):
    default: LicencePermissions = LicencePermissions(train=True, release=False)
    """What a licence allows that ``known`` does not list."""
    missing: LicencePermissions = LicencePermissions(train=True, release=False)
    """What is allowed for a document that names no licence."""
    known: dict[str, LicencePermissions] = {}
    """What each licence allows: to train on a document, and to release a model that was trained on it. Case and blanks are ignored. In an SPDX
    expression, all names that AND joins must allow it, and at least one of the names that OR joins."""

    imported_model: Annotated[str, Field(max_length=100)] = ""
    """The licence of the model with which the workspace began, if none was recorded at the import, or a wrong one."""

    def find_licence(self, name: str | None) -> LicencePermissions:
        """
        >>> allowed, refused = LicencePermissions(train=True, release=True), LicencePermissions(train=False, release=False)
        >>> policy = LicenceRules(known={"MIT": allowed, "proprietary": refused})
        >>> [policy.find_licence(name).release for name in ("mit ", "MIT OR GPL-3.0-only", "MIT AND GPL-3.0-only", "(MIT)")]
        [True, True, False, True]
        >>> [policy.find_licence(name).train for name in ("Proprietary", "proprietary AND MIT", "MIT OR Proprietary", "unheard of", " ")]
        [False, False, True, True, True]
        """
        if not name or not name.strip():
            return self.missing
        if (exact := self.known.get(name)) is not None:
            return exact
        known: dict[str, LicencePermissions] = {}
        for other, licence in self.known.items():  # if two spellings of one name are listed, the stricter counts
            known[normalise_licence_name(other)] = _strictest(
                [licence, known.get(normalise_licence_name(other), licence)]
            )
        return LicenceEvaluator(known, self.default, _strictest, _laxest).evaluate(name)

    def find_model_licence(self, recorded: str) -> tuple[str, LicencePermissions]:
        """Return the name of an imported model's licence ('': unknown), and what it allows. ``recorded``: the name at the import, or ''.

        An unknown licence never allows a release: ``missing`` is about a team's own documents, and not about weights of others.
        """
        name = self.imported_model.strip() or recorded
        return name, self.find_licence(name) if name else LicencePermissions(train=True, release=False)

    def is_listed(self, name: str) -> bool:
        """Return whether every name of an expression is listed.

        >>> allowed = LicencePermissions(train=True, release=True)
        >>> policy = LicenceRules(known={"MIT": allowed, "public domain": allowed})
        >>> [policy.is_listed(name) for name in ("mit license", "Public-Domain", "MIT OR Unlicense", "Unlicense", "")]
        [True, True, False, False, False]
        """
        return LicenceEvaluator(dict.fromkeys(map(normalise_licence_name, self.known), True), False, all, all).evaluate(
            name
        )


def _strictest(licences: Sequence[LicencePermissions]) -> LicencePermissions:
    """Return what all of the licences allow."""
    return LicencePermissions(train=all(one.train for one in licences), release=all(one.release for one in licences))


def _laxest(licences: Sequence[LicencePermissions]) -> LicencePermissions:
    return max(licences, key=lambda one: (one.train, one.release))


class TokenizerRules(StrictPolicy):
    vocab_size: Annotated[int, Field(ge=300, le=1 << 20)] = 4096
    """Number of tokens in the vocabulary. It must fit ``model.vocab_size`` of the recipe."""
    sample_bytes: Annotated[int, Field(ge=1000)] = 6_000_000
    """Bytes of text that the tokenizer is trained on."""


class ShardLimits(StrictPolicy):
    max_row_bytes: Annotated[int, Field(ge=1000)] = 8_000_000
    """Largest size of a row, in bytes. A longer row is dropped."""
    max_rows: Count = 500_000
    """Largest number of rows of a shard. A file with more rows is cut into several shards."""
    part_bytes: Annotated[int, Field(ge=1000)] = 256_000_000
    """A larger file is cut into shards of about this many bytes of JSON lines."""
    max_shard_bytes: Annotated[int, Field(ge=1000)] = 8_000_000_000
    """Largest size of a compressed file after decompression, in bytes."""
    max_expansion: Annotated[float, Field(gt=1)] = 200.0
    """Largest ratio of decompressed to compressed bytes. It is checked after the first 64 MiB; a larger ratio is a sign of a decompression bomb."""
    max_bad_rows: Share = 0.5
    """Largest share of rows that cannot be read. With a larger share the whole shard is quarantined."""


class DataPolicy(StrictPolicy):
    """The content of ``data.yaml``. Every key is optional."""

    default_domain: str = "text"
    """Domain of a row that names no domain. A row with 'messages' gets the domain 'chat' instead."""
    domains: dict[str, DomainRules] = {}
    """The rules of each domain, by name. 'default' has the rules of every domain that is not listed."""
    near_duplicates: NearDuplicateRules = NearDuplicateRules()
    decontamination: DecontaminationRules = DecontaminationRules()
    held_out: HeldOutRules = HeldOutRules()
    licences: LicenceRules = LicenceRules()
    tokenizer: TokenizerRules = TokenizerRules()
    limits: ShardLimits = ShardLimits()
    replay_corpus: str = ""
    """A folder of documents that stand for what an imported model knew. They are ingested once, with the domain 'replay' in place of their own. The
    recipe's mixture repeats this domain, and its held-out part guards it. A relative path begins in the workspace."""
    fields: list[FieldMapping] = []
    """What your own columns mean, by the files' names; the first mapping that matches is used. Known shapes need none."""

    def find_domain_rules(self, domain: str) -> DomainRules:
        return self.domains.get(domain) or self.domains.get("default") or DomainRules()

    def find_field_mapping(self, *files: str) -> tuple[int, FieldMapping] | None:
        """Return (place under ``fields``, mapping) for a file with one of these names, or None if no mapping matches."""
        return find_field_mapping(self.fields, *files) if self.fields else None

    @classmethod
    def load(cls, path: Path) -> DataPolicy:
        """Load a file. Raises: ConfigError that names the file and the key, and the nearest known key if the key is unknown."""
        return load_policy(cls, path)
