"""How an export wants to be sampled: ``generation_config.json``, read as hostile input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.evals.export_config import ExportError
from factory.evals.export_folder import read_json

IDLE = {"bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache"}
# Keys that would change what is generated, and the only values of theirs that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None), "no_repeat_ngram_size": (0, None), "min_p": (0.0, None), "typical_p": (1.0, None),
    "num_beams": (1, None), "num_return_sequences": (1, None), "max_length": (20, None), "min_length": (0, None),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True)
class GenerationDefaults:
    """What ``generation_config.json`` of an export says."""

    sampling: Sampling
    stop_ids: frozenset[int]

    @classmethod
    def read(cls, export: Path) -> GenerationDefaults:
        """Raises: ExportError for a key that would change what is generated and is not understood here."""
        where = export / "generation_config.json"
        data = read_json(where)
        for key, allowed in NEUTRAL.items():
            if key in data and data[key] not in allowed:
                raise ExportError(
                    f"{where}: {key}: {str(data[key])[:40]} would change what is generated; only {allowed[0]} is served"
                )
        known = IDLE | NEUTRAL.keys() | {"do_sample", "temperature", "top_p", "top_k", "eos_token_id"}
        if strange := sorted(data.keys() - known):
            raise ExportError(f"{where}: {strange[0][:80]}: no such key is known, so nothing that has it is served")
        stop = data.get("eos_token_id")
        ids = [stop] if type(stop) is int else stop
        if not isinstance(ids, list) or not ids or any(type(number) is not int or number < 0 for number in ids):
            raise ExportError(f"{where}: eos_token_id: expected token ids, got {str(stop)[:40]}")
        if not data.get("do_sample", False):  # as transformers: greedy, whatever the temperature says
            return cls(Sampling(), frozenset(ids))
        temperature, top_p = (_number(where, data, key, 1.0) for key in ("temperature", "top_p"))
        return cls(Sampling(temperature, top_p, int(_number(where, data, "top_k", 0.0))), frozenset(ids))


def _number(where: Path, data: dict[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= 1e6:
        raise ExportError(f"{where}: {key}: expected a number of at least 0, got {str(value)[:40]}")
    return float(value)
