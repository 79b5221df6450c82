"""``python -m trainer.contract.checkpoint.export CHECKPOINT OUT``: write a checkpoint as a Hugging Face folder.

Writes config.json, generation_config.json and model.safetensors; the caller adds the tokenizer's files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.message import Message
from models.adapters import convert_to_files, find_family_for_export, list_stored_tensors
from models.files.safetensors_file import write_weights
from models.spec import ModelSpec
from models.tensors import is_multi_token
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.errors import CheckpointError, run_and_get_exit_code
from trainer.contract.lora import MergedWeights
from trainer.contract.recipe import Recipe

END_TOKEN = 0  # <|endoftext|>, of the frozen tokenizer
END_OF_TURN = 2  # <|im_end|>
KEPT_IN_FP32 = "e_score_correction_bias"  # rounding would choose other experts; transformers keeps it in fp32 too


def export_checkpoint(source: Path, out: Path) -> None:
    """Export a checkpoint to a folder. Memory holds one tensor. Raises: CheckpointError if the checkpoint does not verify; OSError."""
    if fault := checkpoints.find_checkpoint_fault(source):
        raise CheckpointError(Message.from_json(fault))
    recipe = Recipe.parse(checkpoints.read_checkpoint_state(source)["recipe"], str(source / "state.json"))
    weights = MergedWeights(checkpoints.StoredTensors(source, "model"), recipe.adapt)
    tensors = rename_tensors_for_hf(weights, recipe.model)
    layout = list_stored_tensors(
        recipe.model, find_family_for_export(recipe.model), lambda name: choose_dtype(name, recipe)
    )
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", make_hf_config(recipe.model, choose_export_dtype(recipe)))
    _write_json(out / "generation_config.json", make_generation_config())
    write_weights(out, layout, tensors)


def choose_export_dtype(recipe: Recipe) -> str:
    """The dtype of most tensors of the export, by torch's name."""
    return {"fp32": "float32", "bf16": "bfloat16"}[recipe.export_dtype]


def choose_dtype(name: str, recipe: Recipe) -> torch.dtype:
    """The dtype of a tensor of the export, by the name in its file."""
    dtype: torch.dtype = getattr(torch, choose_export_dtype(recipe))
    return torch.float32 if name.endswith(KEPT_IN_FP32) else dtype


def convert_tensors(model: Mapping[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the export, converted from a checkpoint's."""
    for name, tensor in rename_tensors_for_hf(MergedWeights(model, recipe.adapt), recipe.model):
        yield name, tensor.to(choose_dtype(name, recipe))


def rename_tensors_for_hf(model: Mapping[str, Tensor], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of the family's files. The norm before the head includes the factor by which muP scales the head's input."""

    def read(name: str) -> Tensor:
        tensor, ratio = model[name], spec.mup_width_ratio
        if ratio == 1 or name != "final_norm" and not (is_multi_token(name) and name.endswith(".output_norm")):
            return tensor
        return (1 + tensor) * ratio - 1 if spec.norm_plus_one else tensor * ratio

    return convert_to_files(spec, find_family_for_export(spec), read)


def make_hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The content of config.json for a model of this description."""
    family = find_family_for_export(spec)
    return {
        "architectures": [family.class_name],
        "model_type": family.name,
        **family.write(family.as_stored(spec)),
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        "pad_token_id": END_TOKEN,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def make_generation_config() -> dict[str, Any]:
    """The content of generation_config.json: greedy (``do_sample`` of transformers, ``temperature`` of vLLM), to the end of a document or turn."""
    return {"do_sample": False, "temperature": 0.0, "eos_token_id": [END_TOKEN, END_OF_TURN], "pad_token_id": END_TOKEN}


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
