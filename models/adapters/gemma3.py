"""Gemma 3's text models (arXiv 2503.19786): Gemma 2's block with QK-norm instead of soft-caps, and another RoPE in the layers with a window.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, make_rope_parameters, read_one_value, read_scaling, read_windows
from models.adapters.gemma2 import NAMES_OF_GEMMA, read_block, write_block
from models.spec import ModelSpec

THETA, WINDOW_THETA = 1_000_000.0, 10_000.0  # what missing keys mean


def read(reader: ConfigReader) -> dict[str, Any]:
    reader.only("attn_logit_softcapping", None)  # the class does not read it
    found = read_block(reader, rope=False)
    every = reader.whole("sliding_window_pattern", 1, 512, 6)
    reader.take("_sliding_window_pattern", None)  # transformers writes it and does not read it
    windows = read_windows(reader, found["layers"], lambda number: (number + 1) % every != 0, usual=4096)
    rope = _read_ropes(reader, found["context"])
    if windows is None:  # no layer has the RoPE of a window
        del rope["window_rope_theta"]
    return (
        found
        | rope
        | {
            "qk_norm": True,
            "windows": windows,
            "logit_softcap": reader.positive("final_logit_softcapping", None),
        }
    )


def _read_ropes(reader: ConfigReader, context: int) -> dict[str, Any]:
    """Both RoPEs: from a mapping for each kind of layers (transformers 5), or from ``rope_theta`` and ``rope_scaling`` for layers without a window
    and ``rope_local_base_freq`` for the others (4)."""
    new, old = reader.take("rope_parameters", None), reader.take("rope_scaling", None)
    kinds = reader.within("rope_parameters", new or {"full_attention": old, "sliding_attention": None})
    full = kinds.within("full_attention", kinds.take("full_attention", {}))
    window = kinds.within("sliding_attention", kinds.take("sliding_attention", {}))
    kinds.finish()
    if new is not None:
        reader.only("rope_scaling", None)
    found = {
        "rope_theta": read_one_value(reader, "rope_theta", full, "rope_theta", THETA),
        "window_rope_theta": read_one_value(reader, "rope_local_base_freq", window, "rope_theta", WINDOW_THETA),
    }
    full.only("truncate", True)  # the class looks for it at another place
    window.only("rope_type", "default")
    window.only("type", "default")
    window.finish()
    return found | read_scaling(full, context)


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_block(spec) | {"attn_logit_softcapping": None, "final_logit_softcapping": spec.logit_softcap}
    local = spec.window_rope_theta
    if local is None:  # one RoPE for all layers, which windows have without scaling
        local = spec.rope_theta if spec.rope_scaling is None else WINDOW_THETA
    return found | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": make_rope_parameters(spec),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", read, write, names=lambda spec: NAMES_OF_GEMMA)
