"""OLMo 3: OLMo 2's block, with a window in three of four layers. RoPE is scaled only in the others.

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import (
    Family,
    read_ropes_of_two_kinds,
    read_windows,
    write_ropes_of_two_kinds,
    write_windows,
)
from models.adapters.olmo2 import NAMES_OF_OLMO, read_block
from models.adapters.olmo2 import write as write_block
from models.spec import ModelSpec

THETA = 500_000.0  # what a missing key means, for both kinds of layers


def read(reader: ConfigReader) -> dict[str, Any]:
    found = read_block(reader, rope=False)
    windows = read_windows(reader, found["layers"], lambda number: (number + 1) % 4 != 0, usual=4096)
    rope = read_ropes_of_two_kinds(reader, found["context"], THETA, THETA)
    if windows is None:
        del rope["window_rope_theta"]
    elif reader.take("rope_parameters", None) is None and rope["rope_theta"] != THETA:
        # transformers 5 gives such a rope_theta to the layers without a window, and 4 gave it to all
        alone = Message(
            "models.theta_of_kinds",
            "{theta}, or rope_parameters with a rope_theta for each kind of layers",
            theta=THETA,
        )
        raise reader.unexpected("rope_theta", alone, rope["rope_theta"])
    return found | rope | {"windows": windows}


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_block(spec) | {"layer_types": ["full_attention"] * spec.layers} | write_windows(spec)
    for key in ("rope_theta", "use_sliding_window"):
        found.pop(key)
    return found | {"rope_parameters": write_ropes_of_two_kinds(spec, THETA)}


FAMILY = Family("olmo3", "Olmo3ForCausalLM", read, write, names=lambda spec: NAMES_OF_OLMO)
