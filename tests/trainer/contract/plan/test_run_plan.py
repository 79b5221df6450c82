"""Compares plans with published runs, and the search for a layout with trying all layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.spec import ModelSpec
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.trainer.published import model_of, shape
from trainer.contract.errors import RecipeError
from trainer.contract.plan.gpus import GPUS, MFU, Gpu
from trainer.contract.plan.plan_report import convert_plan_to_json, make_plan_lines, make_plan_warnings
from trainer.contract.plan.run_plan import (
    MFU_NODES,
    RECOMPUTED,
    PlanRequest,
    SizingError,
    compute_deepseek_rule_batch_tokens,
    compute_deepseek_rule_lr,
    estimate_memory,
    estimate_time_and_cost,
    plan_run,
)
from trainer.contract.plan.sizing import GB, GpuLayout, choose_model_shape, sum_bytes
from trainer.contract.recipe import BatchRecipe, Recipe, WarmupBatch

EIGHT_BILLION = PlanRequest(choose_model_shape(8e9, 128_256, 4096), 300e9, 32, GPUS["h100"])


def gpu_hours(name: str, tokens: float, gpu: str, mfu: float | None = None) -> float:
    ask = PlanRequest(model_of(name), tokens, 1024, GPUS[gpu], mfu=mfu)
    return estimate_time_and_cost(ask, GpuLayout(1024), 1024).gpu_hours


# -- published runs ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "hours", "within"),
    [("Llama 2 7B", 184_320, 0.04), ("Llama 2 13B", 368_640, 0.01), ("Llama 2 70B", 1_720_320, 0.11)],
)
def test_planned_gpu_hours_at_the_default_mfu_are_those_of_llama_2(name: str, hours: float, within: float) -> None:
    """2 T tokens on A100-80GB (arXiv 2307.09288 Table 2)."""
    assert gpu_hours(name, 2e12, "a100", mfu=MFU) == pytest.approx(hours, rel=within)


def test_planned_gpu_hours_at_the_published_mfu_are_those_of_llama_3() -> None:
    """405B: 30.84 M H100 hours (its model card), restarts and long context among them; 15.6 T tokens at 38–43 % (§3.3.2)."""
    assert gpu_hours("Llama 3 405B", 15.6e12, "h100", mfu=0.38) == pytest.approx(30.84e6, rel=0.06)


def test_planned_flops_are_those_of_llama_3() -> None:
    """'3.8 × 10^25 FLOPs' on 15.6 T tokens (arXiv 2407.21783 §1): 6 N D, which leaves attention out."""
    model = model_of("Llama 3 405B")
    assert 15.6e12 * model.count_flops_per_token() == pytest.approx(3.8e25, rel=0.04)
    attention = 6 * model.layers * model.heads * model.head_dim * model.context
    assert 15.6e12 * (model.count_flops_per_token() - attention) == pytest.approx(3.8e25, rel=0.01)


def test_planned_throughput_is_that_of_llama_3() -> None:
    """43 % on 8,192 H100 is 430 TFLOP/s each (arXiv 2407.21783 Table 4)."""
    ask = PlanRequest(model_of("Llama 3 405B"), 15.6e12, 8192, GPUS["h100"], mfu=0.43)
    effort = estimate_time_and_cost(ask, GpuLayout(8192, 8), 2048)
    assert effort.tokens_per_second * ask.model.count_flops_per_token() / 8192 == pytest.approx(430e12, rel=0.02)


def test_planned_throughput_is_that_of_palm() -> None:
    """540B on 6,144 TPU v4 at 46.2 % (45.7 % without attention): 238.3 K tokens/s (arXiv 2204.02311 §4.1, appendix B)."""
    palm = model_of("PaLM 540B")
    tpu = Gpu(275e12, 32 * GB, "TPU v4")
    assert estimate_time_and_cost(
        PlanRequest(palm, 780e9, 6144, tpu, mfu=0.462), GpuLayout(6144), 2048
    ).tokens_per_second == pytest.approx(238.3e3, rel=0.01)
    assert 0.457 * 6144 * 275e12 / (6 * palm.matmul_parameter_count) == pytest.approx(238.3e3, rel=0.001)
    assert 780e9 * 6 * palm.matmul_parameter_count == pytest.approx(2527.2e21, rel=0.002), (
        "its compute table: 2527.2 ZFLOPs"
    )


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "gpus", "batch", "seconds", "mfu"),
    [
        (6144, 64, 48, 8, 4, 1.10, 0.415),
        (12288, 96, 96, 64, 64, 13.75, 0.514),
        (20480, 128, 105, 280, 280, 37.83, 0.560),
        (20480, 128, 105, 2240, 2240, 39.15, 0.542),
        (25600, 160, 128, 512, 512, 71.49, 0.563),
    ],
)
def test_planned_iteration_times_are_those_of_megatron(
    hidden: int, heads: int, layers: int, gpus: int, batch: int, seconds: float, mfu: float
) -> None:
    """arXiv 2205.05198 Tables 3 and 5, §6.3: s 2048, v 51200, A100. Their MFU counts the masked half of attention."""
    model = ModelSpec(
        vocab_size=51200, d_model=hidden, layers=layers, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        d_ff=round(8 / 3 * hidden), context=2048,
    )  # fmt: skip
    ask = PlanRequest(model, batch * 2048, gpus, GPUS["a100"], mfu=mfu)
    effort = estimate_time_and_cost(ask, GpuLayout(gpus, 8), batch)
    assert effort.steps == 1 and effort.days * 86400 == pytest.approx(seconds, rel=0.035)


def test_recomputed_blocks_cost_the_time_that_was_measured_for_megatron() -> None:
    """+39 % of a layer's time for 22B, +36 % for 530B and 1T (arXiv 2205.05198 Table 4, §6.2), 33 % by FLOPs."""
    times = 1 / RECOMPUTED
    assert times == pytest.approx(4 / 3) and times == pytest.approx(1.36, rel=0.03)


