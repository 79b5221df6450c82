"""SmolLM3: Llama's block, but every n-th layer has no RoPE (NoPE, arXiv 2501.18795).

A separate file, because each family has its own.
"""

from __future__ import annotations

from typing import Any

from kernels.contract.message import Message
from models.adapters.config_reader import ConfigReader
from models.adapters.family import Family, read_common, read_windows, require_silu, write_common, write_windows
from models.spec import ModelSpec


def read(reader: ConfigReader) -> dict[str, Any]:
    require_silu(reader)
    found = read_common(reader, kv_heads=4, theta=2_000_000.0)
    bias = reader.truth("attention_bias", False)
    every = _nope_every(reader, found["layers"])
    without_rope = [not has for has in make_list(found["layers"], every)]
    return found | {
        "tied": reader.truth("tie_word_embeddings", True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": reader.truth("mlp_bias", False),
        "nope_every": every,
        "windows": read_windows(reader, found["layers"], lambda number: without_rope[number]),
    }


def _nope_every(reader: ConfigReader, layers: int) -> int | None:
    """The n of "every n-th layer": from the list ``no_rope_layers`` (1: the layer has RoPE) if there is one, else from the interval."""
    interval = reader.whole("no_rope_layer_interval", 1, 512, 4)
    has_rope = reader.take("no_rope_layers", None)
    if has_rope is None:
        has_rope = make_list(layers, interval)
    without = [number + 1 for number, has in enumerate(has_rope) if has == 0] if isinstance(has_rope, list) else []
    every = without[0] if without else None
    if has_rope != make_list(layers, every) or any(type(has) is not int for has in has_rope):
        expected = Message(
            "models.nope_pattern",
            "{layers} numbers, with 0 in every n-th layer (n is 2 or more) and 1 in the others",
            layers=layers,
        )
        raise reader.unexpected("no_rope_layers", expected, has_rope)
    return every


def make_list(layers: int, every: int | None) -> list[int]:
    """For each layer: 1 if it has RoPE, 0 if it is an ``every``-th layer.

    >>> make_list(6, 3)
    [1, 1, 0, 1, 1, 0]
    """
    return [int(every is None or (number + 1) % every != 0) for number in range(layers)]


def write(spec: ModelSpec) -> dict[str, Any]:
    found = write_common(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    windows = write_windows(spec)
    return (
        found
        | windows
        | {
            "no_rope_layers": make_list(spec.layers, spec.nope_every),
            "no_rope_layer_interval": spec.nope_every or 4,
        }
    )


# The class reads neither; SmolLM3's own file says 2 for the second.
FAMILY = Family("smollm3", "SmolLM3ForCausalLM", read, write, idle=("max_window_layers", "pretraining_tp"))
