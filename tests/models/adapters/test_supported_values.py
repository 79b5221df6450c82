"""docs/MODELS.md names the values of config.json that the factory can compute, because refusals send people there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from models.adapters import FAMILIES, find_family_for_config
from models.adapters.config_reader import ModelFilesError
from tests.support.models.small_models import CASES
from tests.support.paths import ROOT

BEGIN, END = "<!-- supported values -->\n", "<!-- end of the supported values -->"
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
SCALED: Mapping[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.0},
    "longrope": {"short_factor": [1.0], "long_factor": [2.0], "factor": 2.0},
    "llama3": {"factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
Config = dict[str, Any]


def with_activation(config: Config, value: str) -> Config:
    keys = ("hidden_act", "hidden_activation")
    return config | {key: value for key in keys if key in config}


def with_rope(config: Config, kind: str) -> Config:
    said = config["rope_parameters"]
    both = "full_attention" in said
    theta = (said["full_attention"] if both else said)["rope_theta"]
    made = {"rope_type": kind, "rope_theta": theta, **SCALED[kind]}
    return config | {"rope_parameters": said | {"full_attention": made} if both else made}


def with_bias(config: Config, value: bool) -> Config:
    return config | {"attention_bias": value}


def with_tie(config: Config, value: bool) -> Config:
    return config | {"tie_word_embeddings": value}


def is_read(config: Config) -> bool:
    try:
        find_family_for_config(config, "config.json").read_config(config, "config.json")
    except ModelFilesError:
        return False
    return True


def list_values(config: Config, change: Callable[[Config, Any], Config], values: Any) -> str:
    found = [value for value in values if is_read(change(copy.deepcopy(config), value))]
    return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in found) or "no such key"


def write_table() -> str:
    lines = [
        "| family | `hidden_act` | `rope_type` | `attention_bias` | `tie_word_embeddings` |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(FAMILIES):
        family, case = FAMILIES[name], next(case for case in CASES if str(case).startswith(f"{name}-"))
        spec = family.read_config(json.loads(case.make_config().to_json_string()), name)
        config = family.write(family.as_stored(spec)) | {"model_type": name}
        assert is_read(config), name
        cells = [
            list_values(config, with_activation, ACTIVATIONS),
            list_values(config, with_rope, SCALED),
            list_values(config, with_bias, (False, True)),
            list_values(config, with_tie, (False, True)),
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_supported_values_says_what_is_read() -> None:
    text = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert table == write_table()
