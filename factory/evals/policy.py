"""``policies/evals.yaml``: how much is measured, and the strict reading of any policy file of the judge."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from factory.errors import ConfigError, nearest

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Unknown keys and values of another type are errors; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EvalPolicy(Strict):
    """Every key is optional. All counts are caps; the choice below a cap is by hash, so that all candidates get the same items."""

    documents_per_domain: Count = 60
    """Held-out documents scored in bits per byte, a domain."""
    document_bytes: Count = 2048
    """Bytes scored of one document."""
    window_overlap: Share = 0.25
    """Share of a window that is context only, so that no token but a document's first is predicted from nearly nothing."""
    cloze_items_per_domain: Count = 40
    cloze_context_bytes: Count = 256
    cloze_continuation_bytes: Count = 64
    chat_samples: Count = 12
    chat_tokens: Count = 96
    """Longest greedy answer."""
    baseline_bytes_per_domain: Count = 4_000_000
    """Bytes of training text that the byte n-gram baselines are fitted on, a domain."""
    noise_documents_per_domain: Count = 20
    """Documents measured a second time under shifted windows (see evals/tasks.py, noise_floor)."""
    parity_documents: Count = 24
    """Texts and conversations whose token ids are compared between trainer, evaluator and server."""
    contamination_ngram: Count = 192
    """Tokens of a run in the contamination check: longer than what ingest's decontamination (runs of 44 words) may let through, so
    that a hit means that it failed. Shorter documents are checked by content hash alone."""
    contamination_overlap: Share = 0.6
    """A held-out document is contaminated when more of its n-grams than this stand in the training data."""
    probe_seconds: Count = 120
    """Time limit of the load-and-generate test; the machine may be busy, it takes about 10 s alone."""
    probe_memory_mib: Count = 6144

    @classmethod
    def load(cls, path: Path) -> EvalPolicy:
        return load_policy(cls, path)


Policy = TypeVar("Policy", bound=BaseModel)


def load_policy(schema: type[Policy], path: Path) -> Policy:
    """Read a YAML policy. Raises: ConfigError naming the file, the key, and the nearest key for an unknown one."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error, schema)}") from None


def policy_sha256(policy: BaseModel) -> str:
    """One hash of what a policy says, whatever its file's comments and spacing."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()


def _first(error: ValidationError, schema: type[BaseModel]) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{place}: {problem['msg']}, got {problem['input']!r}"
    for part in problem["loc"][:-1]:
        field = schema.model_fields.get(str(part))
        inner: Any = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            schema = inner
    return f"unknown key {place!r}{nearest(str(problem['loc'][-1]), schema.model_fields)}"