@pytest.mark.parametrize(
    ("model", "sequences", "lr"),
    [(shape(102_400, 4096, 30, 32, 32, 10_923), 2304, 4.2e-4), (shape(102_400, 8192, 95, 64, 8, 21_845), 4608, 3.2e-4)],
    ids=["7B", "67B"],
)
def test_deepseeks_rules_give_the_batch_and_rate_of_deepseeks_models(
    model: ModelSpec, sequences: int, lr: float
) -> None:
    """2 T tokens, context 4096 (arXiv 2401.02954 Table 2)."""
    assert compute_deepseek_rule_batch_tokens(model, 2e12) == pytest.approx(sequences * 4096, rel=0.06)
    assert compute_deepseek_rule_lr(model, 2e12) == pytest.approx(lr, rel=0.02)


def test_planned_cost_is_that_of_deepseek_v3() -> None:
    """2.788 M H800 hours at $2 are $5.576 M (arXiv 2412.19437 Table 1)."""
    effort = plan_run(EIGHT_BILLION).effort
    assert effort.cost / effort.gpu_hours * 2.788e6 == pytest.approx(5.576e6)


def test_a_model_that_torchtitan_trained_fits_in_its_layout() -> None:
    """Llama 3 70B with FSDP2 alone, whole blocks recomputed, 64 A100-80GB, 8192 tokens (docs/performance.md)."""
    ask = PlanRequest(model_of("Llama 3 70B"), 15e12, 64, GPUS["a100"], logit_rows=None)
    found = plan_run(ask)
    assert (found.layout.tensor, found.layout.recompute) == (1, "block")


# -- the search ----------------------------------------------------------------------------------------------------------
def test_a_plan_of_8b_parameters_on_32_gpus_needs_no_tensor_parallelism() -> None:
    found = plan_run(EIGHT_BILLION)
    assert (found.layout.tensor, found.layout.data, found.layout.recompute) == (1, 32, "none")
    assert found.effort.mfu == MFU_NODES and 20 < found.effort.days < 30
    alone = plan_run(replace(EIGHT_BILLION, gpus=8, gpu=GPUS["h200"])).effort
    assert alone.mfu == MFU, "one node reaches more"
    assert found.effort.tokens_per_step == found.sequences * 4096
    assert found.effort.steps == math.ceil(300e9 / found.effort.tokens_per_step)


def test_blocks_are_recomputed_before_tensors_are_split() -> None:
    smaller = replace(EIGHT_BILLION, gpu=replace(GPUS["h100"], memory=32 * GB))
    found = plan_run(smaller)
    assert (found.layout.tensor, found.layout.recompute) == (1, "block")
    assert found.effort.mfu == pytest.approx(1 / (1 / MFU_NODES + 1 / MFU / 3)), (
        "a third more work, at the MFU of one node"
    )
    long = replace(smaller, model=EIGHT_BILLION.model.model_copy(update={"context": 131_072}))
    assert plan_run(long).layout.tensor > 1, "a row that fits on no GPU is split"


