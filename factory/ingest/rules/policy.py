"""``policies/data.yaml``: which documents may become training data, and which must not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from factory.core.policy_file import Count, Share, StrictPolicy, load_policy
from factory.ingest.rules.held_out_split import GroupKind
from factory.ingest.rules.licence_names import LicenceReader, fold_licence_name
from factory.ingest.shapes.field_mapping import FieldMapping, find_mapping

PiiKind = Literal["email", "ip", "phone", "card", "secret"]
NotNegative = Annotated[int, Field(ge=0)]


class DomainRules(StrictPolicy):
    """The limits for documents of one domain; the rules are in ``filters.py`` under the same names."""

    min_chars: NotNegative = 40
    """Rule 'too_short'."""
    max_chars: Count = 2_000_000
    """Rule 'too_long'."""
    min_alphabetic: Share = 0.25
    """Share of letters among non-blank characters; rule 'low_alphabetic'."""
    max_line: Count = 100_000
    """Characters of the longest line; rule 'long_lines'."""
    max_repeated_lines: Share = 1.0
    """Share of lines that repeat an earlier one; rule 'repetition'."""
    max_encoded: Share = 1.0
    """Share of characters in base64- or hex-like runs; rule 'encoded_data'."""
    generated: bool = True
    """May a file say that a program wrote it? Rule 'generated'."""
    must_parse: bool = False
    """Python sources must parse; rule 'does_not_parse'."""
    pii: list[PiiKind] = ["email", "ip", "phone", "card", "secret"]
    """What is replaced, see pii.py."""
    group: GroupKind = "document"
    """Which documents depend on one another. A group is held out or trained on as a whole, and counts once at the release gate: each document
    by itself ('document', or 'none'), or all of one source, of one path (a row's 'path', else the file it came in), of one host (its 'url'), of
    one conversation (its 'conversation_id'). A document that lacks the key is a group of its own."""
    hold_out_at_most: NotNegative = 400
    """Documents of this domain, over all shards."""

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
    """Estimated Jaccard similarity of 5-word shingles from which two documents are near-duplicates."""


class Decontamination(StrictPolicy):
    ngram: Annotated[int, Field(ge=8, le=50)] = 13
    """Words that a training document may not share with a held-out one (GPT-3, appendix C)."""
    sample_window: Annotated[int, Field(ge=1, le=256)] = 32
    """Training documents are indexed by winnowing: overlaps of ngram + window - 1 words are always found."""
    common: Count = 10
    """An n-gram of more documents than this is a common phrase, not a leak."""
    margin: NotNegative = 100
    """Characters removed on either side of a collision."""
    max_trimmed: Share = 0.3
    """Share of a document that may be removed; more, and it is dropped."""


class HeldOut(StrictPolicy):
    share: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Of groups, as ``group`` of their domain says."""
    least: NotNegative = 8
    """Groups of each domain in each half, sealed and dev, that are held out before the share applies; at most half of the domain is. A domain with
    fewer cannot be judged (``documents_min`` in gates/release.yaml). The first group of each half is held out even if that is more than half (16
    documents together at most). At most ``hold_out_at_most`` documents are held out; with a share of 0, none."""


class Licence(StrictPolicy):
    train: bool
    release: bool


class Licences(StrictPolicy):
    default: Licence = Licence(train=True, release=False)
    """Of a licence that ``known`` does not list."""
    missing: Licence = Licence(train=True, release=False)
    """Of a document that names no licence."""
    known: dict[str, Licence] = {}
    """What each licence allows: to train on a document, to release a model that was. Case and blanks do not count; of names in an SPDX
    expression those that it joins by AND must all allow it, and one of those that it joins by OR."""

    def find_licence(self, name: str | None) -> Licence:
        """
        >>> policy = Licences(known={"MIT": Licence(train=True, release=True), "proprietary": Licence(train=False, release=False)})
        >>> [policy.find_licence(name).release for name in ("mit ", "MIT OR GPL-3.0-only", "MIT AND GPL-3.0-only", "(MIT)")]
        [True, True, False, True]
        >>> [policy.find_licence(name).train for name in ("Proprietary", "proprietary AND MIT", "MIT OR Proprietary", "unheard of", " ")]
        [False, False, True, True, True]
        """
        if not name or not name.strip():
            return self.missing
        if (exact := self.known.get(name)) is not None:
            return exact
        known: dict[str, Licence] = {}
        for other, licence in self.known.items():  # of two spellings of one name the stricter
            known[fold_licence_name(other)] = _strictest([licence, known.get(fold_licence_name(other), licence)])
        return LicenceReader(known, self.default, _strictest, _laxest).read(name)

    def is_listed(self, name: str) -> bool:
        """Is every name of an expression listed?

        >>> policy = Licences(known={"MIT": Licence(train=True, release=True), "public domain": Licence(train=True, release=True)})
        >>> [policy.is_listed(name) for name in ("mit license", "Public-Domain", "MIT OR Unlicense", "Unlicense", "")]
        [True, True, False, False, False]
        """
        return LicenceReader(dict.fromkeys(map(fold_licence_name, self.known), True), False, all, all).read(name)


def _strictest(licences: Sequence[Licence]) -> Licence:
    """What all of them allow."""
    return Licence(train=all(one.train for one in licences), release=all(one.release for one in licences))


def _laxest(licences: Sequence[Licence]) -> Licence:
    return max(licences, key=lambda one: (one.train, one.release))


class TokenizerRules(StrictPolicy):
    vocab_size: Annotated[int, Field(ge=300, le=1 << 20)] = 4096
    """Must be the recipe's."""
    sample_bytes: Annotated[int, Field(ge=1000)] = 6_000_000
    """Of text that the tokenizer is trained on."""


class ShardLimits(StrictPolicy):
    max_row_bytes: Annotated[int, Field(ge=1000)] = 8_000_000
    """A longer line is one dropped row."""
    max_rows: Count = 500_000
    """Of a shard; a file with more is cut into several."""
    part_bytes: Annotated[int, Field(ge=1000)] = 256_000_000
    """A larger file is cut into shards of about so many bytes of JSON lines."""
    max_shard_bytes: Annotated[int, Field(ge=1000)] = 8_000_000_000
    """Of what is compressed, after decompression."""
    max_expansion: Annotated[float, Field(gt=1)] = 200.0
    """Decompressed over compressed bytes, beyond the first 64 MB: more is a decompression bomb."""
    max_bad_rows: Share = 0.5
    """Share of rows that cannot be read; with more the whole shard is quarantined."""


class DataPolicy(StrictPolicy):
    """Every key is optional."""

    default_domain: str = "text"
    """Of a row or file that names none; a row with 'messages' becomes 'chat'."""
    domains: dict[str, DomainRules] = {}
    """By name; 'default' is for every domain that is not listed."""
    near_duplicates: NearDuplicateRules = NearDuplicateRules()
    decontamination: Decontamination = Decontamination()
    held_out: HeldOut = HeldOut()
    licences: Licences = Licences()
    tokenizer: TokenizerRules = TokenizerRules()
    limits: ShardLimits = ShardLimits()
    fields: list[FieldMapping] = []
    """What your own columns mean, by the files' names; the first mapping that matches is used. Known shapes need none."""

    def rules_of_domain(self, domain: str) -> DomainRules:
        return self.domains.get(domain) or self.domains.get("default") or DomainRules()

    def find_mapping(self, *files: str) -> tuple[int, FieldMapping] | None:
        """Of a file of one of these names: its place under ``fields``, and what it says."""
        return find_mapping(self.fields, *files) if self.fields else None

    @classmethod
    def load(cls, path: Path) -> DataPolicy:
        """Raises: ConfigError that names the file and the key, and the nearest known key for an unknown one."""
        return load_policy(cls, path)
