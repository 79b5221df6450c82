"""Trained parameters of LoRA, DoRA and frozen weights, against published numbers and the real tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from models.spec import ModelSpec
from models.tensors import list_tensor_shapes
from tests.support.messages import refused
from tests.support.trainer.published import MODELS, Published, model_of, shape
from trainer.contract.errors import RecipeError
from trainer.contract.plan.adapting import adapt, freeze, train_everything
from trainer.contract.plan.sizing import GB, GpuLayout, estimate_memory_parts, sum_bytes

GPT_3 = shape(50_257, 12_288, 96, 96, 96, 4 * 12_288, 2048, gated=False, tied=True)


@pytest.mark.parametrize("published", MODELS, ids=lambda m: m.name)
def test_training_everything_trains_every_parameter(published: Published) -> None:
    assert train_everything(published.model).parameters == published.model.parameters


@pytest.mark.parametrize(("rank", "millions"), [(1, 4.7), (8, 37.7)])
def test_trained_parameters_of_lora_are_those_of_its_paper(rank: int, millions: float) -> None:
    """GPT-3 with adapters of query and value: 4.7 M and 37.7 M (arXiv 2106.09685 Table 4)."""
    assert adapt(GPT_3, "lora", rank, ["q", "v"]).parameters == pytest.approx(millions * 1e6, abs=0.05e6)


@pytest.mark.parametrize(
    ("name", "lora", "dora"), [("Llama 2 7B", 0.83, 0.84), ("Llama 2 13B", 0.67, 0.68), ("Llama 3 8B", 0.70, 0.71)]
)
def test_trained_shares_of_dora_are_those_of_its_paper(name: str, lora: float, dora: float) -> None:
    """Rank 32 for q, k, v, up and down, in per cent of the model (arXiv 2402.09353 Table 1). LLaMA has Llama 2's shapes."""
    model = model_of(name)
    for kind, share in (("lora", lora), ("dora", dora)):
        trained = adapt(model, kind, 32, ["q", "k", "v", "up", "down"])  # type: ignore[arg-type]
        assert 100 * trained.parameters / model.parameters == pytest.approx(share, abs=0.01)


def test_adapters_leave_out_routers_and_routed_experts() -> None:
    model = model_of("DeepSeek-V3")
    one = adapt(model, "lora", 1)
    shapes = {
        name: size for name, size in list_tensor_shapes(model).items() if name.startswith("blocks.") and len(size) == 2
    }
    assert one.parameters == sum(sum(size) for name, size in shapes.items() if not name.endswith(".router"))
    assert one.first_layer == 0 and adapt(model, "lora", 1, ["shared_up"]).first_layer == 3, (
        "three layers have no experts"
    )


@pytest.mark.parametrize(
    ("rank", "targets", "code"),
    [
        (8, ["experts_up"], "plan.no_adapter"), (8, ["router"], "plan.no_adapter"), (8, ["attention_norm"], "plan.no_adapter"),
        (8, ["wq"], "plan.no_adapter"), (8, ["gate", "sinks"], "plan.no_adapter"), (512, ["k"], "plan.rank_too_large"),
    ],
)  # fmt: skip
def test_an_adapter_on_what_cannot_take_it_is_refused(rank: int, targets: list[str], code: str) -> None:
    with refused(code, RecipeError, key=targets[-1]):
        adapt(
            model_of("Qwen3-30B-A3B").model_copy(update={"experts": model_of("GLM-4.5-Air").experts}),
            "lora",
            rank,
            targets,
        )


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (["embedding"], r"embedding"),
        (["embedding", "head"], r"embedding|head"),
        (["blocks.0-1"], r"blocks\.[01]\..*"),
        (["blocks.1"], r"blocks\.1\..*"),
        (["blocks.*.q", "blocks.11"], r"blocks\.\d+\.q|blocks\.11\..*"),
    ],
)
def test_frozen_weights_are_those_that_the_patterns_name(patterns: list[str], named: str) -> None:
    model = shape(64, 32, 12, 2, 1, 64, 32, head_dim=16)
    left = [math.prod(size) for name, size in list_tensor_shapes(model).items() if not re.fullmatch(named, name)]
    assert freeze(model, patterns).parameters == sum(left)


def test_no_gradient_reaches_the_layers_below_the_lowest_trained_one() -> None:
    model = model_of("Llama 3 8B")
    assert freeze(model, ["blocks.0-15"]).first_layer == 0, "the embedding is trained"
    assert freeze(model, ["embedding", "blocks.0-15"]).first_layer == 16
    assert freeze(model, ["embedding", "blocks"]).first_layer == 32, "only the last norm and the head are trained"
    kept: list[float] = []
    for patterns in ([], ["blocks.0-15"], ["embedding", "blocks.0-15"], ["embedding", "blocks"]):
        parts = estimate_memory_parts(model, GpuLayout(1), 80 * GB, trained=freeze(model, patterns))
        kept.append(next(part.bytes for part in parts if part.name == "activations"))
    assert kept == [kept[0], kept[0], kept[0] / 2, 0.0]


@pytest.mark.parametrize(
    ("patterns", "code", "data"),
    [
        (["embeddings"], "plan.freezes_nothing", {"pattern": "embeddings", "last": 31}),
        (["embedding", "head", "blocks", "final_norm"], "plan.all_frozen", {}),
        (["blocks.40"], "plan.freezes_nothing", {"pattern": "blocks.40"}),
        (["blocks.2-32"], "plan.freezes_missing_layer", {"pattern": "blocks.2-32", "layer": 32, "last": 31}),
        (["blocks.40-41.q"], "plan.freezes_missing_layer", {"pattern": "blocks.40-41.q", "layer": 41, "last": 31}),
    ],
)
def test_a_pattern_that_names_nothing_or_everything_is_refused(
    patterns: list[str], code: str, data: dict[str, Any]
) -> None:
    with refused(code, RecipeError, **data):
        freeze(model_of("Llama 3 8B"), patterns)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", ["Llama 3 8B", "Qwen3-0.6B", "DeepSeek-V3"])
def test_the_memory_of_a_full_training_is_that_of_a_plan_that_freezes_nothing(name: str, gpus: int) -> None:
    model: ModelSpec = model_of(name)
    for optimizer in ("adamw", "muon"):
        one, other = (
            estimate_memory_parts(model, GpuLayout(gpus), 80 * GB, optimizer=optimizer, trained=trained)
            for trained in (None, train_everything(model))
        )
        assert [part.bytes for part in one] == [part.bytes for part in other]
    frozen = estimate_memory_parts(model, GpuLayout(gpus), 80 * GB, trained=adapt(model, "lora", 16))
    weights = next(part.bytes for part in frozen if part.name == "weights")
    assert weights == (4 * adapt(model, "lora", 16).adapters + 2 * model.parameters) / gpus
    assert sum_bytes(frozen) < sum_bytes(one)
