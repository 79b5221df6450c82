"""``python -m trainer.contract.checkpoint.export CHECKPOINT OUT``: write a checkpoint as a Hugging Face folder.

Writes config.json, generation_config.json and model.safetensors; the caller adds the tokenizer's files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.architectures import ARCHITECTURES, find_model_type
from trainer.contract.errors import run_and_get_exit_code
from trainer.contract.recipe import ModelRecipe, Recipe

END_TOKEN = 0  # <|endoftext|>, of the frozen tokenizer
END_OF_TURN = 2  # <|im_end|>
KEPT_IN_FP32 = "e_score_correction_bias"  # rounding would choose other experts; transformers keeps it in fp32 too


def export_checkpoint(source: Path, out: Path) -> None:
    """Export a checkpoint to a folder. Raises: CheckpointError if the checkpoint does not verify; OSError."""
    loaded = checkpoints.load_checkpoint(source)
    recipe = Recipe.parse(loaded.state["recipe"], str(source / "state.json"))
    tensors = dict(convert_tensors(loaded.model, recipe))
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", make_hf_config(recipe.model, choose_export_dtype(recipe)))
    _write_json(out / "generation_config.json", make_generation_config())
    with open(out / "model.safetensors", "wb") as file:
        for chunk in checkpoints.iterate_safetensors_bytes(tensors, {"format": "pt"}):
            file.write(chunk)


def choose_export_dtype(recipe: Recipe) -> str:
    """The dtype of most tensors of the export, by torch's name."""
    return {"fp32": "float32", "bf16": "bfloat16"}[recipe.export_dtype]


def convert_tensors(model: dict[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the export, converted from a checkpoint's."""
    dtype: torch.dtype = getattr(torch, choose_export_dtype(recipe))
    for name, tensor in rename_tensors_for_hf(model, recipe.model).items():
        yield name, tensor if name.endswith(KEPT_IN_FP32) else tensor.to(dtype)


def make_hf_config(shape: ModelRecipe, dtype: str) -> dict[str, Any]:
    """The content of config.json for a model of this shape."""
    model_type = find_model_type(shape)
    architecture = ARCHITECTURES[model_type]
    return {
        "architectures": [architecture.class_name],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.d_ff,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": architecture.tied_embeddings,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        "pad_token_id": END_TOKEN,
        "dtype": dtype,
        "torch_dtype": dtype,
        **architecture.own_keys(shape),
    }


def make_generation_config() -> dict[str, Any]:
    """The content of generation_config.json: greedy (``do_sample`` of transformers, ``temperature`` of vLLM), to the end of a document or turn."""
    return {"do_sample": False, "temperature": 0.0, "eos_token_id": [END_TOKEN, END_OF_TURN], "pad_token_id": END_TOKEN}


NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}


def rename_tensors_for_hf(model: dict[str, Tensor], shape: ModelRecipe) -> dict[str, Tensor]:
    """The tensors under Hugging Face's names. A tied head is not stored twice.

    The final norm includes the factor by which muP scales the head's input.
    """
    final_norm = model["final_norm"] * shape.mup_width_ratio if shape.mup_width_ratio != 1 else model["final_norm"]
    found = {"model.embed_tokens.weight": model["embedding"], "model.norm.weight": final_norm}
    for name, tensor in model.items():
        if not name.startswith("blocks."):
            continue
        _, layer, key = name.split(".")
        theirs = f"model.layers.{layer}."
        if key in NAMES:
            found[f"{theirs}{NAMES[key]}.weight"] = tensor
        elif key == "router_bias":
            found[f"{theirs}mlp.gate.e_score_correction_bias"] = tensor
        else:
            projection = key.removeprefix("experts_")
            for number, expert in enumerate(tensor.unbind()):
                found[f"{theirs}mlp.experts.{number}.{projection}_proj.weight"] = expert
    if not ARCHITECTURES[find_model_type(shape)].tied_embeddings:
        found["lm_head.weight"] = model["embedding"]
    if (
        shape.experts is not None and not shape.experts.shared
    ):  # a shared expert of zeros adds nothing; vLLM's class needs one
        size = shape.experts.d_ff
        sizes = {
            "shared_gate": (size, shape.d_model),
            "shared_up": (size, shape.d_model),
            "shared_down": (shape.d_model, size),
        }
        for number in range(shape.experts.dense_layers, shape.layers):
            for key, zeros in sizes.items():
                found[f"model.layers.{number}.{NAMES[key]}.weight"] = final_norm.new_zeros(zeros)
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return run_and_get_exit_code(
        "trainer.contract.checkpoint.export", lambda: export_checkpoint(Path(arguments[0]), Path(arguments[1]))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
