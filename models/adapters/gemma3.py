"""Gemma 3's text models (arXiv 2503.19786): Gemma 2's block with QK-norm instead of soft-caps, and another RoPE in the layers with a window.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_ropes_of_two_kinds, read_windows, write_ropes_of_two_kinds
from models.adapters.gemma2 import NAMES_OF_GEMMA, read_block, write_block
from models.spec import ModelSpec

THETA, WINDOW_THETA = 1_000_000.0, 10_000.0  # what missing keys mean


def read(reader: ConfigReader) -> dict[str, Any]:
    reader.only("attn_logit_softcapping", None)  # the class does not read it
    found = read_block(reader, rope=False)
    every = reader.whole("sliding_window_pattern", 1, 512, 6)
    reader.take("_sliding_window_pattern", None)  # transformers writes it and does not read it
    windows = read_windows(reader, found["layers"], lambda number: (number + 1) % every != 0, usual=4096)
    rope = read_ropes_of_two_kinds(reader, found["context"], THETA, WINDOW_THETA, "rope_local_base_freq")
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


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_block(spec) | {"attn_logit_softcapping": None, "final_logit_softcapping": spec.logit_softcap}
    ropes = write_ropes_of_two_kinds(spec, WINDOW_THETA)
    return found | {"rope_parameters": ropes, "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", read, write, names=lambda spec: NAMES_OF_GEMMA)
