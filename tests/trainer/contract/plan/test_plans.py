"""Each line of these plans equals its line in ``plans.txt``. ``python -m tests.trainer.contract.plan.test_plans`` accepts a change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import refused
from tests.support.trainer.published import model_of
from tests.support.trainer.published_runs import DEEPSEEK_V3, QWEN3_30B
from trainer.contract.errors import RecipeError
from trainer.contract.plan.gpus import GPUS
from trainer.contract.plan.hf_config import read_public_model
from trainer.contract.plan.plan_report import make_plan_lines, make_plan_warnings
from trainer.contract.plan.run_plan import PlanRequest, SizingError, estimate_weight_traffic_bytes, plan_run
from trainer.contract.plan.sizing import GpuLayout, choose_model_shape, list_layer_kinds, sum_bytes
from trainer.contract.recipe import BatchRecipe

KEPT = Path(__file__).with_name("plans.txt")
LLAMA_8B, QWEN = model_of("Llama 3 8B"), model_of("Qwen3-0.6B")


def ask_for_config(config: dict[str, Any], *rest: Any, **more: Any) -> PlanRequest:
    public = read_public_model(config, "config.json", 4096)
    return PlanRequest(public.spec, *rest, **more, public_model=public)


DEEPSEEK = ask_for_config(DEEPSEEK_V3, 14.8e12, 2048, GPUS["h100"], expert=64, fp8=True)
ASKS = {
    "one GPU at home": PlanRequest(QWEN, 12e9, 1, GPUS["rtx-4090"]),
    "fp32, Muon, a batch of its own": PlanRequest(
        QWEN, 12e9, 8, GPUS["a100-40"], batch=BatchRecipe(sequences=64, micro_sequences=2), optimizer="muon", itemsize=4
    ),
    "one node": PlanRequest(LLAMA_8B, 160e9, 8, GPUS["h100"], logit_rows=None),
    "many nodes, replicas, another price": PlanRequest(LLAMA_8B, 15e12, 1024, GPUS["h200"], replicas=4, price=3.5),
    "tensor ranks": PlanRequest(model_of("Llama 3 405B"), 15.6e12, 16384, GPUS["h100"], network=25e9),
    "a given share of the peak": PlanRequest(model_of("Llama 2 70B"), 2e12, 2048, GPUS["a100"], mfu=0.45),
    "experts everywhere": ask_for_config(QWEN3_30B, 600e9, 64, GPUS["mi300x"]),
    "a family that no adapter knows": ask_for_config(
        QWEN3_30B | {"model_type": "newer_moe"}, 600e9, 64, GPUS["mi300x"]
    ),
    "experts apart, latent attention, fp8": DEEPSEEK,
    "the same without a rank of queries": replace(
        DEEPSEEK, model=ask_for_config(DEEPSEEK_V3 | {"q_lora_rank": None}, 1, 1, GPUS["h100"]).model, fp8=False
    ),
}
SIZES = (1e7, 1.5e8, 1e9, 8e9, 7e10, 1e12)  # parameters


def lines_now() -> Iterator[str]:
    for name, gpu in GPUS.items():
        yield f"GPU {name}: " + ", ".join(
            f"{key} {value:.6g}" for key, value in asdict(gpu).items() if isinstance(value, float | int)
        )
    for size in SIZES:
        shape = choose_model_shape(size, 50_000, 2048)
        yield f"{size:.6g} parameters: {shape.model_dump(exclude_defaults=True)}; kinds of layers {list_layer_kinds(shape)}"
    for title, ask in ASKS.items():
        plan = plan_run(ask)
        yield f"{title}: {plan.layout}, {plan.sequences} sequences"
        yield from (
            f"  {line.name} {line.value:.6g}: {line.text} | {line.formula} | {line.source}"
            for line in make_plan_lines(plan)
        )
        yield from (f"  {part.name} {part.bytes:.6g}: {part.formula} | {part.source}" for part in plan.memory)
        yield f"  in all {sum_bytes(plan.memory):.6g}"
        yield from (f"  · {remark}" for remark in make_plan_warnings(plan))


def test_each_line_of_a_plan_equals_the_accepted_line() -> None:
    assert list(lines_now()) == KEPT.read_text().splitlines()


@pytest.mark.parametrize(
    ("ask", "data"),
    [
        (PlanRequest(model_of("Llama 3 405B"), 1e13, 8, GPUS["l4"]), {"needed": 862.6, "memory": 24.0, "gpus": None}),
        (
            PlanRequest(LLAMA_8B, 1e11, 1, GPUS["rtx-3090"]),
            {"needed": 157.3, "gpus": 16, "answers": "use 16 of these GPUs or use GPUs with at least 173 GB each"},
        ),
    ],
)
def test_a_model_that_fits_nowhere_is_refused_with_an_alternative(ask: PlanRequest, data: dict[str, Any]) -> None:
    with refused("plan.does_not_fit", SizingError) as found:
        plan_run(ask)
    assert {name: found.value.data[name] for name in data} == data | {"needed": pytest.approx(data["needed"], abs=0.05)}


def test_a_single_gpu_gathers_no_weights() -> None:
    assert (
        estimate_weight_traffic_bytes(ASKS["one node"], GpuLayout(1))
        == 0.0
        < estimate_weight_traffic_bytes(ASKS["one node"], GpuLayout(2))
    )


def test_a_number_of_parameters_that_no_shape_has_is_refused() -> None:
    assert choose_model_shape(5e5, 1000, 2048).layers == 2  # the fewest
    with pytest.raises(RecipeError):
        choose_model_shape(1e5, 50_000, 2048)


if __name__ == "__main__":
    KEPT.write_text("".join(f"{line}\n" for line in lines_now()))
