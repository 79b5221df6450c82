"""What fits when a public model's training continues: which ways to train it, on which devices, with which memory, context and recipe.

The batch of a continued run is the recipe's choice, so a layout is the one that needs least: little tensor parallelism, no recomputation, then the
largest micro-batch of at most ``MOST_ROWS`` rows. The time and cost of a run are ``run_plan``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kernels.contract.message import Message
from models.spec import ModelSpec
from trainer.contract.errors import RecipeError
from trainer.contract.plan.adapting import TrainedParts, adapt, freeze, train_everything
from trainer.contract.plan.hf_config import PublicModel
from trainer.contract.plan.run_plan import NODE, RECOMPUTE
from trainer.contract.plan.sizing import GpuLayout, MemoryPart, estimate_memory_parts, sum_bytes
from trainer.contract.recipe import ParallelRecipe, Recipe

MOST_ROWS = 32  # of a micro-batch: more rows of thousands of tokens make no product faster
CONTEXTS = 128  # the longest context is a multiple of this, or the most that is wanted
ENDS = ("embedding", "head")


@dataclass(frozen=True)
class Devices:
    """The devices of one place. ``memory``: bytes of each. ``itemsize``: bytes of an element of the forward pass. ``logit_rows``, ``in_place``: as in
    ``estimate_memory_parts``."""

    name: Message
    count: int
    memory: float
    itemsize: int = 2
    logit_rows: int | None = 1024
    in_place: bool = False


@dataclass(frozen=True)
class TrainingWay:
    """One way to continue, with the keys by which a recipe asks for it."""

    name: Message
    trained: TrainedParts
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """Whether a way fits on some devices. ``layout``: with which it does; None: with none, and ``memory`` is that of the tightest one.

    ``longest_context``: tokens of a row, up to those for which the model was made; 0 if nothing fits.
    """

    devices: Devices
    way: TrainingWay
    layout: GpuLayout | None
    memory: list[MemoryPart]
    longest_context: int
    recipe: Mapping[str, Any]


def list_training_ways(
    model: ModelSpec, rank: int, frozen: Sequence[str] = (), targets: Sequence[str] | None = None
) -> list[TrainingWay]:
    """Full training, frozen weights, LoRA and DoRA, the one with the most trained parameters first.

    ``rank``: of the adapters. ``frozen``: the patterns of ``adapting.freeze``; none: embedding and head. Raises: RecipeError.
    """
    patterns = list(frozen) or [name for name in ENDS if name == "embedding" or not model.tied]
    adapters: tuple[Literal["lora", "dora"], ...] = ("lora", "dora")
    ways = [
        TrainingWay(Message("plan.full", "full training"), train_everything(model), {}),
        TrainingWay(
            Message("plan.frozen", "frozen: {names}", names=patterns), freeze(model, patterns), {"freeze": patterns}
        ),
    ]
    for kind in adapters:
        keys = {"kind": kind, "rank": rank} | ({"targets": list(targets)} if targets else {})
        name = Message("plan.adapters", "{kind}, rank {rank}", kind={"lora": "LoRA", "dora": "DoRA"}[kind], rank=rank)
        ways.append(TrainingWay(name, adapt(model, kind, rank, targets), {"adapt": keys}))
    return ways


def find_fit(model: ModelSpec, way: TrainingWay, devices: Devices, longest: int, optimizer: str = "adamw") -> Fit:
    """Whether ``way`` fits with the model's context, and the longest context up to ``longest`` with which it does."""

    def estimate(layout: GpuLayout, context: int | None = None) -> list[MemoryPart]:
        of = model if context is None else model.model_copy(update={"context": context})
        return estimate_memory_parts(
            of, layout, devices.memory, optimizer=optimizer, itemsize=devices.itemsize, logit_rows=devices.logit_rows,
            trained=way.trained, in_place=devices.in_place,
        )  # fmt: skip

    def fits(layout: GpuLayout, context: int | None = None) -> bool:
        return sum_bytes(estimate(layout, context)) <= devices.memory

    tensors = _list_tensor_degrees(model, devices.count)
    possible = [GpuLayout(devices.count, tensor, 1, recompute) for tensor in tensors for recompute in RECOMPUTE]
    layout = next((one for one in possible if fits(one)), None)
    if layout is not None:
        rows = 2
        while rows <= MOST_ROWS and fits(replace(layout, micro_sequences=rows)):
            layout, rows = replace(layout, micro_sequences=rows), 2 * rows
    tightest = min(possible, key=lambda one: sum_bytes(estimate(one)))
    shortest = [one for one in possible if one.recompute == "block"]
    low, high = 0, -(-longest // CONTEXTS)  # in units of CONTEXTS: low fits, high + 1 does not or is not wanted
    while low < high:
        middle = (low + high + 1) // 2
        if any(fits(one, min(middle * CONTEXTS, longest)) for one in shortest):
            low = middle
        else:
            high = middle - 1
    keys: dict[str, Any] = {}
    if layout is not None:
        parallel = {"tensor": layout.tensor, "recompute": layout.recompute}
        keys = {
            "model": {"context": model.context}, "parallel": parallel, "batch": {"micro_sequences": layout.micro_sequences},
        } | dict(way.recipe)  # fmt: skip
    return Fit(devices, way, layout, estimate(layout or tightest), min(low * CONTEXTS, longest), keys)


def _list_tensor_degrees(model: ModelSpec, count: int) -> list[int]:
    found = []
    for tensor in (1, 2, 4, 8):
        if tensor > min(NODE, count):
            break
        try:
            ParallelRecipe(tensor=tensor).data_ranks(count, model)
        except RecipeError:
            continue
        found.append(tensor)
    return found


def describe_missing_keys(fits: Sequence[Fit]) -> list[Message]:
    """A remark for each key of the fits' recipes that no recipe has yet."""
    missing = sorted({key for fit in fits for key in fit.way.recipe if key not in Recipe.model_fields})
    return [
        Message(
            "plan.key_to_come",
            "This version plans {key} but its trainer cannot do it yet: recipes have no key {key}.",
            key=key,
        )
        for key in missing
    ]


def convert_fits_to_json(public: PublicModel, fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """The fits, for programs; memory in bytes."""
    return [
        {
            "devices": asdict(fit.devices),
            "way": fit.way.name,
            "trained": fit.way.trained.parameters,
            "share": fit.way.trained.parameters / public.spec.parameters,
            "fits": fit.layout is not None,
            "layout": None if fit.layout is None else asdict(fit.layout),
            "memory": [asdict(part) for part in fit.memory],
            "memory_needed": sum_bytes(fit.memory),
            "longest_context": fit.longest_context,
            "recipe": fit.recipe,
        }
        for fit in fits
    ]
