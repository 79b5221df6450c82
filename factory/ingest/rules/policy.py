"""The data policy: one strict schema for ``policies/data.yaml``. Each key is documented where it is defined."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from factory.core.errors import ConfigError, nearest
from factory.core.yaml_file import load_yaml

PiiKind = Literal["email", "ip", "phone", "card", "secret"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DomainRules(_Strict):
    """What a document of one domain must be like; the rules are in ``filters.py`` under the same names."""

    min_chars: int = Field(default=40, ge=0)  # rule 'too_short'
    max_chars: int = Field(default=2_000_000, ge=1)  # rule 'too_long'
    min_alphabetic: float = Field(
        0.25, ge=0, le=1
    )  # share of letters among non-blank characters; rule 'low_alphabetic'
    max_line: int = Field(default=100_000, ge=1)  # characters of the longest line; rule 'long_lines'
    max_repeated_lines: float = Field(
        default=1.0, ge=0, le=1
    )  # share of lines that repeat an earlier one; rule 'repetition'
    max_encoded: float = Field(
        default=1.0, ge=0, le=1
    )  # share of characters in base64- or hex-like runs; rule 'encoded_data'
    generated: bool = True  # may a file say that a program wrote it? rule 'generated'
    must_parse: bool = False  # Python sources must parse; rule 'does_not_parse'
    pii: tuple[PiiKind, ...] = ("email", "ip", "phone", "card", "secret")  # what is replaced, see pii.py
    # Held out are whole sources (all domains of one source together) or single documents. By source is the stronger
    # split
    # where documents of one source quote each other; it needs many sources.
    hold_out_by: Literal["source", "content"] = "content"
    hold_out_at_most: int = Field(default=400, ge=0)  # documents of this domain, for ever


class NearDuplicates(_Strict):
    threshold: float = Field(default=0.8, gt=0, le=1)


class Decontamination(_Strict):
    ngram: int = Field(default=13, ge=8, le=50)
    sample_window: int = Field(default=32, ge=1, le=256)
    common: int = Field(default=10, ge=1)
    margin: int = Field(default=100, ge=0)
    max_trimmed: float = Field(default=0.3, ge=0, le=1)


class HeldOut(_Strict):
    share: float = Field(default=0.02, ge=0, le=0.5)


class Licence(_Strict):
    train: bool
    release: bool


class Licences(_Strict):
    default: Licence = Licence(train=True, release=False)
    missing: Licence = Licence(train=True, release=False)
    known: dict[str, Licence] = {}

    def of(self, name: str | None) -> Licence:
        return self.missing if not name else self.known.get(name, self.default)


class TokenizerRules(_Strict):
    vocab_size: int = Field(default=4096, ge=300, le=1 << 20)
    sample_bytes: int = Field(default=6_000_000, ge=1000)


class Limits(_Strict):
    max_row_bytes: int = Field(default=8_000_000, ge=1000)
    max_rows: int = Field(default=500_000, ge=1)
    max_shard_bytes: int = Field(default=8_000_000_000, ge=1000)
    max_expansion: float = Field(default=200, gt=1)
    max_bad_rows: float = Field(default=0.5, ge=0, le=1)


class DataPolicy(_Strict):
    default_domain: str = "text"
    domains: dict[str, DomainRules] = {}
    near_duplicates: NearDuplicates = NearDuplicates()
    decontamination: Decontamination = Decontamination()
    held_out: HeldOut = HeldOut()
    licences: Licences = Licences()
    tokenizer: TokenizerRules = TokenizerRules()
    limits: Limits = Limits()

    def rules(self, domain: str) -> DomainRules:
        return self.domains.get(domain) or self.domains.get("default") or DomainRules.model_validate({})

    @classmethod
    def load(cls, path: Path) -> DataPolicy:
        """Raises: ConfigError that names the file and the key, and the nearest known key for an unknown one."""
        data = load_yaml(path) or {}
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected 'key: value' lines, got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                hint = nearest(str(first["loc"][-1]), _known_keys(cls, first["loc"][:-1]))
                raise ConfigError(f"{path}: unknown key {where!r}{hint}") from None
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}, got {first['input']!r}") from None


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """The keys that may stand at a location of the document."""
    here: Any = model
    for part in location:
        if get_origin(here) is dict:
            here = get_args(here)[1]
        else:
            here = here.model_fields[part].annotation
    return list(here.model_fields)
