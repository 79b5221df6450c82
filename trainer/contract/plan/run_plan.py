"""Plans a run: a layout that fits in memory, and the steps, days and cost. Each number has its formula and source.

The time of a step is the larger of two times: computing at the MFU that published runs reached, and gathering weights over the network at the
same time. The time to send tokens to experts on other GPUs is added. Published GPU hours lie within a factor of ``SPREAD`` of the plan's.

The layout is the first one that fits. The search prefers little tensor parallelism to much, no recomputation to recomputed blocks, and a large
micro-batch to a small one. There is no pipeline parallelism, because sharding over the data ranks splits the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kernels.contract.message import Message
from models.spec import ModelSpec
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.plan.adapting import train_everything
from trainer.contract.plan.gpus import MFU, Gpu
from trainer.contract.plan.hf_config import PublicModel
from trainer.contract.plan.sizing import (
    GB,
    RESERVE,
    GpuLayout,
    MemoryPart,
    count_routed_expert_parameters,
    estimate_memory_parts,
    sum_bytes,
)
from trainer.contract.recipe import BatchRecipe, ParallelRecipe

RECOMPUTE: tuple[Literal["none", "block"], ...] = ("none", "block")
LARGEST = 288  # GB of the largest GPU that is sold
NODE = 8  # GPUs that NVLink joins: tensor parallelism goes no further
# The MFU of whole runs on many nodes of H100s and faster, restarts and slow hours included, from published hours: 22 % at 8 B parameters, more
# in larger runs, which were tuned more. tests/support/trainer/published_runs.py has the runs.
MFU_NODES, MFU_NODES_AT, MFU_NODES_POWER, MFU_NODES_MOST = 0.22, 8e9, 0.12, 0.36
FP8 = 1.28  # times as fast as bf16: torchtitan, Llama 3 8B on 8 H100: 8,532 and 6,667 tokens/s
NARROW = 1280  # width of an expert below which the MFU falls in proportion: from one run, Qwen3-30B-A3B's 768 in Megatron-Bridge
SPREAD = 1.6  # published GPU hours lie within this factor of the plan, either way
RECOMPUTED = 3 / 4  # share of ``MFU`` if blocks are computed again: 8 matrix products instead of 6
PRICE = 2.0  # dollars of a GPU for an hour


class SizingError(TrainerError):
    """The run does not fit in the memory of these GPUs in any layout. The message says which change would make it fit."""


@dataclass(frozen=True)
class PlanRequest:
    """The run to plan."""

    model: ModelSpec
    tokens: float
    gpus: int
    gpu: Gpu
    batch: BatchRecipe | None = None  # None: tokens a step by rule
    optimizer: str = "adamw"
    itemsize: int = 2  # bytes of an element of the forward pass
    replicas: int = 1
    logit_rows: int | None = 1024
    mfu: float | None = None  # None: ``estimate_mfu``, less if blocks are recomputed
    price: float = PRICE  # of a GPU for an hour
    network: float | None = None  # bytes a second of a GPU to another node; None: the GPU's usual card
    expert: int = (
        1  # GPUs that share the experts, in a trainer that supports it; 1: as ours, every GPU gathers every expert
    )
    multi_token: bool = False  # the layers for multi-token prediction are trained; otherwise they are carried along
    fp8: bool = False  # products in fp8; for routed experts, in a trainer that supports it
    public_model: PublicModel | None = None  # the config.json from which ``model`` was read


@dataclass(frozen=True)
class PlannedTimeAndCost:
    """The time and cost of a run on a layout."""

    tokens_per_step: int
    steps: int
    flops: float  # of the whole run
    mfu: float  # while it computes
    reached: float  # MFU over the whole time: less than ``mfu`` if the run waits for the network
    tokens_per_second: float  # of all GPUs
    gpu_hours: float
    days: float
    cost: float
    network: float  # bytes a second that each GPU must move to hide FSDP's traffic behind its computation
    network_there: float  # bytes a second that the network can move for each GPU
    exchange: float  # bytes that a token is sent to experts of other nodes and back, forward and backward
    bound: Literal["computing", "network"]


@dataclass(frozen=True)
class RunPlan:
    """The plan; ``trainer.contract.plan.plan_report`` renders it as text and JSON."""

    ask: PlanRequest
    layout: GpuLayout
    sequences: int  # of a step
    memory: list[MemoryPart]
    effort: PlannedTimeAndCost


def count_active_parameters(model: ModelSpec) -> int:
    """Number of weights that one token is multiplied with: all weights but norms; of routed experts, only those that the token goes to."""
    return model.matmul_parameter_count


def plan_run(request: PlanRequest) -> RunPlan:
    """The plan of a run. Raises: SizingError if nothing fits; RecipeError if no layout divides the recipe's batch."""
    layout, sequences = _search(request)
    return RunPlan(
        request, layout, sequences, estimate_memory(request, layout), estimate_time_and_cost(request, layout, sequences)
    )


