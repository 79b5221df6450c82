from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factory.evals.reference_model import ReferenceModel
from kernels.contract.registry import bind_ops
from tests.support.trainer.families import DESCRIBED, FAMILIES, ODD
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.export import main
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


def test_a_failed_export_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "error[trainer.not_a_checkpoint]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