def test_a_plan_for_many_gpus_splits_tensors_to_keep_the_batch_small() -> None:
    found = plan_run(replace(EIGHT_BILLION, gpus=4096))
    assert found.layout.tensor > 1 and found.effort.tokens_per_step < 2.5 * compute_deepseek_rule_batch_tokens(
        found.ask.model, 300e9
    )


def test_a_run_that_does_not_fit_is_refused_with_a_setting_that_fits() -> None:
    ask = PlanRequest(choose_model_shape(70e9, 128_256, 4096), 1.4e12, 8, GPUS["h100"])
    with refused("plan.does_not_fit", SizingError, memory=80.0, part="optimiser") as error:
        plan_run(ask)
    assert plan_run(replace(ask, gpus=error.value.data["gpus"]))
    memory = float(error.value.data["answers"].split("GPUs with at least ")[1].split()[0])
    assert plan_run(replace(ask, gpu=replace(ask.gpu, memory=memory * GB)))


@given(
    parameters=st.sampled_from([2e8, 1e9, 8e9, 30e9]),
    gpus=st.integers(1, 300),
    memory=st.sampled_from([24, 80, 192]),
    context=st.sampled_from([2048, 8192, 65536]),
    rows=st.sampled_from([None, 1024]),
)
@settings(deadline=None, max_examples=40)
def test_a_plan_has_the_largest_micro_batch_and_the_least_recomputation_that_fit(
    parameters: float, gpus: int, memory: float, context: int, rows: int | None
) -> None:
    gpu = replace(GPUS["h100"], memory=memory * GB)
    ask = PlanRequest(choose_model_shape(parameters, 32_000, context), 40 * parameters, gpus, gpu, logit_rows=rows)
    try:
        found = plan_run(ask)
    except SizingError:
        for tensor in (t for t in (1, 2, 4, 8) if gpus % t == 0 and ask.model.kv_heads % t == 0):
            assert sum_bytes(estimate_memory(ask, GpuLayout(gpus, tensor, 1, "block"))) > gpu.memory
        return
    layout = found.layout
    assert layout.tensor * layout.data == gpus and sum_bytes(found.memory) <= gpu.memory
    assert found.sequences % (layout.data * layout.micro_sequences) == 0
    per_rank = max(1, round(compute_deepseek_rule_batch_tokens(ask.model, ask.tokens) / context / layout.data))
    if layout.micro_sequences < per_rank:
        larger = replace(layout, micro_sequences=layout.micro_sequences + 1)
        assert sum_bytes(estimate_memory(ask, larger)) > gpu.memory, "a larger micro-batch would fit"
    if layout.recompute == "block":
        assert sum_bytes(estimate_memory(ask, replace(layout, recompute="none", micro_sequences=1))) > gpu.memory


