"""EXAONE 4 (arXiv 2507.11407): norms after each half, QK-norm of each head, and in hybrid models no RoPE in the layers without a window.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, read_windows, require_silu, write_common, write_windows
from models.adapters.olmo2 import NAMES_OF_OLMO
from models.adapters.smollm3 import make_list
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    reader.only("attention_bias", False)  # the class reads neither
    reader.only("use_sliding_window", False)
    found = read_common(reader, kv_heads=32)
    return found | {
        "tied": reader.truth("tie_word_embeddings", False),
        "norms": "post",
        "qk_norm": True,
        **_read_layers(reader, found["layers"]),
    }


def _read_layers(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """``windows`` and ``nope_every``: with a window, exactly the layers that have it have RoPE. Without one, all layers have RoPE."""
    kinds, every = reader.take("layer_types", None), 1
    if kinds is not None:
        reader.take("sliding_window_pattern", None)  # a text in published files. The class does not read it then
    elif reader.is_null("sliding_window"):
        raise reader.missing("layer_types")  # the class divides by 0 then
    else:
        every = reader.whole("sliding_window_pattern", 1, 512, 4)
    windows = read_windows(reader, layers, lambda number: (number + 1) % every != 0, usual=4096)
    if reader.is_null("sliding_window"):
        return {"windows": windows}
    turns = [int(window is not None) for window in windows or [None] * layers]
    period = next((number for number, has in enumerate(turns, start=1) if not has), None)
    if period == 1 or turns != make_list(layers, period):
        expected = Message("models.nope_kinds", "full_attention in every n-th layer (n is 2 or more), and in no other")
        raise reader.unexpected("layer_types", expected, kinds)
    return {"windows": windows, "nope_every": period}


def write(spec: ModelSpec) -> dict[str, Any]:
    found = (
        write_common(spec)
        | {"sliding_window": None, "layer_types": ["full_attention"] * spec.layers}
        | write_windows(spec)
    )
    for key in ("attention_bias", "use_sliding_window"):
        del found[key]
    return found


FAMILY = Family("exaone4", "Exaone4ForCausalLM", read, write, names=lambda spec: NAMES_OF_OLMO)
