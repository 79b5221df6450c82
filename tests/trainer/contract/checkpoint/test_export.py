from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factory.evals.reference_model import ReferenceModel
from kernels.contract.registry import bind_ops
from models.adapters import find_family_for_export
from models.tensors import list_tensor_shapes
from tests.support.messages import refused, says
from tests.support.trainer.families import DESCRIBED, FAMILIES, ODD
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from tests.support.trainer.small_models import make_model
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.export import choose_dtype, convert_tensors, main, make_dtype_keys
from trainer.contract.checkpoint.format import write_imported_checkpoint
from trainer.contract.errors import CheckpointError, RecipeError
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder


def trained(folder: Path, make_shard: MakeShard, **changes: object) -> Path:
    """A checkpoint after a few real steps, so that not all norms are one and not all biases of the router are zero."""
    write_spec(folder, plan_of(make_shard()), recipe_with(**changes), last_step=10)
    code, said = train_here(folder)
    assert code == 0 and all(line.startswith("warning about the recipe: ") for line in said.splitlines()), said
    return Path(json.loads((folder / "result.json").read_text())["checkpoint"])


EXPORTED = FAMILIES | {
    "exaone4": ("Exaone4ForCausalLM", DESCRIBED["exaone4"]),
    "nanochat": ("NanoChatForCausalLM", DESCRIBED["nanochat"]),
    "gpt-oss": ("GptOssForCausalLM", DESCRIBED["gpt-oss"]),
}


@pytest.mark.parametrize("family", EXPORTED)
def test_transformers_and_the_judge_load_an_export_and_give_the_same_logits(
    tmp_path: Path, make_shard: MakeShard, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    architecture, changes = EXPORTED[family]
    checkpoint = trained(tmp_path / "segment", make_shard, **(ODD | changes))
    assert main([str(checkpoint), str(tmp_path / "out")]) == 0
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == architecture
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = checkpoints.load_checkpoint(checkpoint)
    shape = Recipe.parse(loaded.state["recipe"]).model
    ours = Decoder(shape, bind_ops({}), torch.float32)
    ours.load_state_dict(loaded.model)
    assert all(float(b.abs().max()) > 0 for name, b in ours.named_buffers()), "biases that do not move prove nothing"
    tokens = torch.randint(512, (3, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(3, -1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = ours.logits(tokens, positions, torch.zeros(3, 32, dtype=torch.int32))
    judged = ReferenceModel.load(tmp_path / "out").logits(tokens)
    assert float((expected - logits).abs().max()) < 1e-4
    assert float((judged - logits).abs().max()) < 1e-4
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2] and theirs.generation_config.eos_token_id == [0, 2]
    assert generation["do_sample"] is False and generation["temperature"] == 0, "vLLM reads the temperature alone"
    continued = theirs.generate(tokens[:1, :8], max_new_tokens=1)  # nothing is said but what the export says
    assert continued[0, 8] == expected[0, 7].argmax(), "greedy by the export's own defaults"
    theirs.save_pretrained(tmp_path / "saved")  # transformers refuses to save what it finds invalid in a changed one
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("n_shared_experts", 1) >= 1, "vLLM's class cannot be without a shared expert"


def test_an_export_in_bf16_keeps_the_routers_bias_in_fp32(tmp_path: Path, make_shard: MakeShard) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = trained(tmp_path / "segment", make_shard, **FAMILIES["experts"][1], export_dtype="bf16")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    biases = {name for name in found if "bias" in name}
    assert biases and {name for name, tensor in found.items() if tensor.dtype != torch.bfloat16} == biases
    bias = checkpoints.load_checkpoint(checkpoint).model["blocks.1.router_bias"]
    assert torch.equal(found["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def test_a_weight_that_becomes_infinite_in_its_dtype_is_refused_by_export_and_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with(export_dtype="fp16", export_dtypes={"model.norm.weight": "fp32"})
    state = make_model(recipe).state_dict()
    model = {name: state[name].clone() for name in list_tensor_shapes(recipe.model)}
    model["final_norm"][0] = 1e30
    dict(convert_tensors(model, recipe))
    write_imported_checkpoint(
        tmp_path / "fits", list_tensor_shapes(recipe.model), model.items(), {"recipe": recipe.model_dump(mode="json")}
    )
    assert main([str(tmp_path / "fits" / "step-00000000"), str(tmp_path / "out")]) == 0
    model["blocks.1.up"][3, 4] = -65_519.0  # the largest that is rounded to fp16's largest
    assert dict(convert_tensors(model, recipe))["model.layers.1.mlp.up_proj.weight"][3, 4] == -65_504
    model["blocks.1.up"][3, 4] = -65_520.0
    with refused("export.large_weight", CheckpointError, tensor="model.layers.1.mlp.up_proj.weight", weight=65_520.0):
        dict(convert_tensors(model, recipe))
    write_imported_checkpoint(
        tmp_path / "large", list_tensor_shapes(recipe.model), model.items(), {"recipe": recipe.model_dump(mode="json")}
    )
    assert main([str(tmp_path / "large" / "step-00000000"), str(tmp_path / "none")]) == 2
    assert "error[export.large_weight]" in capsys.readouterr().err


def test_the_dtypes_of_a_source_become_keys_that_give_them_again() -> None:
    spec, family = (
        recipe_with(**FAMILIES["experts"][1]).model,
        find_family_for_export(recipe_with(**FAMILIES["experts"][1]).model),
    )
    names = family.list_file_names(spec)
    router, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {router, bias} <= set(names)
    first = names.index("model.layers.1.mlp.experts.0.up_proj.weight")
    sources = {
        "all bf16, the bias too": dict.fromkeys(names, "bfloat16"),
        "as GLM is published": dict.fromkeys(names, "bfloat16") | {bias: "float32"},
        "norms": {name: "float32" if "norm" in name else "float16" for name in names},
        "one expert": dict.fromkeys(names, "bfloat16") | {names[first]: "float32"},
        "all fp32": dict.fromkeys(names, "float32"),
    }
    keys = {name: make_dtype_keys(spec, family, dtypes) for name, dtypes in sources.items()}
    for name, dtypes in sources.items():
        recipe = recipe_with(**FAMILIES["experts"][1], **keys[name])
        assert {one: str(choose_dtype(one, recipe)) for one in names} == {
            one: f"torch.{dtype}" for one, dtype in dtypes.items()
        }, name
    assert keys["all bf16, the bias too"] == {
        "export_dtype": "bf16", "export_dtypes": {"model.layers.*.mlp.gate.e_score_correction_bias": "bf16"}
    }  # fmt: skip
    assert keys["as GLM is published"] == {"export_dtype": "bf16"} and keys["all fp32"] == {"export_dtype": "fp32"}
    assert keys["one expert"]["export_dtypes"][names[first]] == "fp32"
    with pytest.raises(RecipeError) as error:
        recipe_with(export_dtypes={"model.layer.*": "fp32"})
    assert says(error.value.message, ("recipe.exports_nothing", {"pattern": "model.layer.*"}))


def test_a_failed_export_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "error[trainer.not_a_checkpoint]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
