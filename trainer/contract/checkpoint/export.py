"""``python -m trainer.contract.checkpoint.export CHECKPOINT OUT``: write a checkpoint as a Hugging Face folder.

Writes config.json, generation_config.json and the weights, in one file or in several with an index; the caller adds the tokenizer's files.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.message import Message
from models.adapters import convert_to_files, find_family_for_export, list_stored_tensors
from models.adapters.family import Family
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
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # the recipe's name of a dtype → torch's


def export_checkpoint(source: Path, out: Path) -> None:
    """Export a checkpoint to a folder. Memory holds one tensor.

    Raises: CheckpointError if the checkpoint does not verify, or if a weight is too large for its dtype; OSError.
    """
    if fault := checkpoints.find_checkpoint_fault(source):
        raise CheckpointError(Message.from_json(fault))
    recipe = Recipe.parse(checkpoints.read_checkpoint_state(source)["recipe"], str(source / "state.json"))
    tensors = _iterate_checked(checkpoints.StoredTensors(source, "model"), recipe)
    layout = list_stored_tensors(
        recipe.model, find_family_for_export(recipe.model), lambda name: choose_dtype(name, recipe)
    )
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", make_hf_config(recipe.model, choose_export_dtype(recipe)))
    _write_json(out / "generation_config.json", make_generation_config())
    write_weights(out, layout, tensors, recipe.export_shard_bytes)


def choose_export_dtype(recipe: Recipe) -> str:
    """The dtype of most tensors of the export, by torch's name."""
    return TORCH_NAMES[recipe.export_dtype]


def choose_dtype(name: str, recipe: Recipe) -> torch.dtype:
    """The dtype of a tensor of the export, by the name in its file."""
    usual = "fp32" if name.endswith(KEPT_IN_FP32) else recipe.export_dtype
    named = (dtype for pattern, dtype in recipe.export_dtypes.items() if fnmatchcase(name, pattern))
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[next(named, usual)])
    return dtype


def make_dtype_keys(spec: ModelSpec, family: Family, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """The keys ``export_dtype`` and ``export_dtypes`` of a recipe whose exports have these dtypes. ``dtypes``: torch's name by the name in the files.

    ``export_dtype`` is the dtype of most values. Tensors of all layers and experts are one pattern where it names no tensor of another dtype.
    """
    ours = {theirs: name for name, theirs in TORCH_NAMES.items()}
    held, values = {name: ours[dtype] for name, dtype in dtypes.items()}, Counter[str]()
    for mapping in family.list_mappings(family.as_stored(spec)):
        for name in mapping.theirs:
            if name in held:  # a tensor that only an export has takes the usual dtype
                values[held[name]] += math.prod(mapping.shape)
    usual = values.most_common(1)[0][0]
    odd: dict[str, list[str]] = defaultdict(list)
    for name, dtype in held.items():
        if dtype != ("fp32" if name.endswith(KEPT_IN_FP32) else usual):
            odd[_replace_numbers(name)].append(name)
    found: dict[str, str] = {}
    for pattern, names in odd.items():
        matched = {name for name in held if fnmatchcase(name, pattern)}
        whole = matched == set(names) and len({held[name] for name in names}) == 1
        found |= {pattern: held[names[0]]} if whole else {name: held[name] for name in names}
    return {"export_dtype": usual} | ({"export_dtypes": found} if found else {})


def _replace_numbers(name: str) -> str:
    """The pattern of a tensor's name in all layers and experts.

    >>> _replace_numbers("model.layers.12.mlp.experts.3.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def convert_tensors(model: Mapping[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the export, converted from a checkpoint's. Raises: CheckpointError for a weight that is too large for its dtype."""
    for name, tensor in _iterate_checked(model, recipe):
        converted = tensor.to(choose_dtype(name, recipe))
        del tensor
        yield name, converted
        del converted  # before the next one is made


def _iterate_checked(model: Mapping[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the export as the checkpoint has it. Raises: CheckpointError for a weight that becomes infinite in the export."""
    renamed: Iterable[tuple[str, Tensor]] = rename_tensors_for_hf(MergedWeights(model, recipe.adapt), recipe.model)
    for name, tensor in renamed:
        dtype = choose_dtype(name, recipe)
        extremes = torch.stack(tensor.aminmax()) if tensor.numel() else tensor
        if bool(extremes.isfinite().all()) and not bool(extremes.to(dtype).isfinite().all()):
            raise CheckpointError(
                "export.large_weight", "The tensor {tensor} has a weight of {weight:.3g}, which is too large for {dtype}. Write 'export_dtype: "
                "bf16' into the recipe, and remove the key export_dtypes.",
                tensor=name, weight=extremes.abs().max().item(), dtype=str(dtype).removeprefix("torch."),
            )  # fmt: skip
        yield name, tensor
        del tensor, extremes  # before the next one is made


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
