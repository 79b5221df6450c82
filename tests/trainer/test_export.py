from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from kernels.registry import bind
from tests.trainer.conftest import MakeShard, plan_of, recipe_with, run_trainer, write_spec
from trainer import checkpoint as checkpoints
from trainer.export import main
from trainer.model import Decoder
from trainer.recipe import Recipe


@pytest.fixture
def checkpoint(tmp_path: Path, make_shard: MakeShard) -> Path:
    """Trained a little, so that norms are not all one."""
    recipe = recipe_with(model__rope_theta=500.0, model__norm_eps=1e-5)
    folder = write_spec(tmp_path / "segment", plan_of(make_shard()), recipe, last_step=10)
    assert run_trainer(folder) == (0, "")
    return Path(json.loads((folder / "result.json").read_text())["checkpoint"])


def test_transformers_loads_it_and_gives_the_same_logits(tmp_path: Path, checkpoint: Path) -> None:
    assert main([str(checkpoint), str(tmp_path / "out")]) == 0
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert isinstance(theirs, Qwen3ForCausalLM)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = checkpoints.load(checkpoint)
    ours = Decoder(Recipe.parse(loaded.state["recipe"]).model, bind({}), torch.float32)
    ours.load_state_dict(loaded.model)
    tokens = torch.randint(512, (3, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(3, -1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = ours.logits(tokens, positions, torch.zeros(3, 32, dtype=torch.int32))
    assert float((expected - logits).abs().max()) < 1e-4
    stops = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [0, 2] and theirs.generation_config.eos_token_id == [0, 2]


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
