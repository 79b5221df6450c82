"""A run's plan as text: each number with its formula and its source, and remarks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.contract.plan.gpus import GPUS, MFU
from trainer.contract.plan.hf_config import PublicModel
from trainer.contract.plan.run_plan import (
    NODE,
    PRICE,
    SPREAD,
    RunPlan,
    active,
    batch_by_rule,
    lr_by_rule,
    memory_of,
    plan_run,
    rule_flops,
)
from trainer.contract.plan.sizing import GB, KORTHIKANTI, ZERO, needed

CHINCHILLA = 20  # tokens a parameter
DEEPSEEK = "DeepSeek LLM, arXiv 2401.02954 §3.1"
LLAMA = "Llama 3, arXiv 2407.21783"
OWN = "tests/support/trainer/published_runs.py"
PALM = "PaLM, arXiv 2204.02311 appendix B"


@dataclass(frozen=True)
class Line:
    """One number of the plan."""

    name: str
    value: float
    text: str
    formula: str
    source: str


def lines(plan: RunPlan) -> list[Line]:
    """In the order that they follow from one another."""
    return [*_model_lines(plan), *_layout_lines(plan), *_batch_lines(plan), *_effort_lines(plan)]


def _model_lines(plan: RunPlan) -> list[Line]:
    model = plan.ask.model
    shape = (
        f"{model.layers} layers, {model.d_model:,} wide, {model.heads} heads, {model.kv_heads} for keys and values, "
        f"d_ff {model.d_ff:,}, {model.vocab_size:,} tokens in {'embedding and head' if untied(plan) else 'one tied embedding'}"
    )
    source = _shape_source(plan)
    found = [Line("parameters", model.parameters, f"{model.parameters / 1e9:.4g} B", shape, source)]
    if model.experts is not None:
        e = model.experts
        how = f"{e.per_token} of {e.count} experts a token, and {e.shared} shared"
        found.append(Line("active", active(model), f"{active(model) / 1e9:.4g} B", how, source))
    return found


def untied(plan: RunPlan) -> bool:
    return isinstance(plan.ask.model, PublicModel) and plan.ask.model.untied


def _shape_source(plan: RunPlan) -> str:
    if isinstance(plan.ask.model, PublicModel):
        return "config.json"
    return f"proportions of {LLAMA} Table 3" if plan.ask.batch is None else "the recipe"


def _layout_lines(plan: RunPlan) -> list[Line]:
    layout = plan.layout
    tensor = "none needed" if layout.tensor == 1 else "the smallest that fits and keeps the batch to its rule"
    sharded = layout.shards > 1
    state = (
        f"weights, gradients and optimiser are cut over {layout.pieces} GPUs"
        if sharded
        else "every rank holds all the weights"
    )
    pipeline = "sharding over the data ranks cuts the same memory, without a bubble" if sharded else "not offered"
    return [
        Line(
            "tensor parallel",
            layout.tensor,
            str(layout.tensor),
            tensor,
            f"parallel.tensor, up to a node of {NODE}; {KORTHIKANTI}",
        ),
        Line("pipeline parallel", 1, "1", pipeline, f"{ZERO} §2.1"),
        Line(
            "data parallel",
            layout.data,
            str(layout.data),
            f"{layout.gpus} GPUs / tensor; {state}",
            "parallel.replicas: FSDP2",
        ),
        *_expert_lines(plan),
        Line(
            "recompute",
            float(layout.recompute == "block"),
            layout.recompute,
            "the least that fits",
            "parallel.recompute; arXiv 2205.05198 §5",
        ),
    ]


def _expert_lines(plan: RunPlan) -> list[Line]:
    ask, layout = plan.ask, plan.layout
    if ask.model.experts is None:
        return []
    if layout.expert == 1:
        how, source = "this trainer has none: every expert is gathered on every GPU", f"{ZERO} §7.2.2"
    else:
        how, source = "another trainer's: each GPU keeps its experts, and tokens are sent to them", "--expert-parallel"
    return [Line("expert parallel", layout.expert, str(layout.expert), how, source)]


def _batch_lines(plan: RunPlan) -> list[Line]:
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    times = plan.sequences // (layout.data * layout.micro_sequences)
    rate = lr_by_rule(model, ask.tokens)
    if ask.batch is None:
        how = f"0.2920 C^0.3271 = {batch_by_rule(model, ask.tokens):,.0f}, in whole micro-batches"
        source = DEEPSEEK
    else:
        how, source = f"{plan.sequences:,} sequences × {model.context:,}", "the recipe"
    return [
        Line(
            "micro-batch",
            layout.micro_sequences,
            f"{layout.micro_sequences} × {model.context:,} tokens",
            f"the largest that fits; {times} a step on each rank",
            "batch.micro_sequences",
        ),
        Line(
            "tokens per step",
            effort.tokens_per_step,
            f"{effort.tokens_per_step:,}",
            f"{how} ({plan.sequences:,} sequences)" if ask.batch is None else how,
            source,
        ),
        Line(
            "steps",
            effort.steps,
            f"{effort.steps:,}",
            f"{ask.tokens:,.0f} tokens / tokens per step",
            "" if ask.batch is None or not ask.batch.warmup else "the batch's warm-up left out",
        ),
        Line(
            "learning rate",
            rate,
            f"{rate:.2g}",
            f"0.3118 C^-0.1250, C = {rule_flops(model, ask.tokens):.3g}",
            f"{DEEPSEEK}; where to start a sweep",
        ),
    ]


def _effort_lines(plan: RunPlan) -> list[Line]:
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    if ask.mfu is not None:
        mfu = "MFU as given"
    elif ask.gpus <= NODE or ask.gpu.mfu_nodes is not None:
        mfu = "MFU of torchtitan and autoresearch on H100s, and of Llama 2 on A100s"
    else:
        mfu = f"MFU of published runs on many nodes, {OWN}; one node reaches {MFU:g}"
    if ask.mfu is None and layout.recompute == "block":
        mfu += "; recomputing a third more (arXiv 2205.05198 §5)"
    network = f"{2 * ask.itemsize + 4} bytes × parameters / tensor {layout.tensor}, each micro-batch"
    apart = (
        f"; waiting for the network, {effort.reached:.2g} of the peak is reached"
        if effort.reached < 0.99 * effort.mfu
        else ""
    )
    low, high = (1.0, 1.0) if ask.mfu is not None else (1 / SPREAD, SPREAD)
    spread = lambda value, places: (
        "" if ask.mfu is not None else f"{value * low:,.{places}f} to {value * high:,.{places}f}: "
    )
    said = (
        "as measured"
        if ask.mfu is not None
        else f"published runs lie within a factor of {SPREAD:g}, restarts among them ({OWN})"
    )
    return [
        Line(
            "FLOPs",
            effort.flops,
            f"{effort.flops:.3g}",
            f"6 × {active(model):,} + 6 × {model.layers} layers × {model.heads * model.head_dim:,} × {model.context:,}"
            f" = {model.flops_per_token():.4g} a token",
            f"{PALM}, the masked half of attention left out",
        ),
        Line(
            "throughput",
            effort.tokens_per_second,
            f"{effort.tokens_per_second:,.0f} tokens/s",
            f"{layout.gpus} × {ask.gpu.peak_flops / 1e12:g} TFLOP/s × MFU {effort.mfu:.2g} / FLOPs a token{apart}",
            f"{ask.gpu.source}; {mfu}",
        ),
        Line("time", effort.days, f"{effort.days:,.1f} days", f"{spread(effort.days, 1)}tokens / throughput", said),
        Line(
            "GPU hours", effort.gpu_hours, f"{effort.gpu_hours:,.0f}", f"{spread(effort.gpu_hours, 0)}GPUs × time", said
        ),
        Line(
            "cost",
            effort.cost,
            f"${effort.cost:,.0f}",
            f"GPU hours × ${ask.price:g}",
            "DeepSeek-V3's price, arXiv 2412.19437 Table 1" if ask.price == PRICE else "--price",
        ),
        Line(
            "network",
            effort.network,
            f"{effort.network / GB:,.1f} GB/s a GPU" if effort.network else "none",
            f"{network}; {effort.network_there / GB:,.0f} GB/s are there" if effort.network else "nothing is gathered",
            f"to hide the gathering behind the computing; {ZERO} §7.2.2",
        ),
    ]


def remarks(plan: RunPlan) -> list[str]:
    """Warnings, which do not stop the plan."""
    ask, layout, effort, model = plan.ask, plan.layout, plan.effort, plan.ask.model
    ratio = ask.tokens / active(model)
    times = max(ratio / CHINCHILLA, CHINCHILLA / ratio)
    which = "over" if ratio >= CHINCHILLA else "under"
    why = (
        "more compute than its loss needs, for a smaller model to serve"
        if which == "over"
        else "the same compute reaches a lower loss with a smaller model and more tokens"
    )
    each = "an active parameter" if model.experts else "a parameter"
    found = [f"{ratio:.1f} tokens {each}: {times:.1f}× {which} Chinchilla's {CHINCHILLA} (arXiv 2203.15556): {why}"]
    by_rule = batch_by_rule(model, ask.tokens)
    if not 0.5 < effort.tokens_per_step / by_rule < 2:
        found.append(f"{DEEPSEEK} asks for {by_rule:,.0f} tokens a step; this plan has {effort.tokens_per_step:,}")
    if ask.mfu is None and effort.network > effort.network_there:
        found.append(
            f"the network bounds this plan: it moves {effort.network_there / GB:.0f} GB/s a GPU, and {effort.network / GB:,.0f} "
            f"would hide the gathering, so {effort.reached:.1%} of the peak is reached, not {effort.mfu:.1%} (--network: yours; --mfu: as measured)"
        )
    if model.experts is not None and layout.expert == 1 and math.gcd(layout.data, model.experts.count) > 1:
        expert = math.gcd(layout.data, model.experts.count)
        other = plan_run(replace(ask, expert=expert)).effort  # it fits: it needs less memory than this one
        found.append(
            f"this trainer has no expert parallelism; one that has it, over {expert} GPUs, would take {other.days:,.1f} days "
            f"(--expert-parallel {expert})"
        )
    of_experts = ask.fp8 and model.experts is not None
    if layout.expert > 1 or of_experts:
        asked = " and ".join(["expert parallelism"] * (layout.expert > 1) + ["fp8 of routed experts"] * of_experts)
        found.append(f"{asked}: this trainer has none; the plan is another trainer's")
    if isinstance(model, PublicModel):
        found.append("this trainer cannot train a config.json as it is: the plan says what a model of its shape takes")
    if ask.logit_rows is None:
        chunked = memory_of(replace(ask, logit_rows=1024), layout)
        saved = needed(plan.memory) - needed(chunked)
        found.append(
            "policies/kernels.yaml has logits whole on cuda: linear_cross_entropy: chunked_compiled "
            f"would save {saved / GB:.1f} GB a GPU"
        )
    return found + model.warnings()


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Everything, for programs; bytes, FLOP/s, days and dollars as plain numbers."""
    model, layout = plan.ask.model, plan.layout
    names = [name for name, gpu in GPUS.items() if gpu.source == plan.ask.gpu.source]
    return {
        "gpu": names[0] if names else None,
        "model": model.model_dump() | {"parameters": model.parameters, "active": active(model)},
        "layout": asdict(layout) | {"data": layout.data, "pipeline": 1, "sequences": plan.sequences},
        "memory": [asdict(part) for part in plan.memory],
        "memory_needed": needed(plan.memory),
        "memory_there": plan.ask.gpu.memory,
        "effort": asdict(plan.effort),
        "lines": [asdict(line) for line in lines(plan)],
        "remarks": remarks(plan),
    }
