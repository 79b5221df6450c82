"""Lists the presets of ``factory init``, and checks whether a recipe's model fits into the memory of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from factory.core.launching import GPU_DEVICES
from kernels.contract.message import Message
from trainer.contract.errors import RecipeError
from trainer.contract.plan.sizing import GB, GpuLayout, estimate_memory_parts, sum_bytes
from trainer.contract.recipe import Recipe

CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Preset:
    """A preset: a model size with the hardware for it. Its recipe is the file of the same name in ``policies/recipes/``."""

    gpus: int  # number of GPUs that the recipe is made for; 0: it is made for CPUs
    size: str  # description of the size, for a person


PRESETS: Mapping[str, Preset] = MappingProxyType(  # the smallest first
    {
        "laptop": Preset(0, "12.6 M weights, 2 cores"),
        "one-gpu": Preset(1, "214 M weights, 1 GPU"),
        "eight-gpus": Preset(8, "1.04 B weights, 8 GPUs"),
    }
)


@dataclass(frozen=True)
class Hardware:
    """The devices and memory of the machine that trains."""

    gpus: tuple[float, ...]  # memory of each GPU in bytes
    memory: float  # memory of the host in bytes
    ranks: int  # processes that share a step

    @classmethod
    def of_this_machine(cls) -> Hardware:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        with suppress(OSError, ValueError):  # no control group, or its limit is 'max'
            memory = min(memory, float(CGROUP.read_text()))
        gpus: tuple[float, ...] = ()
        if any(found for name in GPU_DEVICES for found in Path("/dev").glob(name)):  # torch takes a second to import
            import torch

            devices = range(torch.cuda.device_count())
            gpus = tuple(float(torch.cuda.get_device_properties(number).total_memory) for number in devices)
        return cls(gpus, memory, max(1, len(gpus)))

    @property
    def device_memory(self) -> float:
        """Bytes of the smallest GPU, or of main memory if there is no GPU."""
        return min(self.gpus, default=self.memory)

    def __str__(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)} of {min(self.gpus) / GB:.0f} GB"
        return f"no GPU and {self.memory / GB:.0f} GB RAM"


def estimate_memory_per_device(recipe: Recipe, ranks: int, device_bytes: float, itemsize: int) -> float:
    """Return the bytes that each of ``ranks`` devices needs. The layout is the recipe's own (``trainer.contract.plan.sizing``).

    ``device_bytes``: the memory of one device. All logits of a micro-batch are in memory at one time. Raises: RecipeError if ``ranks`` devices cannot
    share a step of the recipe.
    """
    data = recipe.parallel.data_ranks(ranks, recipe.model)
    recipe.batch.refuse_uneven_split(data)
    micro = recipe.batch.micro_sequences or recipe.batch.sequences // data
    layout = GpuLayout(ranks, recipe.parallel.tensor, micro, recipe.parallel.recompute, recipe.parallel.replicas)
    parts = estimate_memory_parts(
        recipe.model, layout, device_bytes, optimizer=recipe.optimizer.name, itemsize=itemsize, logit_rows=None
    )
    return sum_bytes(parts)


def estimate_memory_here(recipe: Recipe, machine: Hardware) -> float:
    """Return the bytes that each GPU of a machine needs for a recipe; of main memory if there is no GPU. Raises: RecipeError as above."""
    itemsize = 2 if machine.gpus and recipe.precision != "fp32" else 4
    return estimate_memory_per_device(recipe, machine.ranks, machine.device_memory, itemsize)


def explain_why_recipe_is_too_large(recipe: Recipe, machine: Hardware, preset_gpus: int = 0) -> str:
    """Return why a machine cannot train a recipe; '' if it can. ``preset_gpus``: the number of GPUs that the recipe's preset is made for."""
    if preset_gpus and not machine.gpus:
        size = estimate_memory_per_device(recipe, preset_gpus, 0.0, 2)
        return Message(
            "presets.needs_gpus",
            "The recipe needs {gpus:,|GPU|GPUs} with {size:.1f} GB each, but this machine has {machine}.",
            gpus=preset_gpus,
            size=size / GB,
            machine=str(machine),
        )
    try:
        size = estimate_memory_here(recipe, machine)
    except RecipeError as error:
        return Message(
            "presets.not_shareable",
            "This machine has {machine}. The recipe's training step cannot be split among these devices: {reason}.",
            machine=str(machine),
            reason=error,
        )
    if size <= machine.device_memory:
        return ""
    return Message(
        "presets.needs_memory",
        "The recipe needs {size:.1f} GB {where}, but this machine has {machine}.",
        size=size / GB,
        where="on each GPU" if machine.gpus else "of memory",
        machine=str(machine),
    )


def find_largest_fitting_preset(machine: Hardware, folder: Path) -> str:
    """Return the name of the largest preset that fits a machine; '' if none fits. ``folder``: the folder of the recipes."""
    found = [
        name
        for name, preset in PRESETS.items()
        if not explain_why_recipe_is_too_large(Recipe.load(folder / f"{name}.yaml"), machine, preset.gpus)
    ]
    return found[-1] if found else ""
