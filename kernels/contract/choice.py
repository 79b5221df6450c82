"""``kernels.yaml`` as data: which implementation of each op runs, by device class, and what ``auto`` stands for.

    cpu:
      attention: auto                       # what tuning found fastest on this machine
      swiglu: reference                     # by name: on every machine
    cuda:
      attention: varlen, flex, reference    # several names: the first that works on the device

Nothing here imports an op, so that the factory can resolve the choice of code that it may not import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

AUTO = "auto"
Choice = dict[str, str]  # op → implementation, or several names in order of preference (see ``names_in``)

PLAIN = {"adamw": "fused"}  # the plain expression of every op; AdamW's is torch's own kernel

# What ``auto`` runs before tuning; an op that is not listed runs its reference. On a GPU these are the fused kernels: they hold neither
# the logits of a whole batch nor a mask [T, T], and attention's blocks are made once a batch. ``python -m benchmarks.gpu`` compares each
# kernel with the others; its results are the reason to change a row.
_SM80 = {
    "rms_norm": "triton, reference",
    "add_rms_norm": "triton, reference",
    "qk_norm_rope": "triton, reference",
    "swiglu": "triton, reference",
    "attention": "varlen, flex, reference",  # varlen is FlashAttention: bf16 alone
    "linear_cross_entropy": "triton, chunked_compiled, reference",
    "embedding": "triton, reference",
    "newton_schulz": "reference",  # cuBLAS's batched products
    "adamw": "fused",
}
# benchmarks/results/nvidia-h200-*.md: torch's own embedding, with its gradient, takes 0.36 to 0.65 of the Triton kernel's time.
_SM90 = _SM80 | {"embedding": "reference"}
EVERY_OP = tuple(_SM80)
UNTUNED: dict[str, dict[int, Choice]] = {  # by device class, by least compute capability
    "cpu": {0: PLAIN},
    "cuda": {0: PLAIN, 80: _SM80, 90: _SM90, 100: _SM80},
}
CAPABILITY = 80  # assumed for "cuda" where no machine is named


def untuned_implementation(op: str, machine: str = "cpu") -> str:
    """The implementation that ``auto`` runs before tuning. ``machine``: a class of ``kernels.contract.machine``, or a device class.

    >>> (untuned_implementation("attention", "cuda-sm90-nvidia-h100-80gb-hbm3"),
    ...  untuned_implementation("attention", "cuda-sm75-tesla-t4"), untuned_implementation("attention"))
    ('varlen, flex, reference', 'reference', 'reference')
    """
    device = machine.partition("-")[0]
    found = re.match(r"cuda-sm(\d+)", machine)
    capability = int(found.group(1)) if found else CAPABILITY
    rows = UNTUNED.get(device, {0: {}})
    return rows[max(least for least in rows if least <= capability)].get(op, "reference")


def implementation_names(choice: str) -> list[str]:
    """The implementations of a choice, the preferred one first.

    >>> implementation_names("varlen, flex, reference")
    ['varlen', 'flex', 'reference']
    """
    return [name.strip() for name in choice.split(",")]


def replace_auto(section: Mapping[str, str], tuned: Mapping[str, str] | None = None, machine: str = "cpu") -> Choice:
    """A section of ``kernels.yaml`` with every ``auto`` replaced: by ``tuned``, else by what runs untuned on ``machine``."""
    chosen = tuned or {}
    return {
        op: chosen.get(op, untuned_implementation(op, machine)) if implementation == AUTO else implementation
        for op, implementation in section.items()
    }


def auto_ops(section: Mapping[str, str]) -> list[str]:
    """The ops of a section whose implementation is ``auto``."""
    return [op for op, implementation in section.items() if implementation == AUTO]


def device_section(text: str | bytes | None, device: str) -> Choice:
    """A device's section of ``kernels.yaml``, as written. A value that is not a map reads as empty; ``load_choice`` refuses it."""
    found = yaml.safe_load(text or "")
    section = found.get(device) if isinstance(found, dict) else None
    return {str(op): str(name) for op, name in section.items()} if isinstance(section, dict) else {}


def resolve_auto_in_text(
    text: str | bytes, device: str, tuned: Mapping[str, str] | None = None, machine: str | None = None
) -> str:
    """``kernels.yaml`` for one device, without any ``auto``: its section resolved, and ``fallback`` as it stands.

    >>> print(resolve_auto_in_text("cpu: {attention: auto, adamw: auto}", "cpu", {"attention": "native"}), end="")
    cpu:
      attention: native
      adamw: fused
    """
    document = yaml.safe_load(text) or {}
    kept: dict[str, Any] = {device: replace_auto(device_section(text, device), tuned, machine or device)}
    if isinstance(document, dict) and "fallback" in document:
        kept["fallback"] = document["fallback"]
    return yaml.safe_dump(kept, sort_keys=False)
