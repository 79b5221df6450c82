"""Plans a run: the layout that fits, steps, days and cost, each number with its formula and source.

The layout is the first that fits: little tensor parallelism before much, nothing recomputed before whole blocks, a large
micro-batch before a small one. There is no pipeline parallelism: sharding over the data ranks cuts the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.plan.sizing import GB, RESERVE, Layout, MemoryPart, memory_parts, needed
from trainer.contract.recipe import BatchRecipe, ModelRecipe, ParallelRecipe

RECOMPUTE: tuple[Literal["none", "block"], ...] = ("none", "block")
LARGEST = 288  # GB of the largest GPU that is sold
NODE = 8  # GPUs that NVLink joins: tensor parallelism goes no further
MFU = 0.40  # Llama 3 reports 38–43 % (arXiv 2407.21783 §3.3.2)
RECOMPUTED = 3 / 4  # of the MFU, where blocks are computed again: 8 matrix products for 6
PRICE = 2.0  # dollars of a GPU for an hour


class SizingError(TrainerError):
    """The run fits on no layout of these GPUs; the message says what would fit."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model: peak of dense bf16 products and memory, from its data sheet."""

    peak_flops: float
    memory: float  # bytes
    source: str


def _nvidia(teraflops: float, gigabytes: float, sheet: str) -> Gpu:
    return Gpu(teraflops * 1e12, gigabytes * GB, f"NVIDIA {sheet} data sheet, bf16 dense")


GPUS = {
    "h100": _nvidia(989.4, 80, "H100 SXM"),
    "h100-pcie": _nvidia(756, 80, "H100 PCIe"),
    "h200": _nvidia(989.4, 141, "H200 SXM"),
    "b200": _nvidia(2250, 180, "DGX B200"),
    "a100": _nvidia(312, 80, "A100 80GB"),
    "a100-40": _nvidia(312, 40, "A100 40GB"),
    "l40s": _nvidia(362, 48, "L40S"),
    "rtx-4090": _nvidia(165.2, 24, "Ada architecture (RTX 4090)"),
    "mi300x": Gpu(1307.4e12, 192 * GB, "AMD Instinct MI300X data sheet, bf16 dense"),
}


@dataclass(frozen=True)
class Ask:
    """The run to plan."""

    model: ModelRecipe
    tokens: float
    gpus: int
    gpu: Gpu
    batch: BatchRecipe | None = None  # None: tokens a step by rule
    optimizer: str = "adamw"
    itemsize: int = 2  # bytes of an element of the forward pass
    replicas: int = 1
    logit_rows: int | None = 1024
    mfu: float | None = None  # None: ``MFU``, less where blocks are computed again
    price: float = PRICE  # of a GPU for an hour


@dataclass(frozen=True)
class Effort:
    """What a run takes on a layout."""

    tokens_per_step: int
    steps: int
    flops: float  # of the whole run
    mfu: float
    tokens_per_second: float  # of all GPUs
    gpu_hours: float
    days: float
    cost: float
    network: float  # bytes a second that each GPU must move to hide FSDP's traffic behind its computation


@dataclass(frozen=True)
class RunPlan:
    """The plan; ``trainer.contract.plan.plan_report`` renders it as text and JSON."""

    ask: Ask
    layout: Layout
    sequences: int  # of a step
    memory: list[MemoryPart]
    effort: Effort


def active(model: ModelRecipe) -> int:
    """Weights that a token is multiplied with: all but norms in a dense model, those of its experts in a mixture."""
    return model.matmul_parameters


def plan_run(ask: Ask) -> RunPlan:
    """Raises: SizingError when nothing fits; RecipeError when no layout divides the recipe's batch."""
    layout, sequences = _search(ask)
    return RunPlan(ask, layout, sequences, memory_of(ask, layout), effort_of(ask, layout, sequences))


# -- rules ---------------------------------------------------------------------------------------------------------------
def rule_flops(model: ModelRecipe, tokens: float) -> float:
    """C of DeepSeek's rules: without embeddings, the whole score matrix counted (arXiv 2401.02954 §3.2, eq. 2)."""
    without_head = model.matmul_parameters - model.vocab_size * model.d_model
    return tokens * (6 * without_head + 12 * model.layers * model.heads * model.head_dim * model.context)


def batch_by_rule(model: ModelRecipe, tokens: float) -> float:
    """Tokens a step: 0.2920 C^0.3271. Fitted for C of 1e17 to 2e19, held at 8.5e22 and 1e24 by their 7B and 67B."""
    return 0.2920 * rule_flops(model, tokens) ** 0.3271


def lr_by_rule(model: ModelRecipe, tokens: float) -> float:
    """The peak rate of AdamW: 0.3118 C^-0.1250, of the same fit."""
    return 0.3118 * rule_flops(model, tokens) ** -0.1250


# -- the layout ----------------------------------------------------------------------------------------------------------
def _search(ask: Ask) -> tuple[Layout, int]:
    possible = _tensors(ask)
    if not possible:
        assert ask.batch is not None, "one sequence a rank always divides"
        raise RecipeError(
            f"batch.sequences ({ask.batch.sequences}) and its warm-up cannot be shared among {ask.gpus} GPUs, nor among "
            f"groups of 2, 4 or {NODE} of them that split each sequence (as many as divide model.kv_heads)"
        )
    found = _fitting(ask)
    if found is None:
        raise SizingError(_what_would_fit(ask, possible))
    return found


