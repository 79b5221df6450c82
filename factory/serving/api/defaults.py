"""Reads the sampling defaults of an export from its ``generation_config.json``, which may be hostile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.evals.export_folder import ExportError, read_json

IDLE = {"bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache"}
# Unsupported keys that can change the generated text, with the values that do not change it.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None), "no_repeat_ngram_size": (0, None), "min_p": (0.0, None), "typical_p": (1.0, None),
    "num_beams": (1, None), "num_return_sequences": (1, None), "max_length": (20, None), "min_length": (0, None),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens


@dataclass(frozen=True)
class GenerationDefaults:
    """The content of an export's ``generation_config.json``."""

    sampling: SamplingSettings
    stop_ids: frozenset[int]

    @classmethod
    def read(cls, export: Path) -> GenerationDefaults:
        """Read the file of an export. Raises: ExportError for an unknown key, an invalid value, or an unsupported key that changes the text."""
        where = export / "generation_config.json"
        data = read_json(where)
        for key, allowed in NEUTRAL_VALUES.items():
            if key in data and data[key] not in allowed:
                raise ExportError(
                    "serving.default_not_supported", "{file}: the server does not support the value {value} of {key}. It supports only {allowed}.",
                    file=where, key=key, value=str(data[key])[:40], allowed=allowed[0],
                )  # fmt: skip
        known = IDLE | NEUTRAL_VALUES.keys() | {"do_sample", "temperature", "top_p", "top_k", "eos_token_id"}
        if strange := sorted(data.keys() - known):
            raise ExportError(
                "serving.default_unknown", "{file}: the server does not know the key {key}, so it does not serve this export.",
                file=where, key=strange[0][:80],
            )  # fmt: skip
        stop = data.get("eos_token_id")
        ids = [stop] if type(stop) is int else stop
        if not isinstance(ids, list) or not ids or any(type(number) is not int or number < 0 for number in ids):
            raise ExportError(
                "serving.default_stop_ids",
                "{file}: eos_token_id must be a token id or a list of token ids, not {value}.",
                file=where,
                value=str(stop)[:40],
            )
        if not data.get("do_sample", False):  # as in transformers, greedy whatever the temperature
            return cls(SamplingSettings(), frozenset(ids))
        temperature, top_p = (_number(where, data, key, 1.0) for key in ("temperature", "top_p"))
        return cls(SamplingSettings(temperature, top_p, int(_number(where, data, "top_k", 0.0))), frozenset(ids))


def _number(where: Path, data: dict[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= 1e6:
        raise ExportError(
            "serving.default_not_a_number",
            "{file}: {key} must be a number from 0 to 1,000,000, not {value}.",
            file=where,
            key=key,
            value=str(value)[:40],
        )
    return float(value)
