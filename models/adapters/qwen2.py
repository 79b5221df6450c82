"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama's block with biases of queries, keys and values.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    Family,
    read_common,
    read_windows,
    require_dividing_heads,
    require_silu,
    write_common,
    write_windows,
)
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("use_mrope", False)
    found = read_common(reader, kv_heads=32)
    require_dividing_heads(reader, found, whole_heads=True)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "qkv_bias": True,
        "windows": read_upper_windows(reader, found["layers"]),
    }


def read_upper_windows(reader: ConfigReader, layers: int) -> list[int | None] | None:
    """``ModelSpec.windows`` as Qwen says them: without a list, the layers from ``max_window_layers`` on have a window."""
    first = reader.whole("max_window_layers", 0, 512, 28)
    return read_windows(reader, layers, lambda number: number >= first)


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec)
    del found["attention_bias"]
    return found | write_windows(spec)


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, write)
