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
from trainer.contract.plan.hf_config import read_config
from trainer.contract.plan.weight_files import WeightFiles, compare_weights, drop_absent_layers

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {},
    "SmolLM3 3B": {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
    "OLMo 2 7B": {},
    "Gemma 2 2B": {"head_dim": 16},
    "Qwen3-30B-A3B": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GLM-4.5-Air": EXPERTS | {"head_dim": 16},
}


def make_folder(folder: Path, name: str, **more: Any) -> dict[str, torch.Tensor]:
    """The small sizes of a public config, and tensors as it describes them, in two files with an index. Returns the tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | SMALL | OF_FAMILY[name] | more))
    public = read_config(folder)
    assert public.family is not None
    mappings = public.family.list_mappings(public.spec)
    tensors = {theirs: torch.zeros(one.shape, dtype=torch.bfloat16) for one in mappings for theirs in one.theirs}
    save(folder, tensors)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, kept in parts.items() for name in kept}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", OF_FAMILY)
def test_files_that_config_json_describes_are_counted_and_files_of_another_model_are_refused(
    name: str, tmp_path: Path
) -> None:
    tensors = make_folder(tmp_path, name)
    # copies of embedding and head in the layer for multi-token prediction count once
    own = {
        key: one
        for key, one in tensors.items()
        if not key.endswith(("4.embed_tokens.weight", "shared_head.head.weight"))
    }
    whole = sum(tensor.numel() for tensor in own.values())
    public = read_config(tmp_path)
    biases = 0 if name != "GLM-4.5-Air" else 4 * 4  # of the routers of four layers, which are no parameters
    assert whole == public.spec.parameters + biases
    wanted = WeightFiles(2, len(own), whole, 2 * whole)
    assert compare_weights(public, tmp_path) == wanted
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save(tmp_path, tensors | more)
    assert compare_weights(public, tmp_path) == wanted, "what is not imported does not count"
    lacks = "model.layers.1.self_attn.o_proj.weight"
    save(tmp_path, {key: tensor for key, tensor in tensors.items() if key != lacks})
    with refused("plan.other_weights", RecipeError, held=whole - tensors[lacks].numel(), described=whole) as error:
        compare_weights(public, tmp_path)
    assert error.value.data["first"].data["tensor"] == lacks


def test_layers_for_multi_token_prediction_that_the_files_lack_are_not_planned(tmp_path: Path) -> None:
    """transformers writes such a folder: its class drops the layers, but its config.json still counts them."""
    tensors = make_folder(tmp_path, "GLM-4.5-Air")
    public = read_config(tmp_path)
    assert public.spec.multi_token_layers == 1 and drop_absent_layers(public, tmp_path) == public
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.")}
    save(tmp_path, kept)
    found = compare_weights(public, tmp_path)
    assert found is not None and found.tensors == len(kept)
    assert drop_absent_layers(public, tmp_path).spec == public.spec.without_multi_token
    (tmp_path / "model-1-of-2.safetensors").unlink()
    assert drop_absent_layers(public, tmp_path) == public, "compare_weights says what is missing"


def test_another_number_of_layers_in_config_json_is_refused_with_both_numbers(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, "SmolLM2-135M")
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name.startswith("model.layers.3."))
    with refused("plan.other_weights", RecipeError) as error:
        compare_weights(read_config(tmp_path), tmp_path)
    assert error.value.data["held"] - error.value.data["described"] == layer


def test_sizes_that_were_read_by_key_names_are_compared_by_their_number_alone(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, "SmolLM2-135M")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "newer"}))
    found = compare_weights(read_config(tmp_path), tmp_path)
    assert found is not None and found.tensors == len(tensors)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "newer", "intermediate_size": 480}))
    with refused("plan.other_weights", RecipeError, held=found.parameters):
        compare_weights(read_config(tmp_path), tmp_path)


def test_a_missing_or_truncated_shard_is_refused_and_a_folder_without_weights_is_not(tmp_path: Path) -> None:
    make_folder(tmp_path, "SmolLM2-135M")
    public, shard = read_config(tmp_path), tmp_path / "model-2-of-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with refused("models.other_length", RecipeError, file=shard):
        compare_weights(public, tmp_path)
    shard.unlink()
    with refused("models.missing_shard", RecipeError, file=shard.name):
        compare_weights(public, tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    assert compare_weights(public, tmp_path) is None