# -- rules ---------------------------------------------------------------------------------------------------------------
def compute_deepseek_rule_flops(model: ModelSpec, tokens: float) -> float:
    """FLOPs of the run as DeepSeek's rules count them (their C): without embeddings, with the whole score matrix (arXiv 2401.02954 §3.2, eq. 2)."""
    without_head = model.matmul_parameter_count - model.vocab_size * model.d_model
    return tokens * (6 * without_head + 12 * model.layers * model.heads * model.head_dim * model.context)


def compute_deepseek_rule_batch_tokens(model: ModelSpec, tokens: float) -> float:
    """Tokens in a step by DeepSeek's rule: 0.2920 C^0.3271. Fitted for C of 1e17 to 2e19, it held for their 7B (8.5e22) and 67B (1e24)."""
    return 0.2920 * compute_deepseek_rule_flops(model, tokens) ** 0.3271


def compute_deepseek_rule_lr(model: ModelSpec, tokens: float) -> float:
    """Peak learning rate of AdamW by DeepSeek's rule: 0.3118 C^-0.1250, from the same fit."""
    return 0.3118 * compute_deepseek_rule_flops(model, tokens) ** -0.1250


# -- the layout ----------------------------------------------------------------------------------------------------------
def _search(request: PlanRequest) -> tuple[GpuLayout, int]:
    possible = _tensors(request)
    if not possible:
        assert request.batch is not None, "one sequence a rank always divides"
        raise RecipeError(
            "plan.indivisible_batch",
            "The batches of batch.sequences ({sequences}) and batch.warmup cannot be divided evenly among {gpus} GPUs. "
            "Tensor-parallel groups of 2, 4 or {node} GPUs do not help. (The size of a group must divide model.kv_heads.) "
            "Change batch.sequences or the number of GPUs.",
            sequences=request.batch.sequences,
            gpus=request.gpus,
            node=NODE,
        )
    found = _fitting(request)
    if found is None:
        raise SizingError(_what_would_fit(request, possible))
    return found


def _fitting(request: PlanRequest) -> tuple[GpuLayout, int] | None:
    """(the first layout that fits, the number of sequences in a step); None if no layout fits."""
    for tensor in _tensors(request):
        for recompute in RECOMPUTE:
            layout = GpuLayout(request.gpus, tensor, 1, recompute, request.replicas, request.expert)
            if not _fits(request, layout):
                continue
            for micro, sequences in _batches(request, layout.data):
                if _fits(request, replace(layout, micro_sequences=micro)):
                    return replace(layout, micro_sequences=micro), sequences
    return None


def _fits(request: PlanRequest, layout: GpuLayout) -> bool:
    return sum_bytes(estimate_memory(request, layout)) <= request.gpu.memory


