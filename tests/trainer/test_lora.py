"""LoRA, DoRA and frozen weights in real segments: what is trained, what stays to the bit, how segments follow one another, and what is exported."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kernels.contract.registry import bind_ops
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, run_trainer, train_here, write_spec
from trainer.contract.checkpoint.export import export_checkpoint
from trainer.contract.checkpoint.format import find_checkpoint_fault, load_checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import RecipeError
from trainer.contract.json_lines import read_json_lines
from trainer.contract.lora import AdaptRecipe, is_lora_tensor, merge_lora
from trainer.contract.recipe import Recipe
from trainer.model.transformer import Decoder

KINDS = ("lora", "dora")
ADAPT: dict[str, dict[str, Any]] = {kind: {"kind": kind, "rank": 4, "alpha": 8.0} for kind in KINDS}


@pytest.fixture
def plan(make_shard: MakeShard) -> DataPlan:
    return plan_of(make_shard())


def train(folder: Path, plan: DataPlan, recipe: Recipe, first: int, last: int, start: Path | None) -> Path:
    """Train a segment; returns its last checkpoint."""
    write_spec(folder, plan, recipe, first_step=first, last_step=last, initial_checkpoint=start and str(start))
    assert train_here(folder) == (0, "")
    return Path(json.loads((folder / "result.json").read_text())["checkpoint"])


@pytest.fixture
def base(tmp_path: Path, plan: DataPlan) -> Path:
    """The checkpoint of step 10, trained whole."""
    return train(tmp_path / "base", plan, recipe_with(), 0, 10, None)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_json_lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_trains_the_small_matrices_alone_and_begins_with_the_function_of_its_checkpoint(
    tmp_path: Path, plan: DataPlan, base: Path, kind: str
) -> None:
    train(tmp_path / "whole", plan, recipe_with(), 10, 20, base)
    made = load_checkpoint(train(tmp_path / kind, plan, recipe_with(adapt=ADAPT[kind]), 10, 20, base))
    before = load_checkpoint(base).model
    assert losses(tmp_path / kind)[0] == pytest.approx(losses(tmp_path / "whole")[0], abs=1e-6 if kind == "dora" else 0)
    assert losses(tmp_path / kind)[1:] != losses(tmp_path / "whole")[1:]
    assert all(torch.equal(made.model[name], tensor) for name, tensor in before.items())
    added = made.model.keys() - before.keys()
    parts = 2 if kind == "lora" else 3
    assert len(added) == 2 * 7 * parts and all(map(is_lora_tensor, added))
    assert all(made.model[name].abs().max() > 0 for name in added)
    moments = {name.partition(".")[2] for name in made.optimizer if name.startswith("exp_avg.")}
    assert moments == added


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_segment_resumes_to_the_same_bits(tmp_path: Path, plan: DataPlan, base: Path, kind: str) -> None:
    recipe = recipe_with(adapt=ADAPT[kind])
    straight = load_checkpoint(train(tmp_path / "straight", plan, recipe, 10, 20, base))
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    folder = tmp_path / "again"
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000020")
    resumed = load_checkpoint(train(folder, plan, recipe, 10, 20, base))
    for one, other in ((straight.model, resumed.model), (straight.optimizer, resumed.optimizer)):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_segment_trains_the_merged_weights(tmp_path: Path, plan: DataPlan, base: Path, kind: str) -> None:
    """Its first loss is that of the adapted model going on, and no small matrix is left."""
    adapted = train(tmp_path / "adapted", plan, recipe_with(adapt=ADAPT[kind]), 10, 20, base)
    train(tmp_path / "on", plan, recipe_with(adapt=ADAPT[kind]), 20, 21, adapted)
    whole = load_checkpoint(train(tmp_path / "whole", plan, recipe_with(), 20, 25, adapted))
    other = load_checkpoint(
        train(tmp_path / "other", plan, recipe_with(adapt={"rank": 2, "targets": ["q"]}), 20, 21, adapted)
    )
    for folder in ("whole", "other"):
        assert losses(tmp_path / folder)[0] == pytest.approx(losses(tmp_path / "on")[0], abs=2e-6)
    assert not any(map(is_lora_tensor, whole.model))
    assert {name for name in other.model if is_lora_tensor(name)} == {
        f"blocks.{n}.q_lora_{part}" for n in (0, 1) for part in "ab"
    }
    merged = merge_lora(load_checkpoint(adapted).model, AdaptRecipe(**ADAPT[kind]))
    assert all(torch.equal(other.model[name], tensor) for name, tensor in merged.items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_holds_the_merged_weights(tmp_path: Path, plan: DataPlan, base: Path, kind: str) -> None:
    """transformers computes from the export what the trainer computes from the checkpoint."""
    recipe = recipe_with(adapt=ADAPT[kind])
    adapted = train(tmp_path / "adapted", plan, recipe, 10, 20, base)
    export_checkpoint(adapted, tmp_path / "export")
    assert not any("lora" in name or "dora" in name for name in load_file(tmp_path / "export" / "model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ours = decoder_of(recipe)
    ours.load_state_dict(load_checkpoint(adapted).model)
    tokens = torch.randint(3, 512, (2, 32), generator=torch.Generator().manual_seed(1))
    positions, documents = torch.arange(32).expand(2, -1), torch.zeros(2, 32, dtype=torch.int64)
    with torch.no_grad():
        difference = (ours.logits(tokens, positions, documents) - theirs(tokens).logits).abs().max()
        unadapted = decoder_of(recipe_with())
        unadapted.load_state_dict(load_checkpoint(base).model)
        change = (
            (ours.logits(tokens, positions, documents) - unadapted.logits(tokens, positions, documents)).abs().max()
        )
    assert difference < 1e-4 < 1e-2 < change


def decoder_of(recipe: Recipe) -> Decoder:
    return Decoder(recipe.model, bind_ops({}, torch.device("cpu"), torch.float32), adapt=recipe.adapt)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_two_factors(kind: str) -> None:
    """With dW the gradient of the merged matrix W': dA = s Bᵀ dW, dB = s dW Aᵀ (LoRA); for DoRA dW is scaled by m / ‖W + s B A‖ first."""
    recipe = recipe_with(adapt=ADAPT[kind])
    adapted, whole = decoder_of(recipe), decoder_of(recipe_with())
    adapted.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if is_lora_tensor(name):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.2 + 0.05)
    assert recipe.adapt is not None
    weights = {name: p.detach() for name, p in adapted.named_parameters()}
    whole.load_state_dict(merge_lora(weights, recipe.adapt))
    tokens = torch.randint(3, 512, (2, 32), generator=generator)
    positions, documents = torch.arange(32).expand(2, -1), torch.zeros(2, 32, dtype=torch.int64)
    for model in (adapted, whole):
        model.loss(tokens, tokens.roll(-1), torch.full((2, 32), 1 / 64), positions, documents, z_loss=0.0)[0].backward()
    found, merged = dict(adapted.named_parameters()), dict(whole.named_parameters())
    scale = recipe.adapt.scale
    for name in ("blocks.0.q", "blocks.1.down", "blocks.1.attention_out", "blocks.0.gate"):
        gradient = merged[name].grad
        assert gradient is not None
        a, b = weights[f"{name}_lora_a"], weights[f"{name}_lora_b"]
        if kind == "dora":
            row = weights[name] + scale * b @ a
            unit = row / row.norm(dim=1, keepdim=True)
            torch.testing.assert_close(
                found[f"{name}_dora_length"].grad, (gradient * unit).sum(1), rtol=1e-3, atol=1e-6
            )
            gradient = gradient * (weights[f"{name}_dora_length"] / row.norm(dim=1)).unsqueeze(1)
        torch.testing.assert_close(found[f"{name}_lora_a"].grad, scale * b.t() @ gradient, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found[f"{name}_lora_b"].grad, scale * gradient @ a.t(), rtol=1e-3, atol=1e-6)


