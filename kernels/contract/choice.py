"""Reads ``kernels.yaml``, which chooses an implementation of each op for each device class, and resolves ``auto``.

    cpu:
      attention: auto                       # the implementation that tuning found fastest on this machine
      swiglu: reference                     # one name: this implementation on every machine
    cuda:
      attention: varlen, flex, reference    # several names: the first implementation that works on the device

This module imports no op. Therefore the factory can resolve a choice whose code it must not import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

AUTO = "auto"
Choice = dict[
    str, str
]  # op → implementation, or several names in order of preference (see ``split_implementation_names``)

PLAIN = {"adamw": "fused"}  # plain implementations other than the reference: AdamW's is torch's own kernel
# What holds neither the scores of a whole row nor the logits of a batch. Only some models call these ops.
_CPU = PLAIN | {"general_attention": "blocks", "softcapped_cross_entropy": "chunked"}

# The implementations that ``auto`` runs before tuning. An op that is not listed runs its reference. On a GPU these are the fused kernels. They
# store neither the logits of a whole batch nor a mask [T, T], and make the blocks of attention once for each batch. ``python -m benchmarks.gpu``
# compares each kernel with the others. Change a row only because of its results.
_SM80 = {
    "rms_norm": "triton, reference",
    "add_rms_norm": "triton, reference",
    "qk_norm_rope": "triton, reference",
    "swiglu": "triton, reference",
    "attention": "varlen, flex, reference",  # varlen is FlashAttention, which is only for bf16
    "linear_cross_entropy": "triton, chunked_compiled, reference",
    "general_attention": "flex, reference",
    "softcapped_cross_entropy": "chunked_compiled, reference",
    "embedding": "triton, reference",
    "newton_schulz": "reference",  # cuBLAS's batched products
    "adamw": "fused",
}
# benchmarks/results/nvidia-h200-*.md: torch's own embedding, with its gradient, takes 0.36 to 0.65 of the Triton kernel's time.
_SM90 = _SM80 | {"embedding": "reference"}
EVERY_OP = tuple(_SM80)
UNTUNED: dict[str, dict[int, Choice]] = {  # by device class, by least compute capability
    "cpu": {0: _CPU},
    "cuda": {0: PLAIN, 80: _SM80, 90: _SM90, 100: _SM80},
}
CAPABILITY = 80  # assumed for "cuda" where no machine is named


def find_default_implementation(op: str, machine: str = "cpu") -> str:
    """The implementation that ``auto`` runs before tuning. ``machine``: a class of ``kernels.contract.machine``, or a device class.

    >>> (find_default_implementation("attention", "cuda-sm90-nvidia-h100-80gb-hbm3"),
    ...  find_default_implementation("attention", "cuda-sm75-tesla-t4"), find_default_implementation("attention"))
    ('varlen, flex, reference', 'reference', 'reference')
    """
    device = machine.partition("-")[0]
    found = re.match(r"cuda-sm(\d+)", machine)
    capability = int(found.group(1)) if found else CAPABILITY
    rows = UNTUNED.get(device, {0: {}})
    return rows[max(least for least in rows if least <= capability)].get(op, "reference")


def split_implementation_names(choice: str) -> list[str]:
    """The names of the implementations in a choice, the preferred one first.

    >>> split_implementation_names("varlen, flex, reference")
    ['varlen', 'flex', 'reference']
    """
    return [name.strip() for name in choice.split(",")]


def replace_auto(section: Mapping[str, str], tuned: Mapping[str, str] | None = None, machine: str = "cpu") -> Choice:
    """A section of ``kernels.yaml`` with each ``auto`` replaced: by the op's entry in ``tuned``, else by ``find_default_implementation``."""
    chosen = tuned or {}
    return {
        op: chosen.get(op, find_default_implementation(op, machine)) if implementation == AUTO else implementation
        for op, implementation in section.items()
    }


def list_auto_ops(section: Mapping[str, str]) -> list[str]:
    """The ops of a section whose implementation is ``auto``."""
    return [op for op, implementation in section.items() if implementation == AUTO]


def read_device_section(text: str | bytes | None, device: str) -> Choice:
    """The section of a device class in the text of ``kernels.yaml``. It is empty if the value is not a map, which ``load_choice`` refuses."""
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
    kept: dict[str, Any] = {device: replace_auto(read_device_section(text, device), tuned, machine or device)}
    if isinstance(document, dict) and "fallback" in document:
        kept["fallback"] = document["fallback"]
    return yaml.safe_dump(kept, sort_keys=False)
