"""Mistral (arXiv 2310.06825): Llama's block, in which each layer can have a sliding window.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, read_window_everywhere, require_silu, write_common
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("attention_bias", False)
    reader.only("use_sliding_window", False)  # the class does not read it
    # null is no window (v0.2 and later), but a missing key is one of 4096
    window = reader.whole("sliding_window", 1, 1 << 24, None if reader.is_null("sliding_window") else 4096)
    return read_common(reader, kv_heads=8) | {
        "tied": reader.truth("tie_word_embeddings", False),
        "windows": read_window_everywhere(reader, window),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"sliding_window": spec.layer(0).window}
    del found["attention_bias"], found["use_sliding_window"]
    return found


FAMILY = Family("mistral", "MistralForCausalLM", read, write)