def _fitting(ask: Ask) -> tuple[Layout, int] | None:
    """The first layout that fits, with the sequences of its step."""
    for tensor in _tensors(ask):
        for recompute in RECOMPUTE:
            layout = Layout(ask.gpus, tensor, 1, recompute, ask.replicas)
            if not _fits(ask, layout):
                continue
            for micro, sequences in _batches(ask, layout.data):
                if _fits(ask, replace(layout, micro_sequences=micro)):
                    return replace(layout, micro_sequences=micro), sequences
    return None


def _fits(ask: Ask, layout: Layout) -> bool:
    return needed(memory_of(ask, layout)) <= ask.gpu.memory


def _tensors(ask: Ask) -> list[int]:
    """Degrees that divide the model, the node and the batch; those that would make the batch too large come last."""
    fitting = []
    for tensor in (1, 2, 4, 8):
        try:
            data = ParallelRecipe(tensor=tensor).data_ranks(ask.gpus, ask.model)
        except RecipeError:
            continue
        if any(_batches(ask, data)):
            fitting.append(tensor)
    # One sequence each of too many data ranks: "the aggregated batch size is too big" (ZeRO, arXiv 1910.02054 §1).
    wanted = _sequences_by_rule(ask)
    return sorted(fitting, key=lambda tensor: ask.batch is None and ask.gpus // tensor > 2 * wanted)


def _sequences_by_rule(ask: Ask) -> float:
    return batch_by_rule(ask.model, ask.tokens) / ask.model.context


def _batches(ask: Ask, data: int) -> Iterator[tuple[int, int]]:
    """(micro-batch of a rank, sequences of a step), the largest micro-batch first."""
    if ask.batch is None:
        wanted = _sequences_by_rule(ask)
        for micro in range(max(1, round(wanted / data)), 0, -1):
            yield micro, data * micro * max(1, round(wanted / (data * micro)))
        return
    for micro in range(ask.batch.sequences // data, 0, -1):
        try:
            ask.batch.model_copy(update={"micro_sequences": micro}).check_ranks(data)
        except RecipeError:
            continue
        yield micro, ask.batch.sequences


def memory_of(ask: Ask, layout: Layout) -> list[MemoryPart]:
    """Of one GPU, by part."""
    return memory_parts(
        ask.model,
        layout,
        ask.gpu.memory,
        optimizer=ask.optimizer,
        itemsize=ask.itemsize,
        logit_rows=ask.logit_rows,
    )


def _what_would_fit(ask: Ask, possible: list[int]) -> str:
    """The message of a plan that fits nowhere."""
    tightest = {tensor: memory_of(ask, Layout(ask.gpus, tensor, 1, "block", ask.replicas)) for tensor in possible}
    tensor = min(tightest, key=lambda t: needed(tightest[t]))
    parts = tightest[tensor]
    largest = max(parts, key=lambda part: part.bytes)
    fixed = needed(part for part in parts if part.name != "reserve")
    each = math.ceil(fixed / (1 - RESERVE) / GB)
    answers = [f"GPUs of {each} GB"] if each <= LARGEST else []
    more = next((g for g in (2**n for n in range(15)) if g > ask.gpus and _fitting(replace(ask, gpus=g))), None)
    if more:
        answers.insert(0, f"{more:,} of these GPUs")
    return (
        f"nothing fits: with tensor parallelism {tensor}, blocks recomputed and one sequence at a time a GPU needs "
        f"{needed(parts) / GB:.1f} GB of its {ask.gpu.memory / GB:.0f} GB, most of it {largest.name} "
        f"({largest.bytes / GB:.1f} GB); {' or '.join(answers) or 'a smaller model or a shorter context'} would do"
    )


# -- what it takes -------------------------------------------------------------------------------------------------------
def effort_of(ask: Ask, layout: Layout, sequences: int) -> Effort:
    """Steps, time and money: FLOPs (PaLM, arXiv 2204.02311 appendix B) over what the GPUs reach of their peak."""
    model = ask.model
    mfu = ask.mfu if ask.mfu is not None else MFU * (RECOMPUTED if layout.recompute == "block" else 1)
    speed = ask.gpus * ask.gpu.peak_flops * mfu
    tokens_per_step = sequences * model.context
    steps = math.ceil(ask.tokens / tokens_per_step)
    flops = model.flops_per_token() * tokens_per_step * steps
    seconds = flops / speed
    # Gathered rounded, forward and backward, and summed in fp32: ZeRO §7.2.2's three times the parameters, by dtype.
    moved = (2 * ask.itemsize + 4) * model.parameters / layout.tensor if layout.shards > 1 else 0.0
    rows = layout.micro_sequences * layout.data
    micro_seconds = rows * model.context * model.flops_per_token() / speed
    gpu_hours = ask.gpus * seconds / 3600
    return Effort(
        tokens_per_step,
        steps,
        flops,
        mfu,
        speed / model.flops_per_token(),
        gpu_hours,
        seconds / 86400,
        gpu_hours * ask.price,
        moved / micro_seconds,
    )