def test_a_merge_has_the_same_bits_for_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *size: torch.randn(size, generator=generator)
    held = {"blocks.0.q": draw(61, 1031), "blocks.0.q_lora_a": draw(7, 1031), "blocks.0.q_lora_b": draw(61, 7)}
    held["blocks.0.q_dora_length"] = draw(61).abs()
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(merge_lora(copy.deepcopy(held), AdaptRecipe(kind="dora", rank=7, alpha=3.0))["blocks.0.q"])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, made[0]) for one in made)
    row = held["blocks.0.q"].double() + 3 / 7 * held["blocks.0.q_lora_b"].double() @ held["blocks.0.q_lora_a"].double()
    expected = row * (held["blocks.0.q_dora_length"].double() / row.norm(dim=1)).unsqueeze(1)
    torch.testing.assert_close(made[0].double(), expected, rtol=1e-6, atol=1e-7)


def test_dora_keeps_a_row_of_zeros() -> None:
    """A pruned row has no direction. It stays zero in training and in a merge, and nothing becomes NaN."""
    adapted = decoder_of(recipe_with(adapt=ADAPT["dora"]))
    adapted.initialise(1)
    with torch.no_grad():
        adapted.get_parameter("blocks.0.up")[3] = 0
        adapted.get_parameter("blocks.0.up_dora_length")[3] = 0
    tokens = torch.randint(3, 512, (2, 32), generator=torch.Generator().manual_seed(1))
    positions, documents = torch.arange(32).expand(2, -1), torch.zeros(2, 32, dtype=torch.int64)
    adapted.loss(tokens, tokens.roll(-1), torch.full((2, 32), 1 / 64), positions, documents, z_loss=0.0)[0].backward()
    gradients = [parameter.grad for parameter in adapted.parameters() if parameter.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    merged = merge_lora({name: p.detach() for name, p in adapted.named_parameters()}, AdaptRecipe(**ADAPT["dora"]))
    assert not merged["blocks.0.up"][3].any() and all(bool(tensor.isfinite().all()) for tensor in merged.values())


@pytest.mark.parametrize("changes", [{"freeze": ["embedding", "blocks.1"]}, {"adapt": {"rank": 2, "targets": ["q"]}}])
def test_the_bias_of_a_router_that_is_not_trained_stays(
    tmp_path: Path, plan: DataPlan, changes: dict[str, Any]
) -> None:
    experts = {"model__experts": {"count": 4, "per_token": 2, "d_ff": 16, "bias_rate": 0.1}}
    start = train(tmp_path / "experts", plan, recipe_with(**experts), 0, 5, None)
    after = train(tmp_path / "after", plan, recipe_with(**experts, **changes), 5, 10, start)
    whole = train(tmp_path / "whole", plan, recipe_with(**experts), 5, 10, start)
    biases = [load_checkpoint(path).model["blocks.1.router_bias"] for path in (start, after, whole)]
    assert torch.equal(biases[0], biases[1]) and not torch.equal(biases[0], biases[2])


def test_frozen_weights_stay_to_the_bit_and_can_be_trained_again(tmp_path: Path, plan: DataPlan, base: Path) -> None:
    recipe = recipe_with(freeze=["embedding", "blocks.0-0"])
    frozen = train(tmp_path / "frozen", plan, recipe, 10, 20, base)
    before, after = load_checkpoint(base), load_checkpoint(frozen)
    same = {name for name in before.model if torch.equal(before.model[name], after.model[name])}
    assert same == {name for name in before.model if name == "embedding" or name.startswith("blocks.0.")}
    assert not any(name.endswith(tuple(same)) for name in after.optimizer)
    again = load_checkpoint(train(tmp_path / "again", plan, recipe_with(), 20, 25, frozen))
    assert not any(torch.equal(again.model[name], after.model[name]) for name in again.model)
    assert again.optimizer["step.embedding"] == 5 and again.optimizer["step.blocks.1.q"] == 25


def test_two_ranks_train_what_one_trains(tmp_path: Path, plan: DataPlan, base: Path) -> None:
    recipe = recipe_with(adapt=ADAPT["dora"])
    one = load_checkpoint(train(tmp_path / "one", plan, recipe, 10, 14, base))
    folder = write_spec(tmp_path / "two", plan, recipe, first_step=10, last_step=14, initial_checkpoint=str(base))
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    )
    code, errors = run_trainer([folder], *launcher)
    assert code == 0, errors
    (path,) = (folder / "checkpoints").glob("step-*14")
    assert not find_checkpoint_fault(path)
    two = load_checkpoint(path)
    assert one.model.keys() == two.model.keys()
    moved = {name: (one.model[name] - load_checkpoint(base).model.get(name, 0)).norm() for name in one.model}
    for name, tensor in one.model.items():
        assert (tensor - two.model[name]).norm() <= 1e-3 * moved[name] + 1e-6, name


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"adapt": {"rank": 4, "targets": ["quarry"]}}, "lora.target"),
        ({"adapt": {"rank": 4, "targets": ["q", "q"]}}, "lora.target_twice"),
        ({"adapt": {"rank": 4, "targets": []}}, "lora.no_target"),
        ({"adapt": {"rank": 40}}, "lora.rank_too_large"),
        ({"adapt": {"rank": 4, "targets": ["experts_up"]}, "model__experts": {"count": 4, "per_token": 2, "d_ff": 8}}, "lora.target"),
        ({"adapt": {"rank": 4, "targets": ["router"]}, "model__experts": {"count": 4, "per_token": 2, "d_ff": 8}}, "lora.target"),
        ({"adapt": {"rank": 4}, "freeze": ["embedding"]}, "recipe.freeze_and_adapt"),
        ({"adapt": {"rank": 4}, "parallel": {"tensor": 2}}, "recipe.adapt_tensor"),
        ({"freeze": ["embeding"]}, "recipe.freezes_nothing"),
        ({"freeze": ["blocks.8-9"]}, "recipe.freezes_missing_layer"),
        ({"freeze": ["*"]}, "recipe.all_frozen"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_or_frozen_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(RecipeError) as found:
        recipe_with(**change)
    assert found.value.data["problem"].code == code
