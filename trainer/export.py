"""``python -m trainer.export CHECKPOINT OUT``: a checkpoint as a Hugging Face ``Qwen3ForCausalLM`` folder.

Writes config.json, generation_config.json and model.safetensors; the tokenizer's files are the caller's to add.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import checkpoint as checkpoints
from trainer.errors import TrainerError
from trainer.recipe import ModelRecipe, Recipe

END_TOKEN = 0  # <|endoftext|>, of the frozen tokenizer
END_OF_TURN = 2  # <|im_end|>


def export(source: Path, out: Path) -> None:
    """Raises: CheckpointError when the checkpoint does not verify; OSError."""
    loaded = checkpoints.load(source)
    recipe = Recipe.parse(loaded.state["recipe"], str(source / "state.json"))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.export_dtype]
    tensors = {name: tensor.to(dtype) for name, tensor in hf_tensors(loaded.model, recipe.model).items()}
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", hf_config(recipe.model, str(dtype).removeprefix("torch.")))
    _write_json(out / "generation_config.json", generation_config())
    with open(out / "model.safetensors", "wb") as file:
        for chunk in checkpoints.safetensors_bytes(tensors, {"format": "pt"}):
            file.write(chunk)


def hf_config(shape: ModelRecipe, dtype: str) -> dict[str, Any]:
    """config.json of ``Qwen3ForCausalLM``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
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
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        "pad_token_id": END_TOKEN,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def generation_config() -> dict[str, Any]:
    """Greedy; stops at the end of a document or of a turn."""
    return {"do_sample": False, "eos_token_id": [END_TOKEN, END_OF_TURN], "pad_token_id": END_TOKEN}


def hf_tensors(model: dict[str, Tensor], shape: ModelRecipe) -> dict[str, Tensor]:
    """The trainer's names and fused matrices to Hugging Face's. The head is tied and so not stored twice."""
    heads = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    found = {"model.embed_tokens.weight": model["embedding"], "model.norm.weight": model["final_norm"]}
    for i in range(shape.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = model[ours + "qkv"].split(heads)
        gate, up = model[ours + "gate_up"].chunk(2)
        found |= {
            f"{theirs}input_layernorm.weight": model[ours + "attention_norm"],
            f"{theirs}self_attn.q_proj.weight": q,
            f"{theirs}self_attn.k_proj.weight": k,
            f"{theirs}self_attn.v_proj.weight": v,
            f"{theirs}self_attn.q_norm.weight": model[ours + "q_norm"],
            f"{theirs}self_attn.k_norm.weight": model[ours + "k_norm"],
            f"{theirs}self_attn.o_proj.weight": model[ours + "attention_out"],
            f"{theirs}post_attention_layernorm.weight": model[ours + "mlp_norm"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": model[ours + "down"],
        }
    return found


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        export(Path(arguments[0]), Path(arguments[1]))
    except TrainerError as error:
        print(f"trainer.export: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
