"""The headers of safetensors files, compared with what config.json describes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.messages import refused
from tests.support.trainer.public_configs import CONFIGS
from trainer.contract.errors import RecipeError
from trainer.contract.plan.hf_config import PublicModel, read_public_model
from trainer.contract.plan.weight_files import INDEX, WeightFiles, read_weight_files, refuse_other_weights

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LLAMA: dict[str, Any] = CONFIGS["SmolLM2-135M"] | SMALL


def tensors_of(public: PublicModel) -> dict[str, torch.Tensor]:
    assert public.family is not None
    mappings = public.family.list_mappings(public.spec)
    return {name: torch.zeros(one.shape, dtype=torch.bfloat16) for one in mappings for name in one.theirs}


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two files and their index."""
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {name: file for file, kept in parts.items() for name in kept}})
    )


def test_the_headers_of_shards_give_each_shape_and_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    public = read_public_model(LLAMA, "x")
    tensors = tensors_of(public)
    save_shards(tmp_path, tensors)
    save_file(
        {"other": torch.zeros(3)}, tmp_path / "consolidated.safetensors"
    )  # as Mistral's folders: the index does not name it
    found = read_weight_files(tmp_path)
    assert found is not None and found.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert (found.elements, found.bytes, found.files) == (public.spec.parameters, 2 * public.spec.parameters, 2)
    refuse_other_weights(public, found, tmp_path)
    assert read_weight_files(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M",
        "Qwen2.5-0.5B",
        "Gemma 2 2B",
        "SmolLM3 3B",
        "Qwen3-30B-A3B",
        "GLM-4.5-Air",
        "DeepSeek-V3",
        "OLMo 2 7B",
    ],
)
def test_the_tensors_of_each_familys_files_are_those_that_its_config_describes(name: str) -> None:
    public = read_public_model(CONFIGS[name], name)
    assert public.family is not None
    stored = public.family.list_mappings(public.family.as_stored(public.spec))
    shapes = {theirs: one.shape for one in stored for theirs in one.theirs}
    whole = WeightFiles(shapes, 0, 1)
    refuse_other_weights(public, whole, Path(name))
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": (64,)}
    if public.config.get("num_nextn_predict_layers"):
        more[f"model.layers.{public.spec.layers}.eh_proj.weight"] = (8, 16)
    refuse_other_weights(public, WeightFiles(shapes | more, 0, 1), Path(name))
    lacks = "model.layers.1.self_attn.o_proj.weight"
    with refused("plan.other_weights", RecipeError) as error:
        refuse_other_weights(public, WeightFiles({k: v for k, v in shapes.items() if k != lacks}, 0, 1), Path(name))
    data = error.value.data
    assert data["described"] - data["held"] == math.prod(shapes[lacks]) and data["first"].data["name"] == lacks


def test_a_tied_head_may_be_stored_too_and_a_head_that_config_json_lacks_is_named(tmp_path: Path) -> None:
    tied, untied = (read_public_model(LLAMA | {"tie_word_embeddings": on}, "x") for on in (True, False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(tied).items()}
    refuse_other_weights(tied, WeightFiles(shapes | {"lm_head.weight": (64, 32)}, 0, 1), tmp_path)
    with refused(
        "plan.other_weights", RecipeError, held=tied.spec.parameters, described=untied.spec.parameters
    ) as error:
        refuse_other_weights(untied, WeightFiles(shapes, 0, 1), tmp_path)
    assert error.value.data["first"].data["name"] == "lm_head.weight"


def test_sizes_that_were_read_by_key_names_are_compared_by_their_number_alone(tmp_path: Path) -> None:
    public = read_public_model(LLAMA | {"model_type": "newer"}, "x")
    refuse_other_weights(public, WeightFiles({"a": (public.spec.parameters - 50,)}, 0, 1), tmp_path)
    with refused("plan.other_weights", RecipeError, held=9, described=public.spec.parameters):
        refuse_other_weights(public, WeightFiles({"a": (9,)}, 0, 1), tmp_path)


def test_a_missing_or_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(read_public_model(LLAMA, "x"))
    shard = tmp_path / "model-2-of-2.safetensors"

    def refused_as(code: str) -> None:
        with refused("plan.unreadable_weights", RecipeError) as error:
            read_weight_files(tmp_path)
        assert str(tmp_path) in error.value.data["file"] and error.value.data["problem"].code == code

    save_shards(tmp_path, tensors)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused_as("plan.truncated")
    for damaged in (
        b"",
        b"\x00" * 100,
        whole[:8] + b"[" * (len(whole) - 8),
        (2).to_bytes(8, "little") + b"[]",
        b"PK" + whole,
    ):
        shard.write_bytes(damaged)
        refused_as("plan.bad_header")
    shard.unlink()
    refused_as("plan.missing_shard")
    save_file({"model.norm.weight": torch.zeros(32), "model.embed_tokens.weight": torch.zeros(2)}, shard)
    refused_as("plan.twice")
    for index in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / INDEX).write_text(index)
        refused_as("plan.bad_index")
    for name in ("../other.safetensors", 5):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        refused_as("plan.missing_shard")