def _tensors(request: PlanRequest) -> list[int]:
    """Degrees of tensor parallelism that divide the model, the node and the batch. Degrees that make the batch too large come last."""
    fitting = []
    for tensor in (1, 2, 4, 8):
        try:
            data = ParallelRecipe(tensor=tensor).data_ranks(request.gpus, request.model)
        except RecipeError:
            continue
        if any(_batches(request, data)):
            fitting.append(tensor)
    # One sequence for each of too many data ranks: "the aggregated batch size is too big" (ZeRO, arXiv 1910.02054 §1).
    wanted = _sequences_by_rule(request)
    return sorted(fitting, key=lambda tensor: request.batch is None and request.gpus // tensor > 2 * wanted)


def _sequences_by_rule(request: PlanRequest) -> float:
    return compute_deepseek_rule_batch_tokens(request.model, request.tokens) / request.model.context


def _batches(request: PlanRequest, data: int) -> Iterator[tuple[int, int]]:
    """Yields (sequences in a micro-batch of a rank, sequences in a step), the largest micro-batch first. ``data``: the number of data ranks."""
    if request.batch is None:
        wanted = _sequences_by_rule(request)
        for micro in range(max(1, round(wanted / data)), 0, -1):
            yield micro, data * micro * max(1, round(wanted / (data * micro)))
        return
    for micro in range(request.batch.sequences // data, 0, -1):
        try:
            request.batch.model_copy(update={"micro_sequences": micro}).refuse_uneven_split(data)
        except RecipeError:
            continue
        yield micro, request.batch.sequences


def estimate_memory(request: PlanRequest, layout: GpuLayout) -> list[MemoryPart]:
    """Memory of one GPU, by part."""
    return estimate_memory_parts(
        request.model,
        layout,
        request.gpu.memory,
        optimizer=request.optimizer,
        itemsize=request.itemsize,
        logit_rows=request.logit_rows,
        trained=None
        if request.multi_token or not request.model.multi_token_layers
        else train_everything(request.model),
    )


def _what_would_fit(request: PlanRequest, possible: list[int]) -> Message:
    """The message for a run that no layout fits: the tightest layout, its largest part, and the changes that would make the run fit."""
    tightest = {
        tensor: estimate_memory(request, GpuLayout(request.gpus, tensor, 1, "block", request.replicas, request.expert))
        for tensor in possible
    }
    tensor = min(tightest, key=lambda t: sum_bytes(tightest[t]))
    parts = tightest[tensor]
    largest = max(parts, key=lambda part: part.bytes)
    fixed = sum_bytes(part for part in parts if part.name != "reserve")
    each = math.ceil(fixed / (1 - RESERVE) / GB)
    answers: list[str] = (
        [Message("plan.larger_gpus", "use GPUs with at least {gb} GB each", gb=each)] if each <= LARGEST else []
    )
    more = next((g for g in (2**n for n in range(15)) if g > request.gpus and _fitting(replace(request, gpus=g))), None)
    if more:
        answers.insert(0, Message("plan.more_gpus", "use {gpus:,} of these GPUs", gpus=more))
    if not answers:
        answers = [Message("plan.smaller_model", "use a smaller model or a shorter context")]
    return Message(
        "plan.does_not_fit",
        "The run does not fit into the memory of the GPUs in any layout. The layout that needs least has tensor parallelism "
        "{tensor}, recomputed blocks and one sequence at a time. With it each GPU needs {needed:.1f} GB but has {memory:.0f} GB. "
        "The largest part is {part} ({part_gb:.1f} GB). "
        "To make the run fit, {answers}.",
        tensor=tensor,
        needed=sum_bytes(parts) / GB,
        memory=request.gpu.memory / GB,
        part=largest.name,
        part_gb=largest.bytes / GB,
        answers=" or ".join(answers),
        gpus=more,
    )


# -- time and cost -------------------------------------------------------------------------------------------------------
def estimate_mfu(request: PlanRequest) -> float:
    """The MFU to expect on these GPUs, from published runs on one node or on many nodes.

    >>> from trainer.contract.plan.sizing import choose_model_shape
    >>> from trainer.contract.plan.gpus import GPUS
    >>> asks = [PlanRequest(choose_model_shape(size, 128_256, 4096), 1e12, gpus, GPUS["h100"]) for size, gpus in ((8e9, 8), (8e9, 256), (70e9, 1024))]
    >>> [round(estimate_mfu(request), 2) for request in asks]
    [0.4, 0.22, 0.29]
    """
    if request.mfu is not None:
        return request.mfu
    if request.gpus <= NODE:
        reached = MFU
    elif request.gpu.mfu_nodes is not None:
        reached = request.gpu.mfu_nodes
    else:
        size = max(1.0, request.model.parameters / MFU_NODES_AT)
        reached = min(MFU_NODES_MOST, MFU_NODES * size**MFU_NODES_POWER)
    if request.model.experts is not None:
        reached *= min(1.0, request.model.experts.d_ff / NARROW)
    return reached * (FP8 if request.fp8 else 1.0)


def _recomputing(mfu: float, request: PlanRequest) -> float:
    """The MFU if blocks are recomputed: a third more work, done at ``MFU``. The run's other losses stay the same."""
    return 1 / (1 / mfu + (1 / RECOMPUTED - 1) / (MFU * (FP8 if request.fp8 else 1.0)))


def estimate_weight_traffic_bytes(request: PlanRequest, layout: GpuLayout) -> float:
    """Bytes that a GPU moves in a micro-batch. It gathers rounded weights, forward and backward, and sums gradients in fp32. (ZeRO §7.2.2 counts
    three times the parameters; here each has the bytes of its dtype.) Of routed experts, each of ``layout.expert`` GPUs moves only its own."""
    if layout.fsdp_shards <= 1:
        return 0.0
    routed = count_routed_expert_parameters(request.model)
    apart = routed / layout.expert if layout.expert < layout.data else 0.0  # one copy in all: nothing is gathered
    moved = request.model.parameters - routed + (routed if layout.expert == 1 else apart)
    return (2 * request.itemsize + 4) * moved / layout.tensor


def estimate_expert_traffic_bytes_per_token(request: PlanRequest, layout: GpuLayout) -> float:
    """Bytes that a GPU exchanges with experts on other nodes for each token: there and back, forward and backward, one row for each node."""
    experts = request.model.experts
    if experts is None or layout.expert == 1:
        return 0.0
    nodes = max(1.0, layout.expert / NODE)
    copies: float = experts.per_token
    if experts.groups > 1:
        copies = min(copies, experts.groups_per_token)
    row = request.model.d_model * request.itemsize
    sent = row * (0.75 if request.fp8 else 1.0)  # there in fp8, back in bf16
    return 4 * sent * copies * (1 - 1 / nodes) * (request.model.layers - experts.dense_layers)


def estimate_time_and_cost(request: PlanRequest, layout: GpuLayout, sequences: int) -> PlannedTimeAndCost:
    """The steps, time and cost of a run. The time is FLOPs (PaLM, arXiv 2204.02311 appendix B) / expected rate, or the network's time if larger."""
    model = request.model
    mfu = estimate_mfu(request)
    if request.mfu is None and layout.recompute == "block":
        mfu = _recomputing(mfu, request)
    tokens_per_step = sequences * model.context
    steps = math.ceil(request.tokens / tokens_per_step)
    flops = model.count_flops_per_token(request.multi_token) * tokens_per_step * steps
    there = request.gpu.link if request.gpus <= NODE else request.network or request.gpu.network
    # Of one micro-batch, by one GPU's share of its tokens.
    tokens = layout.micro_sequences * model.context / layout.tensor
    computing = tokens * model.count_flops_per_token(request.multi_token) / (request.gpu.peak_flops * mfu)
    moved, exchange = (
        estimate_weight_traffic_bytes(request, layout),
        estimate_expert_traffic_bytes_per_token(request, layout),
    )
    sent = tokens * exchange / there
    # If a token's experts lie on few nodes: "nearly full computation-communication overlap" (arXiv 2412.19437 §2.1.2); otherwise computing waits.
    hidden = model.experts is not None and model.experts.groups > 1
    each = max(computing, moved / there, sent) if hidden else max(computing, moved / there) + sent
    if request.mfu is not None:  # a measured MFU includes all waiting
        each = computing
    seconds = flops / (request.gpus * request.gpu.peak_flops * mfu) * each / computing
    gpu_hours = request.gpus * seconds / 3600
    return PlannedTimeAndCost(
        tokens_per_step,
        steps,
        flops,
        mfu,
        mfu * computing / each,
        tokens_per_step * steps / seconds,
        gpu_hours,
        seconds / 86400,
        gpu_hours * request.price,
        moved / computing,
        there,
        exchange,
        "network" if each > 2 * computing else "computing",
    )