@given(sequences=st.integers(1, 200), warm=st.integers(1, 200), gpus=st.integers(1, 64))
@settings(deadline=None, max_examples=40)
def test_a_plan_keeps_the_recipes_batch_and_divides_it_among_ranks(sequences: int, warm: int, gpus: int) -> None:
    batch = BatchRecipe(sequences=sequences, warmup=[WarmupBatch(until_step=5, sequences=warm)])
    ask = PlanRequest(choose_model_shape(1e9, 128_256, 512), 2e10, gpus, GPUS["h100"], batch=batch)
    try:
        found = plan_run(ask)
    except RecipeError as error:
        assert error.code == "plan.indivisible_batch" and error.data["sequences"] == sequences
        divides = [t for t in (1, 2, 4, 8) if gpus % t == 0 and ask.model.kv_heads % t == 0]
        assert all(sequences % (gpus // t) or warm % (gpus // t) for t in divides)
        return
    assert found.sequences == sequences
    micro = batch.model_copy(update={"micro_sequences": found.layout.micro_sequences})
    micro.refuse_uneven_split(found.layout.data)


# -- the network ---------------------------------------------------------------------------------------------------------
MIXTURE = model_of("Qwen3-30B-A3B")


def test_gathering_all_experts_makes_a_mixture_wait_for_the_network() -> None:
    """30.5 B weights move for 3 B that compute: 8 bytes each, 50 GB/s, 4096 tokens a GPU."""
    ask = PlanRequest(MIXTURE, 1e12, 16, GPUS["h100"])
    effort = estimate_time_and_cost(ask, GpuLayout(16), 256)
    assert effort.bound == "network"
    assert effort.tokens_per_second / 16 == pytest.approx(4096 / (8 * MIXTURE.parameters / 50e9), rel=1e-6)
    apart = estimate_time_and_cost(replace(ask, expert=16), GpuLayout(16, expert=16), 256)
    assert apart.bound == "computing" and apart.tokens_per_second > 5 * effort.tokens_per_second
    assert apart.exchange == 4 * 2 * 2048 * 8 * (1 / 2) * 48, (
        "bytes: there and back, forward and backward, half of it to the other node"
    )
    assert estimate_time_and_cost(replace(ask, network=500e9), GpuLayout(16), 256).bound == "computing"


def test_a_measured_mfu_includes_waiting_times() -> None:
    ask = PlanRequest(MIXTURE, 1e12, 16, GPUS["h100"], mfu=0.05)
    effort = estimate_time_and_cost(ask, GpuLayout(16), 256)
    assert effort.reached == pytest.approx(0.05) and effort.days * 86400 == pytest.approx(
        effort.flops / (16 * 989.4e12 * 0.05)
    )


def test_gpus_of_one_node_gather_weights_over_nvlink() -> None:
    one, two = (
        estimate_time_and_cost(PlanRequest(MIXTURE, 1e12, gpus, GPUS["h100"]), GpuLayout(gpus), 16) for gpus in (8, 16)
    )
    assert one.network_there == GPUS["h100"].link and two.network_there == GPUS["h100"].network


# -- what it says --------------------------------------------------------------------------------------------------------
def test_every_line_of_a_plan_has_its_formula(tmp_path: Path) -> None:
    found = plan_run(EIGHT_BILLION)
    for line in make_plan_lines(found):
        assert line.text and line.formula, line.name
    for part in found.memory:
        assert part.bytes > 0 and part.formula and part.source, part.name
    said: dict[str, Any] = json.loads(json.dumps(convert_plan_to_json(found)))
    assert said["layout"]["pipeline"] == 1 and said["memory_needed"] == pytest.approx(
        sum(p["bytes"] for p in said["memory"])
    )
    assert said["gpu"] == "h100"


@pytest.mark.parametrize(("tokens", "word"), [(300e9, "1.9 times the 20"), (40e9, "4.0 times as many")])
def test_a_plan_warns_if_its_tokens_are_far_from_chinchillas(tokens: float, word: str) -> None:
    assert word in make_plan_warnings(plan_run(replace(EIGHT_BILLION, tokens=tokens)))[0]


def test_a_mixture_counts_active_parameters() -> None:
    """GLM-4.5-Air's shape: memory follows all 106 B, FLOPs and Chinchilla the 12 B that a token meets."""
    ask = PlanRequest(model_of("GLM-4.5-Air"), 1e12, 512, GPUS["h100"])
    found = plan_run(ask)
    weights = next(part.bytes for part in found.memory if part.name == "weights")
    assert weights == 4 * ask.model.parameters / 512
    assert found.effort.flops == pytest.approx(6 * 12.8e9 * 1e12, rel=0.2)
    assert "active parameter" in make_plan_warnings(found)[0] and "active" in [
        line.name for line in make_plan_lines(found)
    ]


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_our_recipes_can_be_planned(name: str) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / f"{name}.yaml")
    found = plan_run(PlanRequest(recipe.model, 1e8, 1, GPUS["rtx-4090"], batch=recipe.batch))
    assert found.sequences == recipe.batch.sequences and found.effort.network == 0


def test_layers_for_multi_token_prediction_cost_memory_and_with_a_weight_also_time() -> None:
    model = model_of("GLM-4.5-Air")
    more = model.model_copy(update={"multi_token_layers": 1})
    layout = GpuLayout(512, micro_sequences=1)
    asks = [
        PlanRequest(one, 1e12, 512, GPUS["h100"], multi_token=trained)
        for one, trained in ((model, False), (more, False), (more, True))
    ]
    without, carried, trained = ({part.name: part.bytes for part in estimate_memory(ask, layout)} for ask in asks)
    assert carried["weights"] - without["weights"] == 2 * (more.parameters - model.parameters) / 512, "frozen, in bf16"
    assert trained["weights"] - without["weights"] == 4 * (more.parameters - model.parameters) / 512
    assert without["optimiser"] == carried["optimiser"] < trained["optimiser"]
    assert without["activations"] == carried["activations"] < trained["activations"]
    flops = [plan_run(ask).effort.flops for ask in asks]
    assert flops[0] == flops[1]
    assert flops[2] / flops[0] == pytest.approx(more.count_flops_per_token(True) / model.count_flops_per_token())
    lines = [next(line for line in make_plan_lines(plan_run(ask)) if "FLOPs per token" in str(line)) for ask in asks]
    assert str(lines[0]) == str(lines[1]) != str(lines[2])
