"""A run's plan as text: each number with its formula and its source, and warnings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernels.contract.message import Message
from models.adapters import FAMILIES
from trainer.contract.plan.gpus import GPUS, MFU
from trainer.contract.plan.hf_config import PublicModel
from trainer.contract.plan.run_plan import (
    NODE,
    PRICE,
    SPREAD,
    RunPlan,
    compute_deepseek_rule_batch_tokens,
    compute_deepseek_rule_flops,
    compute_deepseek_rule_lr,
    count_active_parameters,
    estimate_memory,
    plan_run,
)
from trainer.contract.plan.sizing import GB, KORTHIKANTI, ZERO, sum_bytes

CHINCHILLA = 20  # tokens a parameter
DEEPSEEK = "DeepSeek LLM, arXiv 2401.02954 §3.1"
LLAMA = "Llama 3, arXiv 2407.21783"
OWN = "tests/support/trainer/published_runs.py"
PALM = "PaLM, arXiv 2204.02311 appendix B"


@dataclass(frozen=True)
class PlanLine:
    """One number of the plan."""

    name: str
    value: float
    text: str
    formula: str
    source: str


def make_plan_lines(plan: RunPlan) -> list[PlanLine]:
    """The numbers of the plan, in the order in which they follow from one another."""
    return [*_model_lines(plan), *_layout_lines(plan), *_batch_lines(plan), *_effort_lines(plan)]


def _model_lines(plan: RunPlan) -> list[PlanLine]:
    model = plan.ask.model
    shape = Message(
        "plan.shape",
        "{layers} layers of width {width:,}, {heads} heads, {kv_heads} heads for keys and values, d_ff {d_ff:,}, "
        "vocabulary of {vocab:,}, {embedding}",
        layers=model.layers, width=model.d_model, heads=model.heads, kv_heads=model.kv_heads, d_ff=model.d_ff, vocab=model.vocab_size,
        embedding="embedding and head" if has_untied_head(plan) else Message("plan.tied", "one tied embedding"),
    )  # fmt: skip
    source = _shape_source(plan)
    found = [PlanLine("parameters", model.parameters, f"{model.parameters / 1e9:.4g} B", shape, source)]
    if model.experts is not None:
        e = model.experts
        how = Message(
            "plan.active",
            "each token uses {chosen} of {experts} experts and {shared:,|shared expert|shared experts}",
            chosen=e.per_token,
            experts=e.count,
            shared=e.shared,
        )
        found.append(
            PlanLine(
                "active", count_active_parameters(model), f"{count_active_parameters(model) / 1e9:.4g} B", how, source
            )
        )
    return found


def has_untied_head(plan: RunPlan) -> bool:
    """True if the model has a head of its own, apart from the embedding."""
    return not plan.ask.model.tied


def _shape_source(plan: RunPlan) -> str:
    if plan.ask.public_model is not None:
        return "config.json"
    if plan.ask.batch is not None:
        return "the recipe"
    return Message("plan.proportions", "proportions of the models in {source}, Table 3", source=LLAMA)


def _layout_lines(plan: RunPlan) -> list[PlanLine]:
    layout = plan.layout
    sharded = layout.fsdp_shards > 1
    tensor = (
        Message("plan.no_tensor", "not needed, so no matrix is split among GPUs")
        if layout.tensor == 1
        else Message(
            "plan.least_tensor", "the smallest degree with which the run fits in memory and the batch is not too large"
        )
    )
    state = (
        Message("plan.sharded", "weights, gradients and optimiser are split over {gpus} GPUs", gpus=layout.weight_parts)
        if sharded
        else Message("plan.whole", "every rank holds all the weights")
    )
    pipeline = (
        Message(
            "plan.no_pipeline",
            "not needed: sharding over the data ranks saves as much memory, and no GPU has to wait idle",
        )
        if sharded
        else Message("plan.pipeline_missing", "this trainer has no pipeline parallelism")
    )
    tensor_source = Message(
        "plan.tensor_source",
        "parallel.tensor must not be larger than {node}, the number of GPUs of a node; {source}",
        node=NODE,
        source=KORTHIKANTI,
    )
    data = Message("plan.data", "{gpus} GPUs / degree of tensor parallelism; {state}", gpus=layout.gpus, state=state)
    return [
        PlanLine("tensor parallel", layout.tensor, str(layout.tensor), tensor, tensor_source),
        PlanLine("pipeline parallel", 1, "1", pipeline, f"{ZERO} §2.1"),
        PlanLine("data parallel", layout.data, str(layout.data), data, "parallel.replicas: FSDP2"),
        *_expert_lines(plan),
        PlanLine(
            "recompute",
            float(layout.recompute == "block"),
            layout.recompute,
            Message("plan.recompute", "the least recomputation with which the run fits in memory"),
            "parallel.recompute; arXiv 2205.05198 §5",
        ),
    ]


def _expert_lines(plan: RunPlan) -> list[PlanLine]:
    ask, layout = plan.ask, plan.layout
    if ask.model.experts is None:
        return []
    if layout.expert == 1:
        how = Message("plan.experts_gathered", "this trainer has no expert parallelism: every GPU gathers every expert")
        source = f"{ZERO} §7.2.2"
    else:
        how = Message(
            "plan.experts_kept",
            "in another trainer, each GPU keeps its own experts and receives the tokens for these experts",
        )
        source = "--expert-parallel"
    return [PlanLine("expert parallel", layout.expert, str(layout.expert), how, source)]


def _batch_lines(plan: RunPlan) -> list[PlanLine]:
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    times = plan.sequences // (layout.data * layout.micro_sequences)
    rate, flops = compute_deepseek_rule_lr(model, ask.tokens), compute_deepseek_rule_flops(model, ask.tokens)
    if ask.batch is None:
        how = Message(
            "plan.batch_by_rule",
            "0.2920 C^0.3271 = {tokens:,.0f} tokens, with C = {flops:.3g} FLOPs of the run; rounded to {sequences:,} sequences",
            tokens=compute_deepseek_rule_batch_tokens(model, ask.tokens),
            flops=flops,
            sequences=plan.sequences,
        )
        source = DEEPSEEK
    else:
        how = Message(
            "plan.batch_of_recipe",
            "{sequences:,} sequences × {context:,} tokens",
            sequences=plan.sequences,
            context=model.context,
        )
        source = "the recipe"
    warmup = ask.batch is not None and ask.batch.warmup
    micro = Message(
        "plan.micro_batch",
        "{sequences:,|sequence|sequences} × {context:,} tokens",
        sequences=layout.micro_sequences,
        context=model.context,
    )
    largest = Message(
        "plan.largest_micro_batch",
        "the largest micro-batch that fits; each rank computes {times:,|micro-batch|micro-batches} a step",
        times=times,
    )
    steps = Message("plan.steps", "{tokens:,.0f} tokens of the run / tokens per step", tokens=ask.tokens)
    return [
        PlanLine("micro-batch", layout.micro_sequences, micro, largest, "batch.micro_sequences"),
        PlanLine("tokens per step", effort.tokens_per_step, f"{effort.tokens_per_step:,}", how, source),
        PlanLine(
            "steps",
            effort.steps,
            f"{effort.steps:,}",
            steps,
            Message("plan.without_warm_up", "computed without batch.warmup") if warmup else "",
        ),
        PlanLine(
            "learning rate",
            rate,
            f"{rate:.2g}",
            Message("plan.rate", "0.3118 C^-0.1250, with C = {flops:.3g} FLOPs of the run", flops=flops),
            Message("plan.rate_source", "{source}; start a sweep at this rate", source=DEEPSEEK),
        ),
    ]


def _mfu_source(plan: RunPlan) -> Message:
    ask = plan.ask
    if ask.mfu is not None:
        return Message("plan.given_mfu", "MFU given with --mfu")
    if ask.gpus <= NODE or ask.gpu.mfu_nodes is not None:
        found = Message("plan.mfu_of_node", "MFU of torchtitan and autoresearch on H100s, and of Llama 2 on A100s")
    else:
        found = Message(
            "plan.mfu_of_nodes",
            "MFU of published runs on many nodes, {source}; one node reaches {mfu:g}",
            source=OWN,
            mfu=MFU,
        )
    if plan.layout.recompute == "block":
        return Message(
            "plan.recomputing", "{mfu}; recomputation adds a third to the work (arXiv 2205.05198 §5)", mfu=found
        )
    return found


def _effort_lines(plan: RunPlan) -> list[PlanLine]:
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    apart: str = ""
    if effort.reached < 0.99 * effort.mfu:
        apart = Message(
            "plan.waits_for_network",
            " (the GPUs reach only {reached:.2g} of the peak, because they wait for the network)",
            reached=effort.reached,
        )
    measured = ask.mfu is not None
    spread = lambda value, places: "" if measured else f"{value / SPREAD:,.{places}f} to {value * SPREAD:,.{places}f}: "
    said = (
        Message("plan.as_measured", "computed from the MFU that --mfu gives")
        if measured
        else Message(
            "plan.published",
            "published runs, with their restarts, lie within a factor of {spread:g} of such estimates ({source})",
            spread=SPREAD,
            source=OWN,
        )
    )
    active, seen = model.count_weights_and_positions_seen(ask.multi_token)
    flops = Message(
        "plan.flops",
        "6 × {active:,} + 6 × {width:,} × {seen:,.0f} positions seen by all {layers} layers = {flops:.4g} FLOPs per token",
        active=active,
        layers=model.layers + (model.multi_token_layers if ask.multi_token else 0),
        width=round(model.attention_width),
        seen=seen,
        flops=model.count_flops_per_token(ask.multi_token),
    )
    throughput = Message(
        "plan.throughput",
        "{gpus} GPUs × {peak:g} TFLOP/s × MFU {mfu:.2g} / FLOPs per token{apart}",
        gpus=layout.gpus,
        peak=ask.gpu.peak_flops / 1e12,
        mfu=effort.mfu,
        apart=apart,
    )
    throughput_source = Message("plan.throughput_source", "{gpu}; {mfu}", gpu=ask.gpu.source, mfu=_mfu_source(plan))
    if effort.network:
        network = Message(
            "plan.network",
            "{bytes} bytes × parameters / {tensor} (the degree of tensor parallelism), for each micro-batch; the network "
            "of a GPU carries {there:,.0f} GB/s",
            bytes=2 * ask.itemsize + 4,
            tensor=layout.tensor,
            there=effort.network_there / GB,
        )
        rate = Message("plan.network_rate", "{rate:,.1f} GB/s per GPU", rate=effort.network / GB)
    else:
        network, rate = Message("plan.no_network", "no GPU gathers weights"), Message("plan.no_rate", "none")
    return [
        PlanLine(
            "FLOPs",
            effort.flops,
            f"{effort.flops:.3g}",
            flops,
            Message("plan.flops_source", "{source}; the masked half of attention is not counted", source=PALM),
        ),
        PlanLine(
            "throughput",
            effort.tokens_per_second,
            f"{effort.tokens_per_second:,.0f} tokens/s",
            throughput,
            throughput_source,
        ),
        PlanLine("time", effort.days, f"{effort.days:,.1f} days", f"{spread(effort.days, 1)}tokens / throughput", said),
        PlanLine(
            "GPU hours", effort.gpu_hours, f"{effort.gpu_hours:,.0f}", f"{spread(effort.gpu_hours, 0)}GPUs × time", said
        ),
        PlanLine(
            "cost",
            effort.cost,
            f"${effort.cost:,.0f}",
            f"GPU hours × ${ask.price:g}",
            Message("plan.price", "DeepSeek-V3's price, arXiv 2412.19437 Table 1") if ask.price == PRICE else "--price",
        ),
        PlanLine(
            "network",
            effort.network,
            rate,
            network,
            Message(
                "plan.network_source",
                "the rate at which gathering weights costs no extra time; {source} §7.2.2",
                source=ZERO,
            ),
        ),
    ]


def make_plan_warnings(plan: RunPlan) -> list[str]:
    """Warnings, which do not stop the plan."""
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    ratio = ask.tokens / count_active_parameters(model)
    found: list[str] = [
        Message(
            "plan.over_chinchilla",
            "The plan has {ratio:.1f} tokens per {each}, {times:.1f} times the {rule} of Chinchilla (arXiv 2203.15556). A "
            "larger model would reach the same loss with less compute, but a smaller model is cheaper to serve.",
            ratio=ratio,
            each="active parameter" if model.experts else "parameter",
            times=ratio / CHINCHILLA,
            rule=CHINCHILLA,
        )
        if ratio >= CHINCHILLA
        else Message(
            "plan.under_chinchilla",
            "The plan has {ratio:.1f} tokens per {each}. Chinchilla (arXiv 2203.15556) has {rule}, {times:.1f} times as "
            "many. A smaller model with more tokens would reach a lower loss with the same compute.",
            ratio=ratio,
            each="active parameter" if model.experts else "parameter",
            times=CHINCHILLA / ratio,
            rule=CHINCHILLA,
        )
    ]
    if ask.public_model is not None and ratio < CHINCHILLA:
        found = []  # its weights are trained already
    by_rule = compute_deepseek_rule_batch_tokens(model, ask.tokens)
    if not 0.5 < effort.tokens_per_step / by_rule < 2:
        found.append(
            Message(
                "plan.batch_off_rule",
                "The rule of {source} gives {rule:,.0f} tokens a step, but this plan has {tokens:,} tokens a step.",
                source=DEEPSEEK,
                rule=by_rule,
                tokens=effort.tokens_per_step,
            )
        )
    if ask.mfu is None and effort.network > effort.network_there:
        found.append(
            Message(
                "plan.network_bound",
                "The network limits the speed of this plan. It carries {there:.0f} GB/s per GPU, but gathering weights "
                "during computation needs {needed:,.0f} GB/s. Each GPU therefore reaches {reached:.1%} of its peak, not "
                "{mfu:.1%}. If your network is faster, give its rate with --network, or give a measured MFU with --mfu.",
                there=effort.network_there / GB,
                needed=effort.network / GB,
                reached=effort.reached,
                mfu=effort.mfu,
            )
        )
    if model.experts is not None and layout.expert == 1 and math.gcd(layout.data, model.experts.count) > 1:
        expert = math.gcd(layout.data, model.experts.count)
        other = plan_run(replace(ask, expert=expert)).effort  # it fits: it needs less memory than this plan
        found.append(
            Message(
                "plan.expert_parallelism",
                "This trainer has no expert parallelism. A trainer with expert parallelism over {gpus} GPUs would take "
                "{days:,.1f} days. To plan for such a trainer, add '--expert-parallel {gpus}'.",
                gpus=expert,
                days=other.days,
            )
        )
    of_experts = ask.fp8 and model.experts is not None
    if layout.expert > 1 or of_experts:
        asked = ["expert parallelism"] * (layout.expert > 1)
        asked += [Message("plan.fp8_experts", "fp8 for routed experts")] * of_experts
        found.append(
            Message(
                "plan.other_trainer",
                "This trainer lacks {features}, so this plan is for another trainer.",
                features=" and ".join(asked),
            )
        )
    if ask.public_model is not None:
        found.append(describe_reading(ask.public_model))
    if ask.logit_rows is None:
        chunked = estimate_memory(replace(ask, logit_rows=1024), layout)
        saved = sum_bytes(plan.memory) - sum_bytes(chunked)
        found.append(
            Message(
                "plan.whole_logits",
                "policies/kernels.yaml chooses a kernel for cuda that keeps all logits in memory. To save {saved:.1f} GB "
                "on each GPU, set 'linear_cross_entropy: chunked_compiled'.",
                saved=saved / GB,
            )
        )
    return found + model.list_warnings()


def describe_reading(public: PublicModel) -> Message:
    """Whether the plan is for the model that would be trained, or for sizes that were read by key names."""
    if public.family is not None:
        return Message(
            "plan.known_family",
            "config.json is read as a model of the family {family} ({class_name}), which this factory can import.",
            family=public.family.name,
            class_name=public.family.class_name,
        )
    return Message(
        "plan.unknown_family",
        "No family of this factory has the model_type {kind!r}, so the model cannot be imported. The plan is for the sizes that config.json gives by "
        "their usual names. Biases, norms and windows are guessed. Known families: {known}.",
        kind=public.model_type,
        known=sorted(FAMILIES),
    )


def convert_plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """The whole plan, for programs; bytes, FLOP/s, days and dollars as plain numbers."""
    model, layout = plan.ask.model, plan.layout
    names = [name for name, gpu in GPUS.items() if gpu.source == plan.ask.gpu.source]
    return {
        "gpu": names[0] if names else None,
        "model": model.model_dump() | {"parameters": model.parameters, "active": count_active_parameters(model)},
        "layout": asdict(layout) | {"data": layout.data, "pipeline": 1, "sequences": plan.sequences},
        "memory": [asdict(part) for part in plan.memory],
        "memory_needed": sum_bytes(plan.memory),
        "memory_there": plan.ask.gpu.memory,
        "effort": asdict(plan.effort),
        "lines": [asdict(line) for line in make_plan_lines(plan)],
        "remarks": make_plan_warnings(plan),
    }
